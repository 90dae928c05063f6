"""Which modules import each other in a circle, and by which names: of any language, as long as somebody lists imports.

Two modules in a circle are one: neither can be read, tested or replaced without the other. `test_imports.py` lists the
imports of the package.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Iterable
from itertools import pairwise
from typing import NamedTuple


class Import(NamedTuple):
    """One module imports a name of another."""

    of: str
    """The module that imports."""
    module: str
    """The module that defines what is imported."""
    name: str
    """What is imported; "" for the module itself."""
    line: int
    """Where, in the file of `of`."""


def circles(imports: Iterable[Import]) -> list[list[str]]:
    """The groups of modules that import each other, each sorted (strongly connected components; Tarjan 1972)."""
    graph: dict[str, set[str]] = defaultdict(set)
    for found in imports:
        graph[found.of].add(found.module)
        graph[found.module]  # a node, also where it imports nothing
    order: dict[str, int] = {}
    low: dict[str, int] = {}
    path: list[str] = []
    groups: list[list[str]] = []

    def visit(module: str) -> None:
        order[module] = low[module] = len(order)
        path.append(module)
        for other in sorted(graph[module]):
            if other not in order:
                visit(other)
                low[module] = min(low[module], low[other])
            elif other in path:
                low[module] = min(low[module], order[other])
        if low[module] == order[module]:
            group = path[path.index(module) :]
            del path[path.index(module) :]
            if len(group) > 1 or module in graph[module]:
                groups.append(sorted(group))

    for module in sorted(graph):
        if module not in order:
            visit(module)
    return sorted(groups)


def shortest(imports: Iterable[Import], group: Iterable[str]) -> list[str]:
    """The modules of the shortest way round in a group of `circles`; the first one is the last one too."""
    graph: dict[str, set[str]] = defaultdict(set)
    inside = set(group)
    for found in imports:
        if {found.of, found.module} <= inside:
            graph[found.of].add(found.module)
    ways = []
    for start in sorted(inside):
        queue = deque([[start]])
        seen: set[str] = set()
        while queue:
            way = queue.popleft()
            if start in graph[way[-1]]:
                ways.append([*way, start])
                break
            for other in sorted(graph[way[-1]] - seen):
                seen.add(other)
                queue.append([*way, other])
    return min(ways, key=len)


def told(imports: Iterable[Import]) -> str:
    """What an assertion says of circles: the modules of each, its shortest way round, and what ties it; "": none."""
    known = list(imports)
    lines = []
    for group in circles(known):
        lines.append(f"these {len(group)} modules import each other: {', '.join(group)}")
        way = shortest(known, group)
        for of, module in pairwise(way):
            ties = sorted({(found.name or "the module", found.line) for found in known if found[:2] == (of, module)})
            lines.append(f"  {of} imports of {module}: {', '.join(f'{name} (line {line})' for name, line in ties)}")
    return "\n".join(lines)
