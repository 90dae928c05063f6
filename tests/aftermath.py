"""What a failed test leaves must not make others fail: its frames let go of what they hold, and its patches end.

A failure keeps its traceback, and a traceback keeps every local of the frames that it went through: tensors that are
mapped files, whose pages nobody can evict; loads that still run; open files. pytest keeps the last one until the next
test is called, and cycles keep it until a garbage collection.
"""

from __future__ import annotations

import contextlib
import gc
import traceback
from collections.abc import Iterator

import penstock
import pytest

_ERRORS = pytest.StashKey[list[BaseException]]()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[None]) -> Iterator[None]:
    if call.excinfo is not None:
        item.stash.setdefault(_ERRORS, []).append(call.excinfo.value)
    return (yield)  # type: ignore[return-value]


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_teardown(item: pytest.Item) -> Iterator[None]:
    _let_go(item)  # not earlier: `--pdb` looks at the frames first
    return (yield)


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_protocol(item: pytest.Item) -> Iterator[None]:
    try:
        return (yield)
    finally:
        _let_go(item)  # of what a fixture has left at its end


def _let_go(item: pytest.Item) -> None:
    """Forgets the locals of every frame that the errors of a test went through."""
    waiting = item.stash.get(_ERRORS, [])
    item.stash[_ERRORS] = []
    seen = set()
    while waiting:
        error = waiting.pop()
        if id(error) in seen:
            continue
        seen.add(id(error))
        for frame, _ in traceback.walk_tb(error.__traceback__):
            with contextlib.suppress(RuntimeError):  # it still runs
                frame.clear()
                frame.f_locals  # noqa: B018 - before Python 3.13 a copy of the locals, which is made anew only here
        waiting += [other for other in (error.__cause__, error.__context__) if other is not None]
        waiting += getattr(error, "exceptions", ())
    if seen:
        gc.collect()


@pytest.fixture(autouse=True)
def no_patch_left() -> Iterator[None]:
    """A test must not leave safetensors patched. Where one does, it fails, and the next ones find what they expect."""
    before = set(penstock._patch._routing.patches)
    yield
    left = penstock._patch._routing.patches - before
    for patched in left:
        patched.undo()
    assert not left, f"{len(left)} patches are left in force"
