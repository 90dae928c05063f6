"""Tensors of torch that share memory: which names stand for which bytes."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

from ._errors import SharedMemoryError
from ._late_imports import importing


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


def tied(state: Mapping[str, Any], module: Any = None) -> dict[str, str]:
    """The names that are left out because the same tensor is saved under another one, which is given for each.

    The same tensor is the same memory seen in the same way: what `Checkpoint.load_into` takes for one too. A view of
    another shape, a transposed one or a part is a tensor of its own. The first name in the order of ``state`` is kept,
    and none that ``module`` says it ties to another (transformers: `_tied_weights_keys`), as long as there is a choice.
    """
    with importing():
        from ._memory import identity, memory_of

    names: dict[Any, list[str]] = defaultdict(list)
    for name, tensor in state.items():
        to = memory_of(tensor)
        if to is not None:
            names[identity(to, tensor)].append(name)
    several = [group for group in names.values() if len(group) > 1]
    targets = _targets(module, [name for group in several for name in group]) if several else set()
    left: dict[str, str] = {}
    for group in several:
        kept = next((name for name in group if name not in targets), group[0])
        left.update((name, kept) for name in group if name != kept)
    return left


def _targets(module: Any, names: Sequence[str]) -> set[str]:
    """The names that a module of transformers ties to others when it is made: the keys of a mapping, or patterns."""
    found: set[str] = set()
    named_modules = getattr(module, "named_modules", None)
    for prefix, part in named_modules() if callable(named_modules) else ():
        start = f"{prefix}." if prefix else ""
        expanded = getattr(part, "all_tied_weights_keys", None)
        if isinstance(expanded, Mapping):
            found.update(f"{start}{name}" for name in expanded)
        patterns = getattr(part, "_tied_weights_keys", None)
        for pattern in patterns if isinstance(patterns, Iterable) and not isinstance(patterns, str) else ():
            if not isinstance(pattern, str):
                continue  # of another program
            try:
                is_target = re.compile(pattern).search
            except re.error:
                continue  # a name, and no pattern
            found.update(name for name in names if name.startswith(start) and is_target(name[len(start) :]))
    return found


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
