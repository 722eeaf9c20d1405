"""What is published when: only complete files, each once, never an older one."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from busync.daemon.watch import Watcher


class Looks:
    """A watcher, and what it told."""

    def __init__(self, source: Path) -> None:
        self.told: list[tuple[str, str]] = []
        self.watcher = Watcher(source, lambda path, reason: self.told.append((path.name, reason)))

    def __call__(self, times: int = 1) -> list[str]:
        found = [self.watcher.look() for _ in range(times)]
        return [path.name for path in found if path is not None]


def write(path: Path, value: float = 1.0, mtime: int | None = None) -> None:
    save_file({"w": torch.full((4,), value)}, path)
    if mtime is not None:
        os.utime(path, (mtime, mtime))


def replace(path: Path, value: float = 1.0, mtime: int | None = None) -> None:
    write(path.with_suffix(".part"), value, mtime)
    path.with_suffix(".part").rename(path)


def test_a_file_is_handed_out_once_per_state_and_after_two_equal_looks(tmp_path: Path) -> None:
    looks = Looks(tmp_path / "w.safetensors")
    write(tmp_path / "w.safetensors", mtime=100)
    assert looks() == []
    assert looks() == ["w.safetensors"]
    assert looks(3) == []
    replace(tmp_path / "w.safetensors", 2, mtime=50)  # an older checkpoint put back is a new state of this file
    assert looks() == []
    assert looks() == ["w.safetensors"]
    assert looks(3) == []
    assert looks.told == []


def test_a_file_that_turns_out_to_be_bad_hides_no_older_one(tmp_path: Path) -> None:
    looks = Looks(tmp_path)
    write(tmp_path / "1.safetensors", mtime=100)
    write(tmp_path / "2.safetensors", mtime=200)
    assert looks(2) == ["2.safetensors"]
    looks.watcher.reject()
    assert looks(3) == ["1.safetensors"]
    replace(tmp_path / "2.safetensors", 2, mtime=300)
    assert looks(3) == ["2.safetensors"], "a new state is judged anew"


def test_a_file_that_is_being_written_is_left_alone_without_a_word(tmp_path: Path) -> None:
    path = tmp_path / "w.safetensors"
    write(path)
    data = path.read_bytes()
    path.unlink()
    looks = Looks(tmp_path)
    for length in range(0, len(data), 10):
        path.write_bytes(data[:length])
        assert looks() == []
    assert looks.told == []
    path.write_bytes(data)
    assert looks(2) == ["w.safetensors"]


def test_a_broken_file_is_told_of_once_per_state_and_the_next_good_one_is_published(tmp_path: Path) -> None:
    looks = Looks(tmp_path)
    write(tmp_path / "a.safetensors", mtime=100)
    assert looks(2) == ["a.safetensors"]
    (tmp_path / "b.safetensors").write_bytes(b"rubbish!")
    assert looks(4) == []
    assert [name for name, _ in looks.told] == ["b.safetensors"]
    (tmp_path / "b.safetensors").write_bytes(b"more rubbish")
    assert looks(4) == []
    assert [name for name, _ in looks.told] == ["b.safetensors"] * 2
    replace(tmp_path / "b.safetensors")
    assert looks(2) == ["b.safetensors"]
    write(tmp_path / "c.safetensors")
    assert looks(3) == ["c.safetensors"]
    assert len(looks.told) == 2


def test_beside_a_broken_newest_file_an_older_good_one_counts_but_never_goes_back(tmp_path: Path) -> None:
    write(tmp_path / "a.safetensors", mtime=100)
    write(tmp_path / "b.safetensors", mtime=200)
    (tmp_path / "c.safetensors").write_bytes(b"rubbish!")
    looks = Looks(tmp_path)
    assert looks(2) == ["b.safetensors"]
    (tmp_path / "b.safetensors").unlink()
    assert looks(4) == []
    write(tmp_path / "d.safetensors", mtime=150)
    assert looks(4) == []
    write(tmp_path / "e.safetensors", mtime=201)
    assert looks(4) == ["e.safetensors"]


def test_files_of_one_instant_go_by_name(tmp_path: Path) -> None:
    write(tmp_path / "a.safetensors", mtime=100)
    looks = Looks(tmp_path)
    assert looks(2) == ["a.safetensors"]
    write(tmp_path / "b.safetensors", mtime=100)
    assert looks(3) == ["b.safetensors"]
    assert looks(3) == []


def test_a_path_that_is_not_there_is_waited_for(tmp_path: Path) -> None:
    looks = Looks(tmp_path / "w.safetensors")
    assert looks(3) == []
    assert looks.told == [("w.safetensors", "no such file or directory; waiting for it")]
    write(tmp_path / "w.safetensors")
    assert looks(2) == ["w.safetensors"]
    (tmp_path / "w.safetensors").unlink()
    assert looks(3) == []
    assert len(looks.told) == 2


def test_a_path_without_a_known_suffix_is_told_of_once(tmp_path: Path) -> None:
    (tmp_path / "w.txt").write_text("x")
    looks = Looks(tmp_path / "w.txt")
    assert looks(3) == []
    assert looks.told == [("w.txt", "the suffix '.txt' is not known; waiting for it")]


@pytest.mark.parametrize("suffix", [".pt", ".pth", ".bin"])
def test_pickled_files_are_watched_too(suffix: str, tmp_path: Path) -> None:
    looks = Looks(tmp_path)
    torch.save({"w": torch.ones(2)}, tmp_path / f"w{suffix}")
    whole = (tmp_path / f"w{suffix}").read_bytes()
    (tmp_path / f"w{suffix}").write_bytes(whole[:-1])
    assert looks(3) == []
    (tmp_path / f"w{suffix}").write_bytes(whole)
    assert looks(2) == [f"w{suffix}"]
