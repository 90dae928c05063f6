"""The cost of a load of several ranks, in bytes and reads: known before a byte moves, from headers and wants alone."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, get_args

from . import _core
from ._choices import Scope
from ._errors import ArgumentTypeError, InvalidError
from ._report import size_text, time_text
from ._selection import Cut, Region, info_of, region_of, unknown
from ._terminal import table

Wants = Mapping[str, Cut | None] | None
"""The wants of one rank: the part of each tensor by name (None: the whole), or None for everything."""

_NOTABLE = 20
"""Bytes that ranks do not want are spoken of if they are more than this part of those that they want: one by 20."""


class Plan(dict[str, Any]):
    """The reads and messages of each rank: a dictionary, for JSON. Every key is an attribute too, and
    ``print(plan)`` gives a summary.

    Sizes are in bytes. ``alone`` is a load of each rank without the others, ``together`` one load of all (``group=``).
    `Checkpoint.plan` describes the keys.
    """

    def __getattr__(self, key: str) -> Any:
        try:
            return self[key]
        except KeyError:
            raise AttributeError(f"this plan has no {key!r}; it has {', '.join(self)}") from None

    def seconds(
        self, *, storage_rate: float | None = None, node_rate: float | None = None, network: float | None = None
    ) -> dict[str, dict[str, Any]]:
        """How long the load takes at least, ``alone`` and ``together``, and what bounds it.

        The time of the slowest of: storage, the busiest node's way to storage, and, together, what the busiest node
        sends or receives. They work at the same time. Latencies, processors and connections inside a node are not
        counted.

        Args:
            storage_rate: What the storage gives to all nodes together, in bytes per second; None: no bound.
            node_rate: What one node gets of it.
            network: What one node sends, and what it receives at the same time.

        Returns:
            ``{"alone": {"seconds", "bound"}, "together": {"seconds", "bound"}}``; ``bound`` is ``"storage"``,
            ``"node"``, ``"network"``, or None where nothing is bounded.

        Raises:
            InvalidError: a rate that is not positive.
        """
        given = {"storage_rate": storage_rate, "node_rate": node_rate, "network": network}
        for name, value in given.items():
            if value is not None and not value > 0:
                raise InvalidError(f"{name}={value!r}: give bytes per second, more than 0")

        def slowest(read: str, sends: bool) -> dict[str, Any]:
            busiest = max((node[read] for node in self["nodes"]), default=0)
            crossing = max((max(node["sent_bytes"], node["received_bytes"]) for node in self["nodes"]), default=0)
            times = [
                ("storage", self[read] / storage_rate if storage_rate else None),
                ("node", busiest / node_rate if node_rate else None),
                ("network", crossing / network if network and sends else None),
            ]
            known = [(time, name) for name, time in times if time is not None]
            if not known:
                return {"seconds": None, "bound": None}
            seconds, bound = max(known, key=lambda one: one[0])
            return {"seconds": seconds, "bound": bound}

        return {"alone": slowest("alone_bytes", False), "together": slowest("together_bytes", True)}

    def __str__(self) -> str:
        count, nodes = len(self["ranks"]), len(self["nodes"])
        ranks = f"{count} rank{'s' * (count != 1)} on {nodes} node{'s' * (nodes != 1)}"
        wanted = f"{ranks} want {size_text(self['wanted_bytes'])} in sum, of {size_text(self['nbytes'])}"
        lines = [wanted, table(self.rows(), right=(1, 2)), self.unwanted()]
        return "\n".join(line for line in lines if line)

    def unwanted(self) -> str:
        """The bytes that ranks receive alone and do not want, why, and the option that ends that.

        "" where they are at most a twentieth of the wanted bytes.
        """
        alone, together = self["alone_unwanted_bytes"], self["together_unwanted_bytes"]
        if alone * _NOTABLE <= self["wanted_bytes"]:
            return ""
        said = (
            f"alone, ranks receive {size_text(alone)} that they do not want: columns and small parts lie apart in the "
        )
        said += "file, and the bytes near them are read too"
        if together < alone:
            said += f'; exchange="on" (PENSTOCK_EXCHANGE=on) in loads with group= leaves {size_text(together)}'
        return said

    def rows(self, times: Mapping[str, Mapping[str, Any]] | None = None) -> list[list[str]]:
        """The table of the summary; with the ``times`` that `seconds` gives."""
        columns = []
        for way, reads in (("alone", "alone_reads"), ("together", "reads")):
            most = max((rank[f"{way}_bytes"] for rank in self["ranks"]), default=0)
            sends = way == "together"
            crossing = sum(node["sent_bytes"] for node in self["nodes"]) if sends else 0
            column = [way, size_text(self[f"{way}_bytes"]), size_text(most)]
            column += [size_text(self[f"{way}_unwanted_bytes"])]
            column += [f"{sum(rank[reads] for rank in self['ranks']):,}"]
            column += [size_text(self["sent_bytes"] if sends else 0), size_text(crossing)]
            if times is not None and times[way]["seconds"] is not None:
                column += [time_text(times[way]["seconds"]), times[way]["bound"]]
            columns.append(column)
        head = ["", "read from storage", "  the most by one rank", "  not wanted", "reads", "sent to other ranks"]
        head += ["  to other nodes", "time, at least", "bound by"]
        return [list(row) for row in zip(head[: len(columns[0])], *columns, strict=True)]


def nodes_of(nodes: int | Sequence[int] | None, ranks: int) -> list[int]:
    """The node of each rank. A number of nodes divides the ranks in their order."""
    if nodes is None:
        nodes = 1
    if isinstance(nodes, int):
        if not 1 <= nodes <= max(1, ranks):
            raise InvalidError(f"nodes={nodes}: give 1 to {ranks}, as many as there are ranks")
        return [rank * nodes // ranks for rank in range(ranks)]
    if not isinstance(nodes, Sequence) or not all(isinstance(node, int) for node in nodes):
        raise ArgumentTypeError(f"nodes={nodes!r}: give the number of nodes, or the number of each rank's node")
    if len(nodes) != ranks:
        raise InvalidError(f"nodes: there are {len(nodes)}, for {ranks} ranks")
    numbers = {node: number for number, node in enumerate(sorted(set(nodes)))}
    return [numbers[node] for node in nodes]


def packed(core: _core.Checkpoint, wants: Wants, files: Sequence[str]) -> bytes:
    """The wants of one rank, as the core takes them."""
    if wants is None:
        return _core.pack_wants(core, None, None)
    if not isinstance(wants, Mapping):
        raise ArgumentTypeError(f"wants: a {type(wants).__name__} is no mapping of names to slices, and not None")
    numbers: list[int] = []
    regions: list[Region | None] = []
    for name, cut in wants.items():
        if name not in core:
            raise unknown(core, name)
        number = core.index(name)
        numbers.append(number)
        regions.append(None if cut is None else region_of(info_of(core, number, files), cut))
    return _core.pack_wants(core, numbers, regions)


def plan(
    core: _core.Checkpoint,
    wants_of_ranks: Sequence[Wants],
    nodes: int | Sequence[int] | None = None,
    scope: Scope = "world",
) -> Plan:
    """See `Checkpoint.plan`."""
    if isinstance(wants_of_ranks, (str, bytes, Mapping)) or not isinstance(wants_of_ranks, Sequence):
        raise ArgumentTypeError(f"wants: a {type(wants_of_ranks).__name__} is no list with what each rank wants")
    if not wants_of_ranks:
        raise InvalidError("wants: the list is empty; give what each rank wants")
    wants_of_ranks, files = list(wants_of_ranks), core.files()
    known: dict[int, bytes] = {}  # replicas often are one object
    for wants in wants_of_ranks:
        if id(wants) not in known:
            known[id(wants)] = packed(core, wants, files)
    return plan_of([known[id(wants)] for wants in wants_of_ranks], core, nodes, scope)


def plan_of(
    packed_wants: Sequence[bytes],
    core: _core.Checkpoint,
    nodes: int | Sequence[int] | None,
    scope: Scope = "world",
) -> Plan:
    """The plan of ranks whose wants are packed."""
    if scope not in get_args(Scope):
        raise InvalidError(f"scope={scope!r}: give one of {', '.join(map(repr, get_args(Scope)))}")
    of_rank = nodes_of(nodes, len(packed_wants))
    lists = list(dict.fromkeys(packed_wants))
    numbers = {blob: number for number, blob in enumerate(lists)}
    by_rank, by_node = _core.traffic(core, lists, [numbers[blob] for blob in packed_wants], of_rank, scope == "node")
    ranks = []
    for rank, (node, row) in enumerate(zip(of_rank, by_rank, strict=True)):
        wanted, read, unwanted, reads, parcels, sent, received, alone, alone_unwanted, alone_reads = row
        ranks.append(
            {
                "rank": rank,
                "node": node,
                "wanted_bytes": wanted,
                "together_bytes": read,
                "together_unwanted_bytes": unwanted,
                "reads": reads,
                "parcels": parcels,
                "sent_bytes": sent,
                "received_bytes": received,
                "alone_bytes": alone,
                "alone_unwanted_bytes": alone_unwanted,
                "alone_reads": alone_reads,
            }
        )
    names = ("together_bytes", "alone_bytes", "sent_bytes", "received_bytes")
    of_nodes = [dict(zip(names, row, strict=True)) for row in by_node]
    summed = ("wanted_bytes", "alone_bytes", "alone_unwanted_bytes", "together_bytes", "together_unwanted_bytes")
    sums = {key: sum(rank[key] for rank in ranks) for key in (*summed, "sent_bytes")}
    return Plan(nbytes=core.nbytes(), **sums, nodes=of_nodes, ranks=ranks)
