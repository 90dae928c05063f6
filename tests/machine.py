"""Tests that observe the machine: marked `machine`, run alone, and tried again where the machine was not quiet.

Page cache, system calls, memory and time are not the test's alone. The kernel gives up pages when another program needs
memory; a thread waits while another program has its processor. So a test with this marker is judged together with what
other programs did meanwhile:

* A plain assertion that fails on a quiet machine is a failure, at once.
* A plain assertion that fails while the machine was not quiet is no finding. The test starts again, with its fixtures.
  After `TRIES` it is skipped, with a reason that begins with `PREFIX`.
* A test that cannot get its precondition raises `NotQuiet`. It starts again, and is skipped at last, in the same way.
* `Wrong` results, errors, crashes and hangs are failures on every machine.

A whole run on a machine that was quiet before it fails where more than 1% of all tests were skipped in this way.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Iterator
from types import CodeType
from typing import Any

import pagecache
import pytest
from _pytest.runner import runtestprotocol
from neighbours import MOST, PREFIX, TRIES, Moment, is_quiet, pressure_before
from ordeal import NotQuiet

# --- Which tests they are ---

#: Modules that look at the page cache: a test that names one is `machine` without the mark.
OBSERVERS = {"pagecache", "page_cache"}


def _names(code: CodeType) -> Iterator[str]:
    """Every global and attribute that a function names, and those within it."""
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _names(constant)


@functools.cache  # a test function is looked at for every combination of its parameters
def _names_observer(code: CodeType) -> bool:
    """True if a function names one of `OBSERVERS`."""
    return not OBSERVERS.isdisjoint(_names(code))


def _observes(item: Any) -> bool:
    functions = [item.obj] if isinstance(item, pytest.Function) else []
    fixtures = getattr(item, "_fixtureinfo", None)
    for definitions in fixtures.name2fixturedefs.values() if fixtures else ():
        # What every test has, from conftest.py, says nothing of this one
        functions += [d.func for d in definitions if d.scope == "function" and d.func.__module__ != "conftest"]
    codes = (getattr(function, "__code__", None) for function in functions)
    return any(_names_observer(code) for code in codes if code is not None)


@pytest.hookimpl(tryfirst=True)  # before `-m machine` selects
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if item.get_closest_marker("machine") is None and _observes(item):
            item.add_marker("machine")


# --- Trying again ---

#: How a test has failed: kind and text of the error, and the moment. The error itself would keep what the test had.
_FAILED = pytest.StashKey["tuple[type[BaseException], str, Moment] | None"]()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[None]) -> Iterator[None]:
    if call.excinfo is not None and call.when != "teardown":
        error = call.excinfo.value
        item.stash[_FAILED] = (type(error), str(error), Moment.now(pagecache.given_up()))  # before its fixtures end
    return (yield)  # type: ignore[return-value]


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_protocol(item: pytest.Item, nextitem: pytest.Item | None) -> bool | None:
    if item.get_closest_marker("machine") is None:
        return None
    item.ihook.pytest_runtest_logstart(nodeid=item.nodeid, location=item.location)
    for tries in range(1, TRIES + 1):
        item.stash[_FAILED] = None
        before = Moment.now(pagecache.given_up())
        reports = runtestprotocol(item, log=False, nextitem=nextitem)
        reason = _excuse(item.stash[_FAILED], before, reports)
        if reason is None:
            break
        if tries < TRIES:
            _forget_failed_fixtures(item)
            time.sleep(1.0)  # what disturbs may be over by then
        else:
            for report in reports:
                if report.failed:
                    path, line, _ = item.location
                    report.outcome = "skipped"
                    report.longrepr = (path, (line or 0) + 1, f"Skipped: {PREFIX}{reason}")
    for report in reports:
        if tries > 1:
            report.user_properties.append((AGAIN, tries))
        item.ihook.pytest_runtest_logreport(report=report)
    item.ihook.pytest_runtest_logfinish(nodeid=item.nodeid, location=item.location)
    return True


#: The property of reports of tests that were tried again.
AGAIN = "tried again"


def _excuse(
    failed: tuple[type[BaseException], str, Moment] | None, before: Moment, reports: list[pytest.TestReport]
) -> str | None:
    """Why a failure is no finding; None where it is one, or where nothing failed."""
    if failed is None or any(report.failed and report.when == "teardown" for report in reports):
        return None
    kind, text, then = failed
    if issubclass(kind, NotQuiet):
        return text
    if kind is not AssertionError or (disturbance := then.disturbance(before)) is None:
        return None
    return f"{disturbance}: {text.splitlines()[0] if text else 'an assertion failed'}"


def _forget_failed_fixtures(item: Any) -> None:
    """A fixture of a module or session that has failed is not tried again otherwise."""
    for definitions in item._fixtureinfo.name2fixturedefs.values():
        for definition in definitions:
            if definition.cached_result is not None and definition.cached_result[2] is not None:
                item._initrequest()
                definition.finish(item._request)


# --- The whole run ---


class Judge:
    """Counts the tests that were skipped because the machine was not quiet, and judges the run by it."""

    def __init__(self) -> None:
        self.pressure = pressure_before()
        self.left_out = 0
        self.again: set[str] = set()
        self.skipped: set[str] = set()
        self.verdict: str | None = None

    def pytest_deselected(self, items: list[pytest.Item]) -> None:
        self.left_out += len(items)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if dict(report.user_properties).get(AGAIN):
            self.again.add(report.nodeid)
        if report.skipped and isinstance(report.longrepr, tuple) and PREFIX in report.longrepr[2]:
            self.skipped.add(report.nodeid)

    @pytest.hookimpl(tryfirst=True)
    def pytest_sessionfinish(self, session: pytest.Session, exitstatus: int) -> None:
        tests = session.testscollected + self.left_out
        if is_quiet(self.pressure) and tests and len(self.skipped) > MOST * tests and tests >= 100:
            self.verdict = f"more than {MOST:.0%} of {tests} tests, on a machine that was quiet before"
            if session.exitstatus in (pytest.ExitCode.OK, pytest.ExitCode.NO_TESTS_COLLECTED):
                session.exitstatus = pytest.ExitCode.TESTS_FAILED

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        if not self.again and not self.skipped:
            return
        terminalreporter.section("the machine", red=self.verdict is not None)
        terminalreporter.line(f"pressure before the run: {self.pressure or 'unknown'} (some avg60, percent)")
        terminalreporter.line(f"{len(self.again)} tests were tried again, {len(self.skipped)} of them skipped at last")
        if self.verdict is not None:
            terminalreporter.line(f"FAILED: skipped were {self.verdict}")


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "machine: observes page cache, system calls, memory or time; runs alone")
    if not hasattr(config, "workerinput"):  # a worker of xdist leaves the judgement to its controller
        config.pluginmanager.register(Judge(), "penstock-machine")
