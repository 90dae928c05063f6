"""The request of a load: the arguments that every way to load takes, checked."""

from typing import Any, NamedTuple, Protocol

from ._choices import ORDERS, Framework, Order, Sequencing, check_choice
from ._core import Checkpoint, Load, Mesh, Options, Shares
from ._device import Device
from ._events import NOTHING, Seen
from ._framework import Adapter
from ._frameworks import make_adapter, make_joining
from ._report import Report
from ._selection import Names, Selection, Slices, select


class Opened(Protocol):
    """The interface of a checkpoint for its loads: a `Checkpoint` has it."""

    _core: Checkpoint

    @property
    def files(self) -> list[str]: ...
    @property
    def warnings(self) -> list[str]: ...
    @property
    def last_report(self) -> Report | None: ...
    def _ended(self, load: Load) -> Report: ...


class Agreement(NamedTuple):
    """The agreement of the ranks."""

    exchange: tuple[Shares, Mesh] | None
    """The shares of the ranks, and the connections; None if each rank loads alone."""
    options: Options
    apart: tuple[int, str] | None = None
    """If each loads alone: how many they are, and why."""


class Group(Protocol):
    """The ranks that load together, before they do: a `_group.Rendezvous`."""

    def agree(self, selection: Selection, options: Options, order: str, device: Device) -> Agreement | None: ...


class Finish(Protocol):
    """Makes what the caller gets of the tensors of wants, as they come. It is of one load."""

    def add(self, want: int, tensor: Any) -> tuple[bool, Any]:
        """Whether what the want is (a piece of) is complete, and the caller's tensor if it is."""


class Request(NamedTuple):
    """The wanted tensors of a checkpoint, their destination, and the options."""

    checkpoint: Opened
    selection: Selection
    device: Device
    options: Options
    order: Sequencing
    group: Group | None = None
    """The ranks that load it together."""
    finish: Finish | None = None
    """The function from the wants' tensors to the caller's; None: they are the same."""
    seen: Seen = NOTHING
    """The operation, for operators."""

    def as_asked(self, names: Names) -> "Request":
        """The same, but that tensors which were listed are handed out as listed, unless they are wanted by layer."""
        if names is None or callable(names) or self.order != "file":
            return self
        tensors = [self.selection.tensor(want) for want in range(len(self.selection.names))]
        return self if tensors == sorted(tensors) else self._replace(order="asked")


def prepare(
    checkpoint: Opened,
    device: Device,
    names: Names,
    dtype: Any,
    framework: Framework | None,
    options: Options,
    slices: Slices = None,
    order: Order = "file",
) -> tuple[Request, Adapter]:
    """The request that the arguments of every way to load stand for. Imports the framework; reads nothing."""
    selection, finish = select(checkpoint._core, names, slices), None
    if selection.scattered:
        selection, finish = make_joining(framework, selection, dtype)
    adapter = make_adapter(framework, selection, device, dtype)
    check_choice("order", order, ORDERS)
    return Request(checkpoint, selection, device, options, order, finish=finish), adapter
