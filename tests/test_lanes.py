"""Lanes are told apart by what they declare: plan, engine and loads do not ask one for its name."""

from __future__ import annotations

import re
from pathlib import Path

import rust_imports

SOURCES = Path(__file__).parent.parent / "crates/core/src"
#: A comparison with a lane, a pattern, or a lane's name; not the choice of one.
ASKS = re.compile(r"[!=]=\s*Lane::[A-Z]|Lane::[A-Z]+\s*[!=]=|Lane::[A-Z]+\b[^;{}()]*=>|\b(?:route|lane|parts)\.name\b")


def asked(code: str) -> list[str]:
    return [found[0] for found in ASKS.finditer(rust_imports.without_tests(code))]


def test_plan_engine_and_loads_ask_no_lane_for_its_name():
    for folder in ("plan", "load", "engine"):
        for path in (SOURCES / folder).rglob("*.rs"):
            if path.name == "tests.rs" or "simulator" in path.parts:
                continue
            assert asked(path.read_text()) == [], path


def test_the_check_sees_a_question():
    assert len(asked("if route == Lane::DIRECT {} match route { Lane::RANK if x => 1, _ => lane.name.len() }")) == 3
    assert asked("let cold = if past { Lane::DIRECT } else { facts.lane };") == []
    # The sources ask: they are the ways
    assert asked((SOURCES / "source/router.rs").read_text())
