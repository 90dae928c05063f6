"""Scenarios: the page cache before a load, the load itself, and other work of the machine meanwhile.

| scenario | page cache before | what is loaded |
|---|---|---|
| `cold` | empty (checked); before it a process that mapped and touched the files: memory in use | tensors, any memory |
| `cold-freed` | empty (checked); before it a process that took and gave back private memory | tensors, any memory |
| `warm` | full (checked) | tensors, any memory: zero copy is what is compared; three loads in each process |
| `private` | full | tensors in memory of their own |
| `load_into` | full | existing parameters whose pages are in use |
| `tmpfs` | the files lie in memory (`/dev/shm`) | tensors, any memory |
| `half` | the first half of each file | tensors, any memory |
| `second` | what a cold load by the same loader, whose tensors were used, left there | tensors, any memory |
| `cast` | full | floating-point tensors as F16 |
| `two` | empty | the same by two processes at once; the slower one counts |
| `beside-memory` | full | private tensors, while a neighbour copies memory |
| `beside-disk` | empty | tensors, any memory, while a neighbour reads from the same disk |
| `limited` | empty | tensors, any memory, in a control group that may have 1.25 times their bytes |
| `latency` | full | many loads in each process |
| `bucket` | full | tensors, private memory, from a web server on this machine with a link model |
| `bucket-tls` | full | the same with TLS |
| `bucket-second` | empty (checked) of what a first start from that server has kept on the disk | tensors, any memory |
| `bucket-upload` | full | nothing: tensors in memory are saved to a bucket on this machine |
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from .predecessor import FREED, MAPPED, STATES


@dataclass(frozen=True)
class Scenario:
    name: str
    #: The page cache before a load: `empty`, `full`, `half`, `left` as an earlier load left it, or `kept`: empty, and
    #: the load finds on the disk what an earlier one has kept there.
    cache: str
    #: The contestants that it compares: see `contestants.Contestant`.
    semantics: tuple[str, ...] = ("any", "private")
    #: Loads of one process. The first is timed apart from the others.
    loads: int = 1
    #: Processes that load at the same time.
    processes: int = 1
    #: The target of a neighbour's work meanwhile: `memory` or `disk`.
    neighbour: str | None = None
    #: Whether the process is held in a control group with little memory.
    limited: bool = False
    #: Whether the files lie in memory.
    tmpfs: bool = False
    #: How a web server gives the files: `http` or `https`.
    served: str | None = None
    #: Whether tensors are saved to a bucket, and not loaded.
    takes: bool = False
    #: The dtype that tensors are cast to.
    dtype: str | None = None
    #: The process that ends right before each load from the disk.
    predecessor: str = MAPPED

    @property
    def from_disk(self) -> bool:
        """Such loads into CPU memory are ranked by the time to the last byte touched, others by the load alone."""
        return self.cache in ("empty", "half", "kept")

    @property
    def state(self) -> str | None:
        """The state that the predecessor leaves behind, if there is one."""
        return STATES[self.predecessor] if self.from_disk else None


SCENARIOS: dict[str, Scenario] = {
    scenario.name: scenario
    for scenario in (
        Scenario("cold", "empty"),
        Scenario("cold-freed", "empty", predecessor=FREED),
        Scenario("warm", "full", ("any",), loads=3),
        Scenario("private", "full", ("private",)),
        Scenario("load_into", "full", ("into",)),
        Scenario("tmpfs", "full", tmpfs=True, loads=3),
        Scenario("half", "half"),
        Scenario("second", "left"),
        Scenario("cast", "full", dtype="F16"),
        Scenario("two", "empty", processes=2),
        Scenario("beside-memory", "full", ("private",), neighbour="memory"),
        Scenario("beside-disk", "empty", neighbour="disk"),
        Scenario("limited", "empty", limited=True),
        Scenario("latency", "full", loads=50),
        Scenario("bucket", "full", ("served", "served into"), served="http"),
        Scenario("bucket-tls", "full", ("served", "served into"), served="https"),
        Scenario("bucket-second", "kept", ("kept",), served="http"),
        Scenario("bucket-upload", "full", ("sent",), takes=True),
    )
}

#: Cold loads: from the same empty page cache, in two states of memory.
COLD = ("cold", "cold-freed")
#: From a web server.
BUCKET = ("bucket", "bucket-tls")
#: A second start, where the first one was from a web server.
SECOND = "bucket-second"
#: A save to a bucket.
UPLOAD = "bucket-upload"
#: The scenarios of every checkpoint.
CORE = (*COLD, "warm", "private", "load_into")


def chosen(names: Iterable[str]) -> tuple[str, ...]:
    """The scenarios that are meant: `cold` means both states of memory."""
    return tuple(dict.fromkeys(one for name in names for one in (COLD if name == "cold" else (name,))))


def accepts(scenario: Scenario, semantics: str, on_gpu: bool) -> bool:
    """Whether a contestant with these semantics is compared in the scenario."""
    if on_gpu and semantics not in ("into", "served", "served into", "kept", "sent"):
        # On a GPU all memory is private: there `warm` compares all loaders.
        return "any" in scenario.semantics
    return semantics in scenario.semantics


def ceilings(scenario: Scenario, semantics: str, on_gpu: bool) -> tuple[tuple[str, ...], ...]:
    """The limits of a load: the ways of its bytes, each with its stages. The slowest stage of the fastest way counts.

    None where nothing has to move (zero copy), or where what moves is up to the loader.
    """
    last = ("host_to_device",) if on_gpu else ()
    if scenario.served and not scenario.from_disk:
        return (("loop touched" if semantics == "served into" else "loop", *last),)
    if scenario.takes or scenario.processes > 1 or scenario.dtype or scenario.cache == "left":
        return ()
    if scenario.from_disk:
        return (("direct", *last), ("populate", *last))
    if on_gpu:
        return (("copy", *last),)
    return {"any": (), "private": (("fresh",),), "into": (("copy",),)}[semantics]
