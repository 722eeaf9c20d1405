"""Files of weights: complete or not, read and written right."""

from __future__ import annotations

import json
import os
import stat
import threading
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from busync.daemon import checkpoints
from busync.daemon.checkpoints import CheckpointError, SafetensorsFile
from busync.errors import ExportError
from busync.handles.tensors import TORCH_DTYPES
from busync.manifest import DTYPES

WEIGHTS = {
    "layer.weight": torch.arange(12, dtype=torch.float32).reshape(3, 4),
    "layer.bias": torch.ones(3, dtype=torch.bfloat16),
    "count": torch.tensor(7),
    "nothing": torch.empty(0, 5),
    "f8": torch.ones(3).to(torch.float8_e4m3fn),
    "complex": torch.tensor([1 + 2j]),
}


def equal(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Equal dtype, shape and bytes."""
    return (
        one.dtype == other.dtype
        and one.shape == other.shape
        and torch.equal(one.contiguous().view(-1).view(torch.uint8), other.contiguous().view(-1).view(torch.uint8))
    )


def empty_like_layout(file: SafetensorsFile) -> dict[str, torch.Tensor]:
    return {name: torch.zeros(size, dtype=TORCH_DTYPES[dtype]) for name, (dtype, size) in file.layout.items()}


def read(path: Path) -> dict[str, torch.Tensor]:
    with SafetensorsFile(path) as file:
        tensors = empty_like_layout(file)
        file.read_into(tensors, lambda nbytes: None, threading.Event())
    return tensors


def touch(path: Path, seconds: float) -> None:
    os.utime(path, ns=(int(seconds * 1e9), int(seconds * 1e9)))


def save_safetensors(path: Path) -> None:
    save_file(WEIGHTS, path)


def save_pickled(path: Path) -> None:
    torch.save(WEIGHTS, path)


def test_a_safetensors_file_is_read_into_given_memory(tmp_path: Path) -> None:
    save_file(WEIGHTS, tmp_path / "w.safetensors", metadata={"made": "here"})
    tensors = read(tmp_path / "w.safetensors")
    assert tensors.keys() == WEIGHTS.keys()
    assert all(equal(tensors[name], tensor) for name, tensor in WEIGHTS.items())


def test_reading_tells_of_every_byte_and_can_be_stopped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checkpoints, "PIECE_BYTES", 1000)
    save_file({"w": torch.arange(10_000, dtype=torch.int32)}, tmp_path / "w.safetensors")
    pieces: list[int] = []
    stop = threading.Event()
    with SafetensorsFile(tmp_path / "w.safetensors") as file:
        tensors = empty_like_layout(file)
        file.read_into(tensors, pieces.append, stop)
        assert sum(pieces) == file.nbytes == 40_000
        assert max(pieces) == 1000
        assert torch.equal(tensors["w"], torch.arange(10_000, dtype=torch.int32))
        tensors["w"].zero_()
        file.read_into(tensors, lambda nbytes: stop.set(), stop)
        assert int(tensors["w"].count_nonzero()) == 249


@pytest.mark.parametrize("dtype", sorted(DTYPES.keys() - {"complex32", "complex128"}))
def test_every_dtype_of_the_format_survives_write_and_read(dtype: str, tmp_path: Path) -> None:
    tensor = torch.arange(40, dtype=torch.uint8).clamp(max=1).view(TORCH_DTYPES[dtype])
    checkpoints.write({"w": tensor}, tmp_path / "w.safetensors", {})
    assert equal(read(tmp_path / "w.safetensors")["w"], tensor)


@pytest.mark.parametrize("make", [save_safetensors, save_pickled])
def test_a_file_that_was_cut_anywhere_is_incomplete(make: object, tmp_path: Path) -> None:
    assert callable(make)
    suffix = ".safetensors" if make is save_safetensors else ".pt"
    whole = tmp_path / f"whole{suffix}"
    make(whole)
    checkpoints.check(whole)
    data = whole.read_bytes()
    cut = tmp_path / f"cut{suffix}"
    for length in {*range(0, len(data), 37), *range(min(24, len(data))), len(data) - 1}:
        cut.write_bytes(data[:length])
        with pytest.raises(CheckpointError):
            checkpoints.check(cut)


def test_a_file_with_something_behind_it_is_refused(tmp_path: Path) -> None:
    save_file(WEIGHTS, tmp_path / "w.safetensors")
    with (tmp_path / "w.safetensors").open("ab") as file:
        file.write(b"x")
    with pytest.raises(CheckpointError, match="incomplete or damaged"):
        checkpoints.check(tmp_path / "w.safetensors")


def with_header(path: Path, header: object, data: bytes = b"") -> None:
    text = json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + data)


@pytest.mark.parametrize(
    "header",
    [
        [],
        {"w": {}},
        {"w": {"dtype": "F32", "shape": [1], "data_offsets": [0, 8]}},
        {"w": {"dtype": "F32", "shape": [2], "data_offsets": [4, 12]}},
        {"w": {"dtype": "F32", "shape": [-1], "data_offsets": [0, 8]}},
        {"w": {"dtype": "F32", "shape": [1 << 62, 1 << 62], "data_offsets": [0, 8]}},
        {"w": {"dtype": "F4", "shape": [16], "data_offsets": [0, 8]}},
        {"w": {"dtype": "Q9", "shape": [1], "data_offsets": [0, 8]}},
        {name: {"dtype": "U8", "shape": [6], "data_offsets": place} for name, place in (("a", [0, 6]), ("b", [2, 8]))},
    ],
)
def test_a_header_that_lies_is_refused(header: object, tmp_path: Path) -> None:
    with_header(tmp_path / "w.safetensors", header, bytes(8))
    with pytest.raises(CheckpointError):
        SafetensorsFile(tmp_path / "w.safetensors")


def test_a_huge_header_is_refused_before_it_is_read(tmp_path: Path) -> None:
    path = tmp_path / "w.safetensors"
    path.write_bytes((1 << 40).to_bytes(8, "little"))
    os.truncate(path, 1 << 41)  # sparse
    with pytest.raises(CheckpointError, match="more than the format allows"):
        SafetensorsFile(path)


def test_a_file_that_changes_while_it_is_read_is_noticed(tmp_path: Path) -> None:
    path = tmp_path / "w.safetensors"
    save_file(WEIGHTS, path)
    with SafetensorsFile(path) as file:
        touch(path, 1)
        with pytest.raises(CheckpointError, match="changed while it was read"):
            file.read_into(empty_like_layout(file), lambda nbytes: None, threading.Event())
    save_file(WEIGHTS, path)
    with SafetensorsFile(path) as file:
        os.truncate(path, 100)
        with pytest.raises(CheckpointError, match="changed while it was read"):
            file.read_into(empty_like_layout(file), lambda nbytes: None, threading.Event())


def test_a_pipe_in_place_of_a_file_stops_nobody(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "w.safetensors")
    with pytest.raises(CheckpointError):
        SafetensorsFile(tmp_path / "w.safetensors")
    with pytest.raises(CheckpointError, match="not a file"):
        checkpoints.candidates(tmp_path / "w.safetensors")
    assert checkpoints.candidates(tmp_path) == []


@pytest.mark.parametrize("mapped", [False, True])
def test_a_pickled_file_gives_tensors_and_values(mapped: bool, tmp_path: Path) -> None:
    content = {"model": WEIGHTS, "step": 5, "layers": [torch.ones(1), torch.zeros(2)]}
    torch.save(content, tmp_path / "w.pt")
    flat = checkpoints.load_pickled(tmp_path / "w.pt", mapped=mapped)
    assert flat.values == {"step": 5}
    assert flat.tensors.keys() == {f"model.{name}" for name in WEIGHTS} | {"layers.0", "layers.1"}
    assert all(equal(flat.tensors[f"model.{name}"], tensor) for name, tensor in WEIGHTS.items())


class Harmful:
    """Runs code when it is unpickled."""

    def __reduce__(self) -> tuple[object, tuple[str]]:
        return os.mkdir, (os.environ["BUSYNC_TEST_MARK"],)


def test_a_pickled_file_with_code_in_it_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BUSYNC_TEST_MARK", str(tmp_path / "ran"))
    torch.save({"w": torch.ones(1), "x": Harmful()}, tmp_path / "w.pt")
    checkpoints.check(tmp_path / "w.pt")
    with pytest.raises(CheckpointError, match=r"other things than tensors and plain values; save only a state dict"):
        checkpoints.load_pickled(tmp_path / "w.pt", mapped=False)
    assert not (tmp_path / "ran").exists()


def test_a_damaged_or_unsuitable_pickled_file_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "w.pt"
    torch.save(WEIGHTS, path)
    data = bytearray(path.read_bytes())
    at = data.index(b"data.pkl") + 60
    data[at : at + 40] = bytes(40)
    path.write_bytes(data)
    with pytest.raises(CheckpointError):
        checkpoints.load_pickled(path, mapped=False)
    torch.save({3: torch.ones(1)}, path)
    with pytest.raises(ExportError):
        checkpoints.load_pickled(path, mapped=False)


def test_the_newest_complete_file_of_a_directory_counts(tmp_path: Path) -> None:
    for age, name in enumerate(["new.safetensors", "newer.pt", "newest.safetensors"], start=100):
        (save_pickled if name.endswith(".pt") else save_safetensors)(tmp_path / name)
        touch(tmp_path / name, age)
    assert checkpoints.newest(tmp_path) == tmp_path / "newest.safetensors"
    os.truncate(tmp_path / "newest.safetensors", 50)
    touch(tmp_path / "newest.safetensors", 200)
    assert checkpoints.newest(tmp_path) == tmp_path / "newer.pt"
    (tmp_path / "newer.pt").unlink()
    assert checkpoints.newest(tmp_path) == tmp_path / "new.safetensors"
    (tmp_path / "new.safetensors").unlink()
    with pytest.raises(CheckpointError, match="incomplete"):
        checkpoints.newest(tmp_path)
    (tmp_path / "newest.safetensors").unlink()
    with pytest.raises(CheckpointError, match="no checkpoint in this directory"):
        checkpoints.newest(tmp_path)


def test_what_is_no_checkpoint_is_left_out_of_a_directory(tmp_path: Path) -> None:
    for name in [
        ".hidden.safetensors", "model-00001-of-00002.safetensors", "optimizer.pt", "rng_state_0.pth",
        "training_args.bin", "notes.txt", "model.safetensors.tmp",
    ]:  # fmt: skip
        save_safetensors(tmp_path / name)
    (tmp_path / "folder.safetensors").mkdir()
    (tmp_path / "dangling.safetensors").symlink_to(tmp_path / "nowhere")
    assert checkpoints.candidates(tmp_path) == []


def test_a_file_may_have_any_name_but_needs_a_known_suffix(tmp_path: Path) -> None:
    save_safetensors(tmp_path / "optimizer.safetensors")
    assert checkpoints.newest(tmp_path / "optimizer.safetensors") == tmp_path / "optimizer.safetensors"
    (tmp_path / "weights.gguf").write_bytes(b"GGUF")
    with pytest.raises(CheckpointError, match=r"suffix '.gguf' is not known; use one of .safetensors"):
        checkpoints.newest(tmp_path / "weights.gguf")
    with pytest.raises(FileNotFoundError):
        checkpoints.newest(tmp_path / "nowhere.safetensors")


def test_a_file_is_written_whole(tmp_path: Path) -> None:
    tied = torch.arange(6.0)
    tensors = {**WEIGHTS, "tied": tied, "tied.again": tied, "turned": torch.arange(6).reshape(2, 3).T}
    path = tmp_path / "w.safetensors"
    path.write_bytes(b"something older")
    umask = os.umask(0o027)
    try:
        checkpoints.write(tensors, path, {"label": "ü"})
    finally:
        os.umask(umask)
    assert stat.S_IMODE(path.stat().st_mode) == 0o640
    loaded = load_file(path)
    assert loaded.keys() == tensors.keys()
    assert all(equal(loaded[name], tensor) for name, tensor in tensors.items())
    assert os.listdir(tmp_path) == ["w.safetensors"]


def test_a_write_that_fails_leaves_everything_as_it_was(tmp_path: Path) -> None:
    path = tmp_path / "w.safetensors"
    path.write_bytes(b"older")
    with pytest.raises(CheckpointError, match="complex128"):
        checkpoints.write({"w": torch.ones(1, dtype=torch.complex128)}, path, {})
    with pytest.raises(OSError, match="No such file or directory") as caught:
        checkpoints.write(WEIGHTS, tmp_path / "missing" / "w.safetensors", {})
    assert caught.value.filename == str(tmp_path / "missing" / "w.safetensors")
    assert path.read_bytes() == b"older"
    assert os.listdir(tmp_path) == ["w.safetensors"]
