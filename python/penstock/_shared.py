"""Tensors of torch that share memory: which names stand for which bytes."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Mapping
from typing import Any

from ._errors import SharedMemoryError


def _span(tensor: Any) -> tuple[int, int]:
    """First byte of a tensor, and one past its last."""
    reach = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    start = tensor.data_ptr()
    return start, start + ((reach + 1) * tensor.element_size() if tensor.numel() else 0)


def groups(state: Mapping[str, Any]) -> list[list[str]]:
    """Names of tensors whose memory overlaps, each group sorted; tensors that share with none are in none."""
    storages: dict[Any, list[str]] = defaultdict(list)
    for name, tensor in state.items():
        if tensor.device.type != "meta" and tensor.numel():
            storage = tensor.untyped_storage()
            storages[tensor.device, storage.data_ptr(), storage.nbytes()].append(name)
    found: list[list[str]] = []
    for names in storages.values():
        end, group = -1, [""]
        for (start, stop), name in sorted((_span(state[name]), name) for name in names):
            if start >= end:
                group = []
                found.append(group)
            group.append(name)
            end = max(end, stop)
    return sorted(sorted(group) for group in found if len(group) > 1)


def _is_complete(tensor: Any) -> bool:
    """Whether a tensor covers its storage."""
    storage = tensor.untyped_storage()
    return bool(tensor.data_ptr() == storage.data_ptr() and tensor.numel() * tensor.element_size() == storage.nbytes())


def duplicates(state: Mapping[str, Any], preferred: Collection[str] = ()) -> dict[str, list[str]]:
    """For each group that shares memory the name to save it under, with the names that are left out.

    Args:
        preferred: Names to keep where there is a choice: those that a file has.

    Raises:
        SharedMemoryError: a group none of whose tensors covers the memory that they share.
    """
    found: dict[str, list[str]] = {}
    for names in groups(state):
        complete = [name for name in names if _is_complete(state[name])]
        if not complete:
            raise SharedMemoryError(
                f"{', '.join(names)} share memory, and none of them covers all of it. Saving one would lose what the "
                "others hold; saving each would save the shared bytes several times. Clone the tensors to save"
            )
        kept = next((name for name in complete if name in preferred), complete[0])
        found[kept] = [name for name in names if name != kept]
    return found
