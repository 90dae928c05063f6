"""The choice of combinations of parameters (`pairwise.py`)."""

from __future__ import annotations

import itertools
from collections.abc import Hashable, Sequence
from dataclasses import dataclass

import hypothesis
import hypothesis.strategies as st
import pytest
from pairwise import cover, values


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
