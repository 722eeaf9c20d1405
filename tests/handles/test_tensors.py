from __future__ import annotations

import warnings
from collections.abc import Callable

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from busync.errors import ExportError
from busync.handles import flatten, plan
from busync.handles.tensors import DTYPE_NAMES, TORCH_DTYPES, check_tensor
from busync.manifest import DTYPES
from tests.handles.kit import assert_equal, random_of, round_trip


def test_every_dtype_has_its_torch_dtype_and_size() -> None:
    assert set(TORCH_DTYPES) <= set(DTYPES)
    for name, dtype in TORCH_DTYPES.items():
        assert dtype is getattr(torch, name)
        assert dtype.itemsize == DTYPES[name]
    assert len(DTYPE_NAMES) == len(TORCH_DTYPES)


@pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental")  # from the test's own arithmetic
@pytest.mark.parametrize("dtype", TORCH_DTYPES.values(), ids=str)
def test_every_dtype_comes_back_bit_by_bit(dtype: torch.dtype) -> None:
    source = {
        "matrix": random_of(dtype, 3, 5),
        "turned": random_of(dtype, 3, 5).t(),
        "slice": random_of(dtype, 4, 7)[:, 2:5],
        "scalar": random_of(dtype),
        "empty": random_of(dtype, 0, 3),
        "expanded": random_of(dtype, 3, 1).expand(3, 4),
    }
    assert_equal(round_trip(source), source)


class Odd(torch.Tensor):
    pass


class OddParameter(nn.Parameter):
    pass


class Wrapper(torch.Tensor):
    @staticmethod
    def __new__(cls, inner: torch.Tensor) -> Wrapper:
        return torch.Tensor._make_wrapper_subclass(cls, inner.shape, dtype=inner.dtype)

    def __tensor_flatten__(self) -> tuple[list[str], None]:
        return [], None

    @classmethod
    def __torch_dispatch__(cls, *_: object) -> object:
        raise NotImplementedError


def quantized() -> torch.Tensor:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return torch.quantize_per_tensor(torch.zeros(3), 1.0, 0, torch.qint8)


def nested(layout: torch.layout) -> torch.Tensor:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return torch.nested.nested_tensor([torch.zeros(2), torch.zeros(3)], layout=layout)


def fake() -> torch.Tensor:
    with FakeTensorMode():
        return torch.zeros(3)


def sparse(kind: str) -> torch.Tensor:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return torch.eye(4).to_sparse() if kind == "coo" else getattr(torch.eye(4), f"to_sparse_{kind}")()


def sharded() -> torch.Tensor:
    tensor = torch.zeros(3)
    tensor.untyped_storage().resize_(0)
    return tensor


def cut() -> torch.Tensor:
    tensor = torch.zeros(3)
    tensor.untyped_storage().resize_(8)
    return tensor


REFUSED: list[tuple[str, Callable[[], torch.Tensor], str]] = [
    ("coo", lambda: sparse("coo"), "layout is sparse_coo.*to_dense"),
    ("csr", lambda: sparse("csr"), "layout is sparse_csr"),
    ("csc", lambda: sparse("csc"), "layout is sparse_csc"),
    ("quantized", quantized, "qint8.*dequantize"),
    ("nested", lambda: nested(torch.strided), "nested"),
    ("jagged", lambda: nested(torch.jagged), "NestedTensor"),
    ("meta", lambda: torch.zeros(3, device="meta"), "on meta"),
    ("fake", fake, "FakeTensor"),
    ("functional", lambda: torch._to_functional_tensor(torch.zeros(3)), "transform"),
    ("wrapper", lambda: Wrapper(torch.zeros(3)), "Wrapper.*tensors that it wraps"),
    ("subclass", lambda: torch.zeros(3).as_subclass(Odd), "Odd.*as_subclass"),
    ("parameter subclass", lambda: OddParameter(torch.zeros(3)), "OddParameter"),
    ("lazy", lambda: nn.UninitializedParameter(), "run the module once"),
    ("mkldnn", lambda: torch.zeros(3).to_mkldnn(), "mkldnn"),
    ("zero", lambda: torch._efficientzerotensor((3,)), "zero tensor"),
    ("sub-byte", lambda: torch.empty(3, dtype=torch.__dict__["uint4"]), "uint4.*uint8"),
    ("float4", lambda: torch.empty(3, dtype=torch.float4_e2m1fn_x2), "float4"),
    ("bits", lambda: torch.empty(3, dtype=torch.bits8), "bits8"),
    ("sharded", sharded, "only 0 bytes.*sharded"),
    ("cut", cut, "only 8 bytes"),
    ("dimensions", lambda: torch.zeros((1,) * 33), "32 dimensions"),
]


@pytest.mark.parametrize(("make", "reason"), [case[1:] for case in REFUSED], ids=[case[0] for case in REFUSED])
def test_what_cannot_be_published_is_refused_by_name(make: Callable[[], torch.Tensor], reason: str) -> None:
    with pytest.raises(ExportError, match=reason) as caught:
        plan(flatten({"fine": torch.zeros(2), "layer.w": make()}))
    assert caught.value.name == "layer.w"
    assert caught.value.remedy


def test_a_tensor_within_a_transform_is_refused() -> None:
    def inside(tensor: torch.Tensor) -> torch.Tensor:
        with pytest.raises(ExportError, match="transform"):
            check_tensor("w", tensor)
        return tensor

    torch.func.vmap(inside)(torch.zeros(2, 2))


def test_gradients_hooks_and_modes_do_not_matter() -> None:
    leaf = torch.randn(3, requires_grad=True)
    leaf.grad = torch.ones(3)
    hooked = torch.randn(3, requires_grad=True)
    hooked.register_hook(lambda grad: grad)  # type: ignore[no-untyped-call]
    with torch.inference_mode():
        inference = torch.randn(4, 4)
    source = {
        "leaf": leaf, "result": leaf * 2, "slice of result": (leaf * 2)[::2], "hooked": hooked,
        "inference": inference, "slice of inference": inference[:, 1:3], "parameter": nn.Parameter(torch.randn(2)),
        "buffer": nn.Buffer(torch.randn(2)),
    }  # fmt: skip
    assert_equal(round_trip(source), source)
    flags = {spec.name: (spec.requires_grad, spec.parameter) for spec in plan(flatten(source)).manifest.tensors}
    assert flags["leaf"] == flags["result"] == (True, False)
    assert flags["parameter"] == (True, True)
    assert flags["buffer"] == flags["inference"] == (False, False)


def test_building_and_copying_in_inference_mode_gives_normal_tensors() -> None:
    source = {"w": torch.randn(3), "v": torch.randn(4, 4)[:, :2]}
    with torch.inference_mode():
        built = round_trip(source)
    assert_equal(built, source)
    assert not any(tensor.is_inference() for tensor in built.values())
