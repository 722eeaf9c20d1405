"""Which tensors can be published, and why the others cannot."""

from __future__ import annotations

import torch
from torch import nn

from busync.errors import ExportError
from busync.manifest import MAX_NDIM

#: dtype name -> torch's dtype, for the names in manifest.DTYPES that this torch has.
TORCH_DTYPES: dict[str, torch.dtype] = {
    "bool": torch.bool, "uint8": torch.uint8, "int8": torch.int8,
    "uint16": torch.uint16, "int16": torch.int16, "uint32": torch.uint32, "int32": torch.int32,
    "uint64": torch.uint64, "int64": torch.int64,
    "float16": torch.float16, "bfloat16": torch.bfloat16, "float32": torch.float32, "float64": torch.float64,
    "complex32": torch.complex32, "complex64": torch.complex64, "complex128": torch.complex128,
    "float8_e4m3fn": torch.float8_e4m3fn, "float8_e4m3fnuz": torch.float8_e4m3fnuz,
    "float8_e5m2": torch.float8_e5m2, "float8_e5m2fnuz": torch.float8_e5m2fnuz,
}  # fmt: skip
if hasattr(torch, "float8_e8m0fnu"):  # torch 2.7
    TORCH_DTYPES["float8_e8m0fnu"] = torch.float8_e8m0fnu

DTYPE_NAMES: dict[torch.dtype, str] = {dtype: name for name, dtype in TORCH_DTYPES.items()}

MANY_TENSORS = 4096  #: in one source or module: see fits_storage

_PLAIN = (torch.Tensor, nn.Parameter)


def check_tensor(name: str, tensor: torch.Tensor) -> str:
    """Return the name of the tensor's dtype if its bytes can be published.

    Tensors that require grad, have hooks, are not leaves, are views, or were made in inference mode are fine.

    Raises:
        ExportError: it cannot be published; says why, and what to do instead.
    """
    dtype = check_kind(name, tensor)
    if not tensor.is_cpu:
        raise ExportError(
            name,
            f"it is on {tensor.device}; tensors can be published from the CPU and CUDA devices",
            "publish tensor.cpu()",
        )
    if tensor._is_zerotensor():
        raise ExportError(name, "it is a zero tensor without memory", "clone it")
    return dtype


def check_kind(name: str, tensor: torch.Tensor) -> str:
    """Return the name of the tensor's dtype if a tensor of this class, layout and dtype can be described.

    Raises:
        ExportError: it cannot; says why, and what to do instead.
    """
    if type(tensor) not in _PLAIN:
        raise ExportError(name, f"it is a {type(tensor).__name__}, not a plain tensor", _subclass_remedy(tensor))
    if tensor.layout is not torch.strided:
        layout = str(tensor.layout).removeprefix("torch.")
        raise ExportError(name, f"its layout is {layout}", "publish tensor.to_dense(), or its parts")
    if tensor.is_nested:
        raise ExportError(name, "it is a nested tensor", "publish its values and offsets, or a padded tensor")
    dtype = DTYPE_NAMES.get(tensor.dtype)
    if dtype is None:
        remedy = "dequantize(), or int_repr() and the scales" if tensor.is_quantized else "tensor.view(torch.uint8)"
        raise ExportError(name, f"its dtype is {str(tensor.dtype).removeprefix('torch.')}", f"publish {remedy}")
    if torch._is_functional_tensor(tensor) or torch._C._functorch.is_functorch_wrapped_tensor(tensor):
        raise ExportError(name, "it belongs to a running function transform", "publish outside of the transform")
    if tensor.dim() > MAX_NDIM:
        raise ExportError(name, f"it has more than {MAX_NDIM} dimensions", "reshape it")
    return dtype


def fits_storage(tensor: torch.Tensor, span: int, *, many: bool) -> bool:
    """Whether the storage has the ``span`` elements over which the tensor reaches. A resized storage may not.

    ``many``: the tensor is one of very many. ``untyped_storage()`` leaves a Python object behind with each storage, and
    tens of thousands of new objects set off a full garbage collection, which holds every thread for 100 ms. So torch
    is asked for the same view again, which it refuses if the storage is too small. That takes 2 us instead of 0.3 us.
    """
    if many:
        try:
            tensor.as_strided(tensor.shape, tensor.stride())
        except RuntimeError:
            pass  # there may be other reasons: look
        else:
            return True
    return (tensor.storage_offset() + span) * tensor.itemsize <= tensor.untyped_storage().nbytes()


def _subclass_remedy(tensor: torch.Tensor) -> str:
    if nn.parameter.is_lazy(tensor):
        return "run the module once, so that its lazy parameters get a shape"
    if hasattr(tensor, "full_tensor"):
        return "publish full_tensor(), or to_local() of each rank"
    if hasattr(tensor, "__tensor_flatten__"):
        return "publish the tensors that it wraps"
    return "publish tensor.as_subclass(torch.Tensor)"
