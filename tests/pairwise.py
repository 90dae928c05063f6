"""Tests with the mark `pairwise` are run with combinations of their parameters that hold every pair of values, those
with the mark `sampled` with combinations that hold every value.

Most mistakes need one value or two to show themselves, and an exhaustive matrix holds each pair many times. All
combinations are run where the variable `PENSTOCK_TEST_WHOLE` is 1: `make test-whole`.

`sampled` is for slow tests: each combination takes seconds. `sampled(4)` runs at most four, evenly spread, whatever
values they hold. `sampled(0)` runs none. Where the command line names a test (`file.py::test`), all are run.

A parameter counts by what it consists of: the fields of a dataclass, the members of a tuple. One that is only a name
can be told apart by the mark: `pairwise(name=lambda name: (rows(name), columns(name)))` wants every name once, and what
the function gives together with every value of the other parameters.

What is chosen is the same in every run and in every process.
"""

from __future__ import annotations

import dataclasses
import itertools
import os
from collections.abc import Hashable, Sequence
from typing import Any

import pytest

VARIABLE = "PENSTOCK_TEST_WHOLE"


def cover(rows: Sequence[Sequence[Hashable]], once: Sequence[Hashable] | None = None) -> list[int]:
    """Numbers of rows, ascending, that together hold every pair of values which stand in a row in these two columns.

    Of all rows the one with the most pairs that are missing comes next; of several the first. once: a value for each
    row, each of which is wanted, beside whatever.
    """
    pairs: list[set[Any]] = [
        set(itertools.combinations(enumerate(row), 2)) or {((0, value),) for value in row} for row in rows
    ]
    for held, value in zip(pairs, once or [], strict=once is not None):
        held.add(("once", value))
    missing = set().union(*pairs) if pairs else set()
    chosen = []
    left = dict(enumerate(pairs))
    while missing:
        best = max(left, key=lambda number: len(left[number] & missing))  # the first of the largest
        chosen.append(best)
        missing -= left.pop(best)
        left = {number: held for number, held in left.items() if not held.isdisjoint(missing)}
    return sorted(chosen)


def sample(rows: Sequence[Sequence[Hashable]], most: int | None = None) -> list[int]:
    """Numbers of rows, ascending, that together hold every value of every column; at most `most`, evenly spread."""
    chosen = [] if most == 0 else _each(rows)
    if most is None or len(chosen) <= most:
        return chosen
    return [chosen[number * len(chosen) // most] for number in range(most)]


def _each(rows: Sequence[Sequence[Hashable]]) -> list[int]:
    left = {number: set(enumerate(row)) for number, row in enumerate(rows)}
    missing = set().union(*left.values()) if left else set()
    chosen = []
    while missing:
        best = max(left, key=lambda number: len(left[number] & missing))  # the first of the largest
        chosen.append(best)
        missing -= left.pop(best)
    return sorted(chosen)


def values(parameter: object) -> list[Hashable]:
    """What a parameter consists of: the fields of a dataclass, the members of a tuple, or it alone."""
    if dataclasses.is_dataclass(parameter) and not isinstance(parameter, type):
        return [repr(getattr(parameter, field.name)) for field in dataclasses.fields(parameter)]
    if type(parameter) is tuple:
        return [repr(member) for member in parameter]
    return [repr(parameter)]


def _itself(parameter: object) -> object:
    return parameter


@pytest.hookimpl(trylast=True)  # of what `-k` and `-m` have left
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if os.environ.get(VARIABLE) == "1":
        return
    marks = ("pairwise",) if any("::" in argument for argument in config.args) else ("pairwise", "sampled")
    matrices: dict[tuple[str, str], list[Any]] = {}
    for item in items:
        if any(item.get_closest_marker(mark) is not None for mark in marks):
            matrices.setdefault((item.nodeid.split("::")[0], item.originalname), []).append(item)  # type: ignore[attr-defined]
    dropped = set()
    for matrix in matrices.values():
        sampled = matrix[0].get_closest_marker("sampled")
        told = {} if sampled else matrix[0].get_closest_marker("pairwise").kwargs
        rows, once = [], []
        for item in matrix:
            parameters = sorted(item.callspec.params.items()) if hasattr(item, "callspec") else []
            rows.append([part for name, value in parameters for part in values(told.get(name, _itself)(value))])
            once.append(tuple(repr(value) for name, value in parameters if name in told))
        chosen = sample(rows, *sampled.args) if sampled else cover(rows, once)
        dropped |= set(matrix) - {matrix[number] for number in chosen}
    items[:] = [item for item in items if item not in dropped]
    config.stash[_COUNTS] = (sum(map(len, matrices.values())), len(dropped))


_COUNTS = pytest.StashKey[tuple[int, int]]()


def pytest_report_collectionfinish(config: pytest.Config) -> str | None:
    combinations, dropped = config.stash.get(_COUNTS, (0, 0))
    if not dropped:
        return None
    return f"pairwise, sampled: {combinations - dropped} of {combinations} combinations ({VARIABLE}=1 runs all)"


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "pairwise: of its parameters, combinations that hold every pair of values")
    config.addinivalue_line("markers", "sampled(most): of a slow test, a few combinations of its parameters")
