"""``penstock.joined``: ranks meet before their first load, and notice from then on if one is gone or stopped."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from typing import Any

from ._core import Options
from ._errors import PeerError
from ._group import Watch, joined_in
from ._member import new_group
from ._options import make_options


@contextmanager
def joined(group: Any, *, options: Options | Mapping[str, Any] | None = None) -> Iterator[None]:
    """The ranks of a group watch each other, also where no load is under way: while they make a model, for example.

    All ranks come together first. Within the block a rank that waits for another one, because it has come to a load
    already, raises `PeerError` if that one has failed, is gone (1 s) or was stopped (``peer_timeout``). Threads of the
    core watch, so a rank is there however busy its program is.

    ```python
    with penstock.joined(group):
        model = build()                               # takes minutes
        penstock.open("model/").load_into(model, group=group)
    ```

    Args:
        group: As ``load`` takes it. All ranks enter and leave the block in the same order as they load.
        options: ``join_timeout``, for which the ranks wait for each other, and ``peer_timeout``.

    Raises:
        PeerError: a rank did not come, or is gone.
        PlanMismatchError: ranks do something else meanwhile, or have another version of Penstock.
    """
    chosen, member, owner = make_options(options), new_group(group), os.getpid()
    if member.size == 1:
        yield
        return
    watch, watches = Watch(member), joined_in(member)
    lost: int | None = None
    try:
        with watch:
            watch.meet(chosen, ("", "", "ranks that join", "joined", "0"))
        watches.append(watch)
        try:
            yield
        except PeerError as error:
            lost = error.rank
            raise
        except BaseException as error:
            with suppress(BaseException):
                watch._fail(error)  # those that wait for this rank hear why it does not come
            raise
    finally:
        if os.getpid() == owner:
            with suppress(ValueError):
                watches.remove(watch)
            watch.clean(lost)
