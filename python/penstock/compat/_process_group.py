"""Process groups, of which there is one kind so far: those of a single process."""

from __future__ import annotations

from typing import Any

from .._errors import InvalidError, UnsupportedError


def check_alone(group: Any, argument: str) -> None:
    """Raises unless ``group`` means this process alone: it is None, or its ``size()`` is 1.

    Args:
        group: What the program passed as its process group.
        argument: What the program calls that argument.

    Raises:
        UnsupportedError: a group of several ranks.
        InvalidError: nothing that has a ``size()``.
    """
    if group is None:
        return
    try:
        ranks = int(group.size())
    except (AttributeError, TypeError, ValueError):
        raise InvalidError(f"{argument}={group!r}: give None or a process group, something with size()") from None
    if ranks > 1:
        raise UnsupportedError(
            f"{argument} has {ranks} ranks: ranks that share out the reading and exchange the bytes are not supported "
            f"yet. With {argument}=None each rank reads for itself, and of a checkpoint opened with penstock.open only "
            "the slices that it asks for"
        )
    if ranks < 1:
        raise InvalidError(f"{argument}={group!r}: this process is not in that group")
