"""Tensors of torch that no file can hold as they are: which, and what to save in their place."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ._errors import ArgumentTypeError, InvalidError, MissingDtypeError, NoValuesError


def check(state: Mapping[str, Any]) -> None:
    """Raises for the first value that is no tensor, or a tensor that has no memory of its own.

    Raises:
        ArgumentTypeError: it is no tensor.
        NoValuesError: a lazy module has not made it yet.
        MissingDtypeError: it is sparse or nested, or of a quantized dtype.
        InvalidError: it stands for others: a quantized tensor, or one that is divided among ranks. Or its memory was
            freed.
    """
    for name, value in state.items():
        check_one(name, value)


def check_one(name: object, value: Any) -> None:
    """The same for one tensor."""
    import torch
    from torch.nn.parameter import is_lazy

    if not isinstance(value, torch.Tensor):
        raise not_a_tensor(name, value)
    if is_lazy(value):
        raise NoValuesError(
            f"tensor {name} is a {type(value).__name__}: it has no shape yet. Call the module once, or its "
            "initialize_parameters, before it is saved",
            tensor=str(name),
        )
    if value.layout != torch.strided or value.is_quantized or value.is_nested:
        raise without_counterpart(name, value)
    check_memory(name, value)
    if stands_for_others(value):
        raise without_memory(name, value)


def stands_for_others(tensor: Any) -> bool:
    """Whether a tensor has values, and no memory that holds them."""
    import torch

    if tensor.layout != torch.strided or tensor.device.type == "meta":
        return False  # refused for that
    if hasattr(tensor, "__tensor_flatten__") and not isinstance(tensor, torch._subclasses.FakeTensor):
        return True
    try:
        return bool(tensor.numel()) and not tensor.data_ptr() and tensor.device.type in ("cpu", "cuda")
    except (RuntimeError, NotImplementedError):
        return True


def check_memory(name: object, tensor: Any) -> None:
    """Raises if a tensor reaches past its storage, which somebody has freed or cut: FSDP does so between two steps.

    Raises:
        InvalidError: it does.
    """
    try:
        if not tensor.numel() or tensor.device.type == "meta":
            return
        has = tensor.untyped_storage().nbytes()
        steps = zip(tensor.shape, tensor.stride(), strict=True)
        last = tensor.storage_offset() + sum((size - 1) * step for size, step in steps)
    except (RuntimeError, NotImplementedError):
        return  # it has none: another error says so
    needs = (last + 1) * tensor.element_size()
    # Those that stand for others have an empty one from the beginning
    if has < needs and not (hasattr(tensor, "__tensor_flatten__") and not has):
        raise InvalidError(
            f"tensor {name} needs {needs} bytes, and its storage has {has}: its memory was freed, as FSDP does where "
            "parameters are sharded. Gather it first (FSDP: summon_full_params, or a full state dict)",
            tensor=str(name),
        )


def not_a_tensor(name: object, value: object) -> ArgumentTypeError:
    """The error for a value that is no tensor: extra state of modules is often none."""
    kind = f"{name} is a {type(value).__name__}, not a torch.Tensor"
    if isinstance(name, str) and name.rpartition(".")[2] == "_extra_state":
        return ArgumentTypeError(
            f"{kind}: the extra state of a module, which a file of tensors cannot hold. Take it out of the state dict "
            "(state.pop), save that, and keep it elsewhere",
            tensor=name,
        )
    return ArgumentTypeError(f"{kind}: a file holds tensors alone")


def without_counterpart(name: object, tensor: Any) -> MissingDtypeError:
    """The error for a tensor of a layout or a dtype that the format lacks."""
    import torch

    what, way_out = f"a {tensor.layout} tensor of {tensor.dtype}", ""
    if tensor.is_nested:
        what = f"a nested tensor of {tensor.dtype}"
        way_out = ". Save each part of `.unbind()`, or `.to_padded_tensor(0)` and the lengths"
    elif tensor.layout != torch.strided:
        way_out = ". `.to_dense()` makes a dense one, which may be much larger"
    elif tensor.is_quantized:
        way_out = ". Save `.dequantize()` of it, or `.int_repr()` and its scales"
    elif tensor.is_complex():
        way_out = ". `torch.view_as_real` makes numbers in pairs of it, and torch.complex64 is one that the format has"
    elif tensor.element_size() == 1:
        way_out = ". `.view(torch.uint8)` has its bytes"
    return MissingDtypeError(f"tensor {name} is {what}: the format has no such tensors{way_out}", tensor=str(name))


def without_memory(name: object, tensor: Any) -> InvalidError:
    """The error for a tensor that stands for others, with what to save in its place."""
    import torch

    kind = f"tensor {name} is a {type(tensor).__name__} without memory of its own"
    if isinstance(tensor, torch._subclasses.FakeTensor):
        way_out = "it has a shape, and no values. Save the tensor that it was made from"
    elif hasattr(tensor, "full_tensor"):
        way_out = "it is divided among ranks. `.full_tensor()`, called on all of them, makes a whole one"
    elif getattr(type(tensor), "dequantize", None) is not torch.Tensor.dequantize:
        way_out = f"it is quantized. Save `.dequantize()` of it{_made_of(tensor)}"
    else:
        way_out = f"save {_made_of(tensor).removeprefix(', or ') or 'the tensors that it is made of'}"
    return InvalidError(f"{kind}: {way_out}", tensor=str(name))


def _made_of(tensor: Any) -> str:
    try:
        names, _ = tensor.__tensor_flatten__()
    except Exception:
        return ""
    return f", or the tensors that it is made of ({', '.join(map(str, names))})"
