"""Whether an engine is one that Penstock knows: its release, and the form of places. tests/engines has real ones."""

from __future__ import annotations

import ast
import logging
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from penstock.integrations import _drift
from penstock.integrations._known import SGLANG, VLLM, Engine, Hook

INTEGRATIONS = Path(_drift.__file__).parent
SOURCE = """
import dataclasses
import functools

__version__ = "1.4.2+cpu"

@dataclasses.dataclass
class Source:
    path: str

def iterate(files, quiet=False, *, only=None, threads=1):
    return iter(())

def logged(function):
    @functools.wraps(function)
    def call(*args, **kwargs):
        return function(*args, **kwargs)
    return call

class Loader:
    def load(self, model, config):
        return list(self.weights(model))

    @logged
    def weights(self, source):
        return iterate(source)
"""
KNOWN = Engine(
    name="Engine",
    module="an_engine",
    digits=2,
    tested=("1.2.0", "1.4.0"),
    hooks=(
        Hook("an_engine:Source", fields=("path",)),
        Hook("an_engine:iterate", "files, ..., only, ..."),
        Hook("an_engine:Loader.load", "self, model, config", calls=("weights",)),
        Hook("an_engine:Loader.weights", "self, source", calls=("iterate",)),
        Hook("an_engine.later:come", since=(1, 5)),
    ),
)


@pytest.fixture
def engine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., None]]:
    """Makes the engine importable; other text in place of some of its own."""
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delenv(_drift._SAID, raising=False)

    def make(old: str = "", new: str = "") -> None:
        sys.modules.pop("an_engine", None)
        assert old in SOURCE
        (tmp_path / "an_engine.py").write_text(SOURCE.replace(old, new, 1) if old else SOURCE)
        monkeypatch.setattr(sys, "dont_write_bytecode", True)
        __import__("an_engine")

    yield make
    sys.modules.pop("an_engine", None)


def test_an_engine_whose_places_have_the_known_form_is_no_different(engine: Callable[..., None]) -> None:
    engine()
    assert _drift.difference(KNOWN) is None


def test_a_parameter_more_where_others_do_not_matter_is_no_other_form(engine: Callable[..., None]) -> None:
    engine("threads=1", "threads=1, block=0")
    assert _drift.difference(KNOWN) is None


@pytest.mark.parametrize(
    ("old", "new", "says"),
    [
        ("def iterate", "def iterate_shards", "iterate of an_engine: module 'an_engine' has no attribute 'iterate'"),
        ("return iterate(", "return shards(", "Loader.weights of an_engine does not call iterate"),
        ("self, source", "self, source, rank=0", "weights of an_engine takes self, source, rank, not self, source"),
        ("self, model, config", "self, config, model", "load of an_engine takes self, config, model, not self, model"),
        ("only=None", "experts=None", "iterate of an_engine takes files, quiet, experts, threads, not files, ..., on"),
        ("path: str", "folder: str", "Source of an_engine lacks path"),
        ("class Loader", "class Reader", "Loader.weights of an_engine: module 'an_engine' has no attribute 'Loader'"),
        ('"1.4.2+cpu"', '"1.5.0"', "come of an_engine.later: No module named 'an_engine.later'"),
        ('"1.4.2+cpu"', "None", "in Engine of a version that it does not say"),
    ],
)
def test_a_place_of_another_form_is_named_with_the_last_known_version(
    engine: Callable[..., None], old: str, new: str, says: str
) -> None:
    engine(old, new)
    if new == "None":
        # What is expected of a release depends on its number: of one without, all
        assert _drift.version_of(KNOWN) is None
    found = _drift.difference(KNOWN)
    assert found is not None and says in found, found
    assert "another form than in 1.4.0, the last known version: " in found


@pytest.mark.parametrize(
    ("version", "is_tested"),
    [
        ("1.4.0", True),
        ("1.4.9", True),
        ("1.4.2+cpu", True),
        ("1.4.0rc1", True),
        ("1.2.0", True),
        ("1.3.0", False),
        ("1.5.0.dev12+g1234", False),
        ("2.4.0", False),
        ("dev", False),
        (None, False),
    ],
)
def test_a_minor_release_is_tested_if_one_of_it_was(version: str | None, is_tested: bool) -> None:
    assert _drift.is_tested(KNOWN, version) is is_tested


def test_a_minor_release_of_sglang_is_its_third_number() -> None:
    last = SGLANG.tested[-1]
    assert _drift.is_tested(SGLANG, f"{last}.post1")
    major, minor, patch = last.split(".")
    assert not _drift.is_tested(SGLANG, f"{major}.{minor}.{int(patch) + 1}")
    assert not _drift.is_tested(SGLANG, f"{major}.{minor}")


def test_a_release_that_was_not_tested_says_so_once_for_a_process_and_those_that_it_starts(
    engine: Callable[..., None], caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    engine('"1.4.2+cpu"', '"1.3.0"')
    program = (
        "import logging, sys; logging.basicConfig(format='%(message)s')\n"
        "import an_engine\n"
        "from penstock.integrations import _drift\n"
        "from penstock.integrations._known import Engine\n"
        f"_drift.warn_untested(Engine('Engine', 'an_engine', 2, {KNOWN.tested!r}, ()))\n"
    )
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(tmp_path), str(INTEGRATIONS.parent.parent)])}
    expected = (
        "penstock: Engine 1.3.0 is not a release that Penstock was tested with (Engine 1.2.0, 1.4.0); "
        "every place that it hooks into has the form that it knows, so it loads"
    )

    def rank() -> str:
        run = subprocess.run(
            [sys.executable, "-c", program], env=environment, capture_output=True, text=True, check=True
        )
        return run.stderr.strip()

    assert rank() == expected, "a process that was not told"
    with caplog.at_level(logging.WARNING, "penstock"):
        _drift.warn_untested(KNOWN)
        _drift.warn_untested(KNOWN)
    assert [one.getMessage() for one in caplog.records] == [expected]
    environment[_drift._SAID] = os.environ[_drift._SAID]
    assert rank() == ""


def test_an_engine_that_is_not_there_is_none_to_warn_of(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv(_drift._SAID, raising=False)
    sys.modules.pop("an_engine", None)
    _drift.warn_untested(KNOWN)
    assert not caplog.records


def imported(path: Path, engine: str) -> set[tuple[str, str]]:
    """The module and the name of each import from an engine."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and not node.level and (node.module or "").partition(".")[0] == engine:
            found |= {(node.module or "", one.name) for one in node.names}
    return found


@pytest.mark.parametrize("engine", [VLLM, SGLANG], ids=lambda engine: engine.module)
def test_all_that_a_loader_imports_from_an_engine_is_declared(engine: Engine) -> None:
    declared = {hook.place.partition(":")[0] for hook in engine.hooks}
    declared |= {hook.place.replace(":", ".") for hook in engine.hooks}
    declared |= {one.rpartition(".")[0] for one in list(declared)}  # the class of a method
    of_loads = [
        path
        for path in INTEGRATIONS.glob(f"*{engine.module}*.py")
        # A start is measured by some, and adapters are off unless asked for
        if not path.stem.endswith(("_start", "_serve", "_worker", "_lora"))
    ]
    assert len(of_loads) >= 3
    names = {f"{module}.{name}" for path in of_loads for module, name in imported(path, engine.module)}
    assert len(names) > 5
    assert names <= declared, names - declared


@pytest.mark.parametrize("engine", [VLLM, SGLANG], ids=lambda engine: engine.module)
def test_tested_releases_are_in_order_and_each_is_a_minor_release_of_its_own(engine: Engine) -> None:
    minors = [_drift._numbers(one, engine.digits) for one in engine.tested]
    assert minors == sorted(set(minors))
    assert all(len(one) == engine.digits for one in minors)
