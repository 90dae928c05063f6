"""fastsafetensors' filters for expert parallelism: predicates for `set_tensor_filter`, by the tensors' names."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Callable
from re import Pattern

from .._errors import InvalidError

DEFAULT_EXPERT_PATTERN: Pattern[str] = re.compile(r"\.experts\.(\d+)\.")
"""How the name of an expert's tensor holds the expert's number."""

_VARIABLE = "FASTSAFETENSORS_EP_"


def owned_expert_range(num_experts: int, ep_size: int, ep_rank: int) -> tuple[int, int]:
    """The experts of one rank, (first, past-the-last): blocks in order, the first ranks have one more if need be.

    Raises:
        InvalidError: (a ValueError) numbers that make no sense.
    """
    for name, value, least in (("num_experts", num_experts, 0), ("ep_size", ep_size, 1), ("ep_rank", ep_rank, 0)):
        if isinstance(value, bool) or not isinstance(value, int) or value < least:
            raise InvalidError(f"{name}={value!r}: give a whole number of at least {least}")
    if ep_rank >= ep_size:
        raise InvalidError(f"ep_rank={ep_rank}: the ranks of ep_size={ep_size} are 0 to {ep_size - 1}")
    each, more = divmod(num_experts, ep_size)
    first = ep_rank * each + min(ep_rank, more)
    return first, first + each + (ep_rank < more)


def expert_parallel_filter(
    num_experts: int, ep_size: int, ep_rank: int, pattern: Pattern[str] = DEFAULT_EXPERT_PATTERN
) -> Callable[[str], bool]:
    """A predicate on names: the experts of one rank, and every tensor that is no expert's.

    Args:
        num_experts: How many experts a layer has.
        ep_size: How many ranks share them.
        ep_rank: The rank, from 0.
        pattern: How a name holds the number of an expert, in the first group. Names without it are no expert's.

    Raises:
        InvalidError: (a ValueError) numbers that make no sense.
    """
    first, end = owned_expert_range(num_experts, ep_size, ep_rank)

    def keep(name: str) -> bool:
        found = pattern.search(name)
        return found is None or first <= int(found[1]) < end

    return keep


def expert_parallel_filter_from_env() -> Callable[[str], bool] | None:
    """`expert_parallel_filter` as the environment asks for it; None: every tensor.

    FASTSAFETENSORS_EP_SLICE=1 asks for it, and FASTSAFETENSORS_EP_NUM_EXPERTS says how many experts there are.
    FASTSAFETENSORS_EP_SIZE and _RANK are the ranks; else those of the initialised `torch.distributed`, else WORLD_SIZE
    and RANK. None without the first two, and for one rank.

    Raises:
        InvalidError: (a ValueError) a variable that holds no whole number, or a rank outside its size.
    """
    if os.environ.get(_VARIABLE + "SLICE", "0") != "1":
        return None
    experts = _number(_VARIABLE + "NUM_EXPERTS", 0)
    size, rank = _number(_VARIABLE + "SIZE", 0), _number(_VARIABLE + "RANK", -1)
    if experts <= 0:
        return None
    distributed = sys.modules.get("torch.distributed")
    if distributed is not None and distributed.is_available() and distributed.is_initialized():
        size = size if size > 0 else distributed.get_world_size()
        rank = rank if rank >= 0 else distributed.get_rank()
    size = size if size > 0 else _number("WORLD_SIZE", 1)
    rank = rank if rank >= 0 else _number("RANK", 0)
    return None if size <= 1 else expert_parallel_filter(experts, size, rank)


def _number(variable: str, default: int) -> int:
    text = os.environ.get(variable)
    if text is None:
        return default
    if not re.fullmatch(r"\s*[+-]?\d+\s*", text):
        raise InvalidError(f"{variable}={text!r}: give a whole number")
    return int(text)
