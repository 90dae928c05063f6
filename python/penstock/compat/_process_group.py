"""Process groups as programs pass them: who is in them, and how a rank tells the others that it does not go on."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from .._errors import InvalidError

if TYPE_CHECKING:
    from .._group_stream import GroupLoads
    from .._member import Member


class Ranks:
    """A process group of several ranks, of which this process is one."""

    def __init__(self, member: Member) -> None:
        self.member = member

    def size(self) -> int:
        """How many ranks."""
        return self.member.size

    def rank(self) -> int:
        """The number of this one."""
        return self.member.rank

    def loads(self) -> GroupLoads:
        """The loads of one object, each of all ranks. All ranks make theirs in the same order."""
        from .._group_stream import GroupLoads

        return GroupLoads(self.member)


def ranks_of(group: Any, argument: str) -> Ranks | None:
    """The ranks of a group; None if this process is alone: ``group`` is None, or its ``size()`` is 1.

    Args:
        group: What the program passed as its process group: what ``group=`` of `Checkpoint.load` takes.
        argument: What the program calls that argument.

    Raises:
        InvalidError: it is no group, or this process is not in it.
    """
    if group is None:
        return None
    if not isinstance(group, tuple) and not hasattr(group, "mesh_dim_names"):
        try:
            size = int(group.size())
        except (AttributeError, TypeError, ValueError):
            raise InvalidError(f"{argument}={group!r}: give None or a process group, something with size()") from None
        if size < 1:
            raise InvalidError(f"{argument}={group!r}: this process is not in that group")
        if size == 1:
            return None
    from .._member import member_of

    member = member_of(group)
    return Ranks(member) if member.size > 1 else None


@contextmanager
def told(loads: GroupLoads | None) -> Iterator[None]:
    """Tells errors that are raised in it to the other ranks, which wait for this one in the next load."""
    try:
        yield
    except BaseException as error:
        if loads is not None:
            loads.say(error)
        raise


@contextmanager
def told_of_stream(loads: GroupLoads | None) -> Iterator[None]:
    """As `told`, where the others wait for this one at the beginning of the first stream."""
    try:
        yield
    except BaseException as error:
        if loads is not None:
            from .._group import say
            from .._member import new_group

            say(new_group(loads.member), error)
            loads.say(error)  # they may begin with another call
        raise
