"""The choice of combinations of parameters (`pairwise.py`)."""

from __future__ import annotations

import itertools
import os
import subprocess
import sys
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from pathlib import Path

import hypothesis
import hypothesis.strategies as st
import pytest
from pairwise import cover, sample, values


def pairs(rows: Sequence[Sequence[Hashable]]) -> set[object]:
    return {pair for row in rows for pair in itertools.combinations(enumerate(row), 2)}


@hypothesis.given(st.integers(0, 4).flatmap(lambda width: st.lists(st.tuples(*[st.integers(0, 3)] * width))))
def test_every_pair_of_the_rows_is_in_the_cover(rows: list[tuple[int, ...]]) -> None:
    chosen = cover(rows)
    assert pairs([rows[number] for number in chosen]) == pairs(rows)
    assert chosen == sorted(set(chosen)) == cover(rows)


def test_a_single_parameter_keeps_each_of_its_values() -> None:
    assert cover([("a",), ("b",), ("a",)]) == [0, 1]
    assert cover([]) == cover([(), ()]) == []


@pytest.mark.parametrize(("sizes", "most"), [((3, 3, 3, 3), 12), ((7, 3, 3, 3), 24), ((9, 3), 27), ((2,) * 10, 12)])
def test_a_cover_is_little_larger_than_its_two_largest_columns(sizes: tuple[int, ...], most: int) -> None:
    rows = list(itertools.product(*map(range, sizes)))
    assert sizes[0] * sizes[1] <= len(cover(rows)) <= most


def test_each_value_of_a_name_is_wanted_once() -> None:
    rows = list(itertools.product("abcdef", "xy"))
    kinds = [("vowel" if name in "ae" else "consonant", other) for name, other in rows]
    chosen = cover(kinds, [name for name, _ in rows])
    assert {rows[number][0] for number in chosen} == set("abcdef")
    assert pairs([kinds[number] for number in chosen]) == pairs(kinds)
    assert len(chosen) == 6


def test_combinations_that_are_no_row_are_not_asked_for() -> None:
    rows = [row for row in itertools.product("ab", "xy", "12") if row[:2] != ("b", "y")]
    assert {rows[number][:2] for number in cover(rows)} == {("a", "x"), ("a", "y"), ("b", "x")}


def test_a_parameter_of_several_fields_is_several_columns() -> None:
    @dataclass(frozen=True)
    class Way:
        io: str
        copy: bool | None

    assert values(Way("direct", None)) == ["'direct'", "None"]
    assert values(("a", 1)) == ["'a'", "1"]
    assert values("ab") == ["'ab'"]


@hypothesis.given(st.integers(1, 4).flatmap(lambda width: st.lists(st.tuples(*[st.integers(0, 3)] * width))))
def test_every_value_of_the_rows_is_in_the_sample(rows: list[tuple[int, ...]]) -> None:
    chosen = sample(rows)
    held = {value for number in chosen for value in enumerate(rows[number])}
    assert held == {value for row in rows for value in enumerate(row)}
    assert chosen == sorted(set(chosen))
    assert len(chosen) <= len(cover(rows))


def test_a_sample_has_no_more_than_it_may_and_is_spread() -> None:
    rows = [(number,) for number in range(20)]
    assert sample(rows, 4) == [0, 5, 10, 15]
    assert sample(rows, 30) == list(range(20))
    assert sample(rows, 0) == sample([()], 0) == []


@pytest.mark.parametrize(("name", "whole", "count"), [("", "0", 2), ("::test_slow", "0", 9), ("", "1", 9)])
def test_what_a_sample_leaves_out_runs_by_its_name(name: str, whole: str, count: int, tmp_path: Path) -> None:
    """Whoever repeats a failure of `make test-whole` names the test."""
    file = tmp_path / "test_sampled.py"
    mark = "import pytest\n@pytest.mark.sampled(2)\n@pytest.mark.parametrize('n', range(9))\n"
    file.write_text(f"{mark}def test_slow(n): pass\n")
    command = [sys.executable, "-m", "pytest", "-q", "--collect-only", "-p", "pairwise", "-p", "no:cacheprovider"]
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parent), "PENSTOCK_TEST_WHOLE": whole}
    environment.pop("PYTEST_ADDOPTS", None)
    run = subprocess.run(
        [*command, f"{file.name}{name}"], cwd=tmp_path, env=environment, capture_output=True, text=True, check=False
    )
    assert run.returncode == 0, run.stdout + run.stderr
    assert run.stdout.count("::test_slow[") == count, run.stdout
