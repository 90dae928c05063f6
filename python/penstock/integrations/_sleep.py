"""An engine that sleeps has nothing of Penstock's: it calls `penstock.quiesce` in its workers, and vLLM in its server.

vLLM makes a snapshot of an engine that sleeps, and other programs get its memory. The next load is a reload.
"""

from __future__ import annotations

import asyncio
import functools
import inspect
import logging
import sys
from collections.abc import Callable
from typing import Any

from .._quiesce import quiesce

logger = logging.getLogger("penstock")

#: Module, class and method.
_WORKERS = (
    ("vllm.v1.worker.gpu_worker", "Worker", "sleep"),
    (
        "sglang.srt.managers.scheduler_components.weight_updater",
        "SchedulerWeightUpdaterManager",
        "release_memory_occupation",
    ),
)
_MARK = "_penstock_quiesces"


def install_in_worker() -> None:
    """Has this process's worker call `quiesce` when it has gone to sleep. May be called repeatedly."""
    for module, owner, name in _WORKERS:
        if module in sys.modules:  # vLLM's workers on CPUs do not sleep
            _install(getattr(sys.modules[module], owner, None), name)


def install_in_server() -> None:
    """Has this process's client of vLLM's engine call `quiesce` when its workers sleep. May be called repeatedly.

    The folders with the small files of models at addresses are this process's.
    """
    try:
        from vllm.v1.engine.async_llm import AsyncLLM
    except ImportError:  # nothing sleeps there then
        return
    _install(AsyncLLM, "sleep")


def _install(owner: Any, name: str) -> None:
    original = getattr(owner, name, None)
    if original is None or hasattr(original, _MARK):
        return
    made = _after_await(original) if inspect.iscoroutinefunction(original) else _after(original)
    setattr(made, _MARK, True)
    setattr(owner, name, made)


def _after(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def sleep(*args: Any, **named: Any) -> Any:
        found = original(*args, **named)
        _quiet()
        return found

    return sleep


def _after_await(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    async def sleep(*args: Any, **named: Any) -> Any:
        found = await original(*args, **named)
        await asyncio.to_thread(_quiet)
        return found

    return sleep


def _quiet() -> None:
    try:
        quiesce()
    except Exception as error:  # the engine sleeps already: nothing of this may end it
        logger.warning("penstock: an engine that sleeps still has something of a load: %s", error)
