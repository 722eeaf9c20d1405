from __future__ import annotations

import hashlib
import struct

import pytest
import torch

from busync.errors import ExportError
from busync.handles import content_digest, digest
from tests.handles.kit import raw, round_trip


def test_it_is_what_the_documentation_says() -> None:
    tensors = {
        "b": torch.tensor([[1.0, 2.0], [3.0, 4.0]]),
        "a": torch.tensor(7, dtype=torch.int16),
        "c": torch.empty(0, 3),
    }
    expected = hashlib.sha256(
        b"a\0int16\0\0" + struct.pack("<h", 7)
        + b"b\0float32\x002,2\0" + struct.pack("<4f", 1, 2, 3, 4)
        + b"c\0float32\x000,3\0"
    )  # fmt: skip
    assert content_digest(tensors) == expected.digest()


def test_strides_aliasing_and_order_do_not_matter() -> None:
    base = torch.randn(6, 8)
    odd = {
        "w": base.t()[1:5],
        "v": base.t()[1:5],
        "x": torch.randn(1, 3).expand(4, 3),
        "g": torch.randn(2, requires_grad=True),
    }
    plain = {name: tensor.detach().contiguous().clone() for name, tensor in reversed(odd.items())}
    assert content_digest(odd) == content_digest(plain) == content_digest(round_trip(odd))


def test_conj_and_neg_are_resolved() -> None:
    base = torch.randn(3, dtype=torch.complex64)
    views = {"c": base.conj(), "n": base.conj().imag}
    plain = {"c": base.conj().resolve_conj(), "n": -base.imag}
    assert content_digest(views) == content_digest(plain)


@pytest.mark.parametrize(
    "other",
    [
        {"w": torch.zeros(2, 3)}, {"v": torch.zeros(6)}, {"w": torch.zeros(6, dtype=torch.int32)}, {"w": torch.ones(6)},
        {"w": torch.zeros(6), "v": torch.zeros(0)}, {},
    ],
)  # fmt: skip
def test_everything_else_matters(other: dict[str, torch.Tensor]) -> None:
    assert content_digest(other) != content_digest({"w": torch.zeros(6)})


@pytest.mark.parametrize("piece", [16, 64, 1000])
def test_pieces_fit_together(monkeypatch: pytest.MonkeyPatch, piece: int) -> None:
    tensors = {
        "a": torch.randn(7, 1, 9).transpose(0, 2), "b": torch.randn(50), "c": torch.randn(1, 1).expand(5, 9),
        "d": torch.randn(3, 4, 5)[:, ::2],
    }  # fmt: skip
    whole = hashlib.sha256()
    for name, tensor in tensors.items():
        whole.update(f"{name}\0float32\0{','.join(map(str, tensor.shape))}\0".encode() + raw(tensor))
    monkeypatch.setattr(digest, "PIECE_BYTES", piece)
    assert content_digest(tensors) == whole.digest()


def test_what_cannot_be_published_has_no_digest() -> None:
    with pytest.raises(ExportError):
        content_digest({"w": torch.eye(2).to_sparse()})
