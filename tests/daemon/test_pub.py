"""``busync-pub`` as a process: what it publishes, what it says, how it ends."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import time
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from busync.daemon import checkpoints
from busync.daemon.console import CommandError, Events
from busync.daemon.pub import Order, Sender
from busync.handles import content_digest
from tests.daemon.commands import Command, Commands


def weights(value: float) -> dict[str, torch.Tensor]:
    return {"w": torch.full((1000,), float(value)), "b": torch.arange(7), "none": torch.empty(0, 3)}


def put(path: Path, value: float) -> str:
    """Put weights at a path as a trainer should; returns their digest."""
    temporary = path.with_suffix(".part")
    (torch.save if path.suffix == ".pt" else save_file)(weights(value), temporary)
    temporary.rename(path)
    return content_digest(weights(value)).hex()


def assert_silent_end(command: Command, number: int = signal.SIGTERM) -> None:
    assert command.stop(number) == 0
    assert command.stderr == ""


@pytest.mark.parametrize("name", ["w.safetensors", "w.pt"])
def test_a_file_is_published_once_and_served(name: str, commands: Commands, tmp_path: Path) -> None:
    digest = put(tmp_path / name, 1)
    pub = commands.pub(tmp_path / name)
    published = pub.event("published")
    assert published["version"] == 1
    assert published["label"] == name
    assert (published["tensors"], published["bytes"]) == (3, 4056)
    assert published["topic"] == "default"
    for _ in range(2):
        sub = commands.sub("--verify", "--count", 1)
        assert sub.wait() == 0
        adopted = sub.event("adopted")
        assert adopted["digest"] == digest
        assert adopted["verified"] is True
        assert adopted["version"] == 1
    assert_silent_end(pub)
    assert [event["event"] for event in pub.events()] == ["serving", "published"]
    assert os.listdir(commands.runtime / "policy") == ["lock"]


def test_the_newest_checkpoint_of_a_directory_is_published(commands: Commands, tmp_path: Path) -> None:
    put(tmp_path / "a.safetensors", 1)
    put(tmp_path / "b.pt", 2)
    os.utime(tmp_path / "a.safetensors", (1, 1))
    pub = commands.pub(tmp_path, "--label", "mine", "--topic", "x/y")
    published = pub.event("published")
    assert (published["label"], published["file"]) == ("mine", str(tmp_path / "b.pt"))
    sub = commands.sub("--topic", "x/y", "--count", 1)
    assert sub.event("adopted")["label"] == "mine"
    assert sub.wait() == 0
    assert_silent_end(pub, signal.SIGINT)


def test_watching_publishes_each_new_complete_file_and_nothing_else(commands: Commands, tmp_path: Path) -> None:
    path = tmp_path / "w.safetensors"
    pub = commands.pub(path, "--watch", "--wait", "all")
    assert pub.event("skipped")["reason"] == "no such file or directory; waiting for it"
    sub = commands.sub("--verify", "--name", "reader")
    sub.event("attached")
    for version in (1, 2, 3):
        digest = put(path, version)
        published, adopted = pub.event("published"), sub.event("adopted")
        assert published["acked"] == ["reader"]
        assert (published["version"], adopted["version"], adopted["skipped"]) == (version, version, 0)
        assert adopted["digest"] == digest
    data = path.read_bytes()
    path.write_bytes(data[:500])
    assert "incomplete" in pub.event("skipped")["reason"]
    path.write_bytes(b"")
    assert "incomplete" in pub.event("skipped")["reason"]
    digest = put(path, 4)
    assert pub.event("published")["version"] == 4
    assert sub.event("adopted")["digest"] == digest
    assert_silent_end(pub)
    assert_silent_end(sub)
    assert [event["event"] for event in pub.events()].count("skipped") == 3


def test_a_file_that_cannot_be_published_does_not_end_the_watch(commands: Commands, tmp_path: Path) -> None:
    torch.save({"w": torch.ones(2), "bad": torch.eye(3).to_sparse()}, tmp_path / "bad.pt")
    pub = commands.pub(tmp_path, "--watch")
    assert "'bad'" in pub.event("error")["reason"]
    put(tmp_path / "good.pt", 1)
    assert pub.event("published")["version"] == 1
    assert_silent_end(pub)


def test_a_file_that_cannot_be_published_ends_a_single_publish(commands: Commands, tmp_path: Path) -> None:
    torch.save({"w": torch.ones(2), "bad": torch.eye(3).to_sparse()}, tmp_path / "bad.pt")
    pub = commands("busync-pub", "policy", tmp_path)
    assert pub.wait() == 1
    assert pub.stderr.startswith("busync-pub: 'bad' cannot be published:")
    assert pub.stderr.count("\n") == 1


def test_waiting_for_readers_ends_with_the_timeout_and_serving_goes_on(commands: Commands, tmp_path: Path) -> None:
    put(tmp_path / "w.pt", 1)
    pub = commands.pub(tmp_path / "w.pt", "--wait", 1, "--timeout-s", 0.2)
    assert pub.event("published")["acked"] == []
    assert_silent_end(pub)


@pytest.mark.parametrize("suffix", [".safetensors", ".pt"])
def test_when_full_skip_publishes_nothing_and_says_so(suffix: str, commands: Commands, tmp_path: Path) -> None:
    path = tmp_path / f"w{suffix}"
    put(path, 1)
    pub = commands.pub(path, "--watch", "--max-segments", 2, "--when-full", "skip")
    sub = commands.sub("--exec", "sleep 60")
    sub.event("adopted")
    assert pub.event("published")["version"] == 1
    put(path, 2)
    assert pub.event("published")["version"] == 2
    put(path, 3)
    assert pub.event("skipped")["reason"] == "all 2 segments are in use"
    assert_silent_end(sub)
    put(path, 4)
    assert pub.event("published")["version"] == 3
    assert_silent_end(pub)


def test_a_second_publisher_is_told_who_is_there(commands: Commands, tmp_path: Path) -> None:
    put(tmp_path / "w.pt", 1)
    pub = commands.pub(tmp_path / "w.pt")
    second = commands("busync-pub", "policy", tmp_path / "w.pt")
    assert second.wait() == 1
    assert f"in use by pid {pub.pid}" in second.stderr
    assert second.stderr.count("\n") == 1
    assert_silent_end(pub)


@pytest.mark.parametrize("name", ["bus", "door"])
def test_a_foreign_file_in_the_way_is_left_there_and_told_of(name: str, commands: Commands, tmp_path: Path) -> None:
    put(tmp_path / "w.pt", 1)
    (commands.runtime / "policy").mkdir(mode=0o700)
    (commands.runtime / "policy" / name).write_text("precious")
    pub = commands("busync-pub", "policy", tmp_path / "w.pt")
    assert pub.wait() == 1
    assert pub.stderr.count("\n") == 1
    assert str(commands.runtime / "policy" / name) in pub.stderr
    assert (commands.runtime / "policy" / name).read_text() == "precious"


def test_options_that_the_library_refuses_are_wrong_usage(commands: Commands, tmp_path: Path) -> None:
    put(tmp_path / "w.pt", 1)
    pub = commands("busync-pub", "policy", tmp_path / "w.pt", "--max-segments", 1)
    assert pub.wait() == 2
    assert pub.stderr == "busync-pub: max_segments=1 is not allowed; use a whole number from 2 to 1024\n"


def read_slowly() -> None:
    checkpoints.PIECE_BYTES = 1  # type: ignore[misc]


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_ends_a_read_at_once(number: int, commands: Commands, tmp_path: Path) -> None:
    save_file({"w": torch.zeros(20_000_000, dtype=torch.uint8)}, tmp_path / "w.safetensors")
    pub = commands.pub(tmp_path / "w.safetensors", prepare=read_slowly)
    time.sleep(0.3)
    assert_silent_end(pub, number)
    assert [event["event"] for event in pub.events()] == ["serving"]


def put_zeros(path: Path, nbytes: int) -> None:
    """Put a file of two tensors at a path. It is sparse, so it takes no disk."""
    half = nbytes // 2
    header = {
        "a": {"dtype": "F32", "shape": [half // 4], "data_offsets": [0, half]},
        "b": {"dtype": "F32", "shape": [half // 4], "data_offsets": [half, nbytes]},
    }
    text = json.dumps(header).encode()
    temporary = path.with_suffix(".part")
    temporary.write_bytes(len(text).to_bytes(8, "little") + text)
    os.truncate(temporary, 8 + len(text) + nbytes)
    temporary.rename(path)


def test_a_file_larger_than_the_memory_is_refused_with_both_figures(commands: Commands, tmp_path: Path) -> None:
    put_zeros(tmp_path / "w.safetensors", 1 << 42)
    pub = commands("busync-pub", "policy", tmp_path)
    assert pub.wait() == 1
    assert pub.stderr.startswith(f"busync-pub: {1 << 42} bytes of shared memory cannot be reserved: ")
    assert pub.stderr.count("\n") == 1


def test_a_file_without_tensors_is_a_version_too(commands: Commands, tmp_path: Path) -> None:
    save_file({}, tmp_path / "w.safetensors")
    pub = commands.pub(tmp_path)
    assert pub.event("published")["tensors"] == 0
    sub = commands.sub("--verify", "--count", 1)
    assert sub.wait() == 0
    assert_silent_end(pub)


def test_a_large_file_is_in_memory_once(commands: Commands, tmp_path: Path) -> None:
    nbytes = 512 << 20
    path = tmp_path / "w.safetensors"
    pub = commands.pub(path, "--watch")
    pub.event("skipped")
    idle = memory(pub.pid, "VmRSS")
    put_zeros(path, nbytes)
    assert pub.event("published")["bytes"] == nbytes
    assert memory(pub.pid, "VmHWM") - idle < 1.1 * nbytes
    assert_silent_end(pub)


def memory(pid: int, what: str) -> int:
    """Bytes of a process's memory, as the kernel counts them."""
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return int(next(line for line in lines if line.startswith(f"{what}:")).split()[1]) * 1024


def test_a_watch_ends_when_nobody_reads_its_output(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    put(tmp_path / "w.pt", 1)
    events = Events("busync-pub", as_json=False)

    def tell(event: str, text: str, **fields: object) -> None:
        if event == "published":
            raise CommandError("nobody reads the output any more")

    monkeypatch.setattr(events, "tell", tell)
    order = Order(
        endpoint=str(tmp_path / "bus"), source=tmp_path / "w.pt", watch=True, topic="default", label=None, wait="none",
        timeout=1, max_segments=2, when_full="wait", lease_timeout=1,
    )  # fmt: skip
    with pytest.raises(CommandError):
        asyncio.run(asyncio.wait_for(Sender(order, events).run(), 20))


def test_lines_are_for_people_unless_json_is_asked_for(commands: Commands, tmp_path: Path) -> None:
    put(tmp_path / "w.pt", 1)
    pub = commands("busync-pub", "policy", tmp_path / "w.pt")
    pub.until(lambda: pub.stdout.count("\n") == 2, "two lines")
    lines = pub.stdout.splitlines()
    assert lines[0] == f"serving {tmp_path / 'w.pt'} at policy"
    assert lines[1].startswith("default version 1 (w.pt): 3 tensors, 4,056 bytes in ")
    sub = commands("busync-sub", "policy", "--count", 1)
    assert sub.wait() == 0
    assert sub.stdout.startswith("attached to policy\ndefault version 1 (w.pt): 3 tensors, ")
    assert_silent_end(pub)
