"""Questions to file systems: a thread that has answered one is there for the next, and no longer than that."""

from __future__ import annotations

import gc
import os
import threading
import time
import weakref
from collections.abc import Callable

import ordeal
import penstock
import pytest
from penstock import _patience
from penstock._patience import asking, patiently


@pytest.fixture(autouse=True)
def none_is_left() -> None:
    _patience._dismiss()


@pytest.fixture
def kept(monkeypatch: pytest.MonkeyPatch) -> None:
    """However busy the machine is, a thread is kept until the next question."""
    monkeypatch.setattr(_patience, "KEPT", 60.0)


def threads() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "penstock-ask"]


def until(there: Callable[[], bool]) -> None:
    limit = time.monotonic() + 20 * ordeal.load_factor()
    while not there():
        assert time.monotonic() < limit, "it did not come"
        time.sleep(0.002)


@pytest.mark.usefixtures("kept")
def test_one_thread_answers_one_question_after_the_other():
    identities = {patiently(threading.get_ident, 5.0) for _ in range(50)}
    assert len(identities) == 1 and threading.get_ident() not in identities
    assert len(threads()) == 1


@pytest.mark.usefixtures("kept")
def test_an_error_ends_a_question_and_no_thread():
    def fail() -> None:
        raise penstock.InvalidError("no")

    for _ in range(5):
        with pytest.raises(penstock.InvalidError, match="no"):
            patiently(fail, 5.0)
    assert patiently(lambda: 7, 5.0) == 7 and len(threads()) == 1


@pytest.mark.usefixtures("kept")
def test_questions_at_the_same_time_have_threads_of_their_own():
    assert patiently(lambda: patiently(threading.get_ident, 5.0) != threading.get_ident(), 5.0)
    assert len(threads()) == 2


def test_a_thread_that_is_kept_answers_where_no_other_can_start(monkeypatch: pytest.MonkeyPatch) -> None:
    started = threading.Thread.start

    def refused(thread: threading.Thread) -> None:
        raise RuntimeError("can't create new thread at interpreter shutdown")

    with _patience.kept_asker():
        monkeypatch.setattr(threading.Thread, "start", refused)
        assert {patiently(threading.get_ident, 5.0) for _ in range(9)} == {threads()[0].ident}
        hangs = threading.Event()
        with pytest.raises(penstock.StalledError):
            patiently(hangs.wait, 0.1)
        with pytest.raises(penstock.LimitError):  # it is left behind
            patiently(lambda: 7, 5.0)
        monkeypatch.setattr(threading.Thread, "start", started)
        assert patiently(lambda: 7, 5.0) == 7
    hangs.set()
    until(lambda: not threads())


def test_a_thread_that_nobody_asks_ends():
    patiently(lambda: None, 5.0)
    until(lambda: not threads())
    assert _patience._idle == []


@pytest.mark.usefixtures("kept")
def test_a_thread_that_waits_holds_nothing_of_the_last_question():
    class Thing:
        pass

    thing = Thing()
    gone = weakref.ref(thing)
    assert patiently(lambda thing=thing: thing is not None, 5.0)
    del thing
    gc.collect()
    until(lambda: gone() is None)
    assert len(threads()) == 1


@pytest.mark.usefixtures("kept")
def test_what_hangs_is_left_behind_and_the_next_question_is_answered():
    answer = threading.Event()

    def hang() -> None:
        asking("/somewhere")
        answer.wait()

    with pytest.raises(penstock.StalledError, match="has not answered") as caught:
        patiently(hang, 0.05)
    assert caught.value.path == "/somewhere"
    assert patiently(lambda: 7, 5.0) == 7
    assert len(threads()) == 2
    answer.set()
    until(lambda: len(_patience._idle) == 2)


@pytest.mark.usefixtures("kept")
def test_a_fork_finds_no_thread_and_the_child_asks():
    patiently(lambda: None, 5.0)
    child = os.fork()
    if child == 0:
        status = 1
        try:
            status = 0 if not _patience._idle and patiently(lambda: 7, 5.0) == 7 else 2
        finally:
            os._exit(status)
    assert threads() == []
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert patiently(lambda: 7, 5.0) == 7


def test_a_stop_of_the_whole_process_is_no_silence(monkeypatch: pytest.MonkeyPatch):
    """The thread that asks was stopped too, and could not ask."""
    clock, begun = time.monotonic, time.monotonic()

    class Jumps:
        def monotonic(self) -> float:
            return clock() + (100.0 if clock() - begun > 0.2 else 0.0)

    def work() -> str:
        asking("")
        time.sleep(0.4)
        return "answered"

    monkeypatch.setattr(_patience, "time", Jumps())
    limit = 2 * ordeal.load_factor()
    assert patiently(work, limit) == "answered"
    monkeypatch.undo()
    begun = clock()
    with pytest.raises(penstock.StalledError):
        patiently(lambda: time.sleep(1), 0.2)
    assert clock() - begun < 0.9 * ordeal.load_factor()
    until(lambda: not threads())
