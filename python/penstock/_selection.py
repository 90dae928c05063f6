"""The tensors, and the part of each, that ``names=`` and ``slices=`` choose."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from . import _core
from ._errors import ArgumentTypeError, InvalidError, SliceError, SliceTypeError, UnknownTensorError
from ._late_imports import importing

Names = str | Iterable[str] | Callable[[str], bool] | None
"""A glob, a list of names and globs, or a function from a name to True or False; None is every tensor."""

Cut = slice | list[slice] | tuple[Any, ...]
"""A slice, or a tuple with one slice per dimension. Missing dimensions are whole; one Ellipsis fills the rest.

Steps are 1 or more. ``slices=`` also takes a list of slices in place of one: what they name, one after the other."""

Slices = Mapping[str, Cut] | Callable[["TensorInfo"], Cut | None] | None
"""The wanted part by name, or a function that takes a `TensorInfo` and returns the part or None (the whole)."""

Placements = Sequence[Any]
"""One for each dimension of a mesh: `Shard`, `Replicate` or `_StridedShard` of torch, or what is like them."""

Rule = Callable[..., Placements | None] | Mapping[str, Placements | None]
"""From a `TensorInfo` to its placements, or None where this rank does not want it; or these by name. A function with
two required arguments also gets the rank's coordinates in the mesh."""

Range = tuple[int, int, int]
"""(first, past-the-last, step) in elements; the step is 1 or more."""

Region = list[Range]
"""A range per dimension."""

Axes = list[list[Range]]
"""Ranges per dimension, at least one in each: the positions that they name, one after the other."""

_GLOB = frozenset("*?[")
"""The characters that make a name a glob."""


class TensorInfo(NamedTuple):
    """Dtype, shape, size and place of one tensor."""

    name: str
    """Its name."""
    dtype: str
    """Its element type as spelled in the header, such as ``"BF16"``."""
    shape: tuple[int, ...]
    """Its extent per dimension, in elements; ``()`` for a scalar."""
    nbytes: int
    """Its size in bytes."""
    file: str
    """Path of its shard file."""
    offsets: tuple[int, int]
    """(first, past-the-last) byte, counted from the start of the file."""


class Selection:
    """The wants of one load: tensor numbers, their names, and the regions of those that are cut.

    A want in ``scattered`` is not one region but several ranges in some dimension. A load takes it apart first.
    """

    __slots__ = ("core", "names", "regions", "scattered", "wants")

    def __init__(
        self,
        core: _core.Checkpoint,
        names: list[str],
        wants: list[int] | None,
        regions: list[Region | None] | None = None,
    ) -> None:
        self.core = core
        self.names = names
        self.wants = wants
        self.regions = regions
        self.scattered: dict[int, Axes] = {}

    def __len__(self) -> int:
        return len(self.names)

    def tensor(self, want: int) -> int:
        """Number of the tensor that want number ``want`` is (a part of)."""
        return want if self.wants is None else self.wants[want]

    def describe(self, want: int) -> tuple[str, tuple[int, ...]]:
        """(dtype, shape in elements) of what is wanted."""
        _, dtype, shape, _, _, _ = self.core.info(self.tensor(want))
        if want in self.scattered:
            return dtype, tuple(sum(len(range(*part)) for part in parts) for parts in self.scattered[want])
        region = None if self.regions is None else self.regions[want]
        return dtype, shape if region is None else tuple(len(range(*part)) for part in region)

    def axes(self, want: int) -> Axes:
        """The wanted parts, as ranges of the tensor's positions."""
        if want in self.scattered:
            return self.scattered[want]
        region = None if self.regions is None else self.regions[want]
        return [[part] for part in (self._whole(want) if region is None else region)]

    def _whole(self, want: int) -> Region:
        return [(0, size, 1) for size in self.core.info(self.tensor(want))[2]]

    def with_regions(self, found: Sequence[tuple[int, Region | None]]) -> "Selection":
        """The selection of these wants; regions are None for the whole tensor. A want may come several times."""
        regions = [None if region is None or region == self._whole(want) else region for want, region in found]
        return Selection(
            self.core,
            [self.names[want] for want, _ in found],
            [self.tensor(want) for want, _ in found],
            regions if any(region is not None for region in regions) else None,
        )

    def by_dtype(self) -> dict[str, list[int]]:
        """Want numbers by dtype."""
        return self.core.by_dtype(self.wants)

    def file(self, want: int) -> str:
        """Path of the file that the want's bytes are in."""
        return self.core.path(self.core.info(self.tensor(want))[3])

    def part(self, wants: Sequence[int]) -> "Selection":
        """The selection of these wants alone."""
        return Selection(
            self.core,
            [self.names[w] for w in wants],
            [self.tensor(w) for w in wants],
            None if self.regions is None else [self.regions[w] for w in wants],
        )


def unknown(core: _core.Checkpoint, name: str) -> UnknownTensorError:
    """The error for a name that the checkpoint does not contain, with what was perhaps meant."""
    files = core.files()
    where = files[0] if len(files) == 1 else f"{files[0]} and {len(files) - 1} more files" if files else "checkpoint"
    text = f"{where}: File does not contain tensor {name}"
    if isinstance(name, str) and len(core) <= 20_000:  # a comparison with every name takes microseconds each
        with importing():
            import difflib

        close = difflib.get_close_matches(name, core.keys(), 1)
        if close:
            text += f" (did you mean {close[0]}?)"
    return UnknownTensorError(text, path=files[0] if len(files) == 1 else None, tensor=name)


def _nothing_matches(core: _core.Checkpoint, glob: str) -> UnknownTensorError:
    """The error for a glob that matches nothing, with a glob of the same parts that matches something, if one does."""
    files = core.files()
    text = f"{files[0] if len(files) == 1 else 'the checkpoint'}: no tensor's name matches {glob}"
    if len(core) <= 20_000:
        with importing():
            import difflib

        *parts, last = glob.split(".")
        literal = last.rstrip("*")
        known = core.keys()
        if _GLOB.isdisjoint("".join([*parts, literal])):
            stars = last[len(literal) :]
            parts += [literal] if literal else []
            starts = {".".join(name.split(".")[: len(parts)]) for name in known}
            close = difflib.get_close_matches(".".join(parts), sorted(starts), 1)
            if close:
                text += f" (did you mean {close[0]}{stars if literal else '.' + stars}?)"
        if "did you mean" not in text:
            first = list(dict.fromkeys(name.split(".")[0] for name in known))
            text += f"; the names begin with {', '.join(first[:6])}{' and more' * (len(first) > 6)}"
    return UnknownTensorError(text, path=files[0] if len(files) == 1 else None)


def _numbers(core: _core.Checkpoint, names: Names) -> list[int] | None:
    if names is None:
        return None
    if callable(names):
        return [i for i, name in enumerate(core.keys()) if names(name)]
    if not isinstance(names, Iterable):
        raise ArgumentTypeError(f"names={names!r}: give names, globs, or a function that takes a name")
    found: dict[int, None] = {}
    for name in [names] if isinstance(names, str) else names:
        if not isinstance(name, str):
            raise InvalidError(f"names: {name!r} is not a string: give names, globs, or a function that takes a name")
        if name in core:  # a name may contain what looks like a glob
            found[core.index(name)] = None
            continue
        if _GLOB.isdisjoint(name):
            raise unknown(core, name)
        try:
            matching = core.matching([name])
        except (UnknownTensorError, UnicodeEncodeError):  # no name has lone surrogates
            raise _nothing_matches(core, name) from None
        found.update(dict.fromkeys(matching))
    return list(found)


def region_of(info: TensorInfo, cut: Any) -> Region:
    """The part of a tensor that a slice, or a tuple of slices, means. Raises SliceError."""
    return [one for [one] in axes_of(info, cut, several=False)]


def axes_of(info: TensorInfo, cut: Any, several: bool = True) -> Axes:
    """As `region_of`, where a list of slices may stand for one if there may be ``several``."""
    name, shape = info.name, info.shape

    def refused(why: str) -> SliceError:
        return SliceError(f"slice of {name}: {why}", path=info.file, tensor=name)

    cuts = list(cut) if isinstance(cut, tuple) else [cut]
    dots = [i for i, c in enumerate(cuts) if c is Ellipsis]
    if len(dots) > 1:
        raise refused("more than one Ellipsis")
    if dots:
        cuts[dots[0] : dots[0] + 1] = [slice(None)] * max(0, len(shape) - len(cuts) + 1)
    if len(cuts) > len(shape):
        raise refused(f"{len(cuts)} slices for the {len(shape)} dimensions of {list(shape)}")

    def range_of(c: Any, d: int, size: int) -> Range:
        if not isinstance(c, slice):
            raise refused(f"dimension {d} needs a slice(start, stop), not {c!r}")
        if c.step is not None and (not isinstance(c.step, int) or c.step < 1):
            raise refused(f"dimension {d} has step {c.step!r}; give a whole number, 1 or more")
        for bound in (c.start, c.stop):
            if bound is not None and not hasattr(bound, "__index__"):
                why = f"slice of {name}: dimension {d} has bound {bound!r}; give a whole number"
                raise SliceTypeError(why, path=info.file, tensor=name)
            # Python would clamp this; a rank whose range does not fit has been given the wrong plan
            if bound is not None and not -size <= bound <= size:
                raise refused(f"{c.start}:{c.stop} is outside dimension {d} of {list(shape)}")
        start, stop, step = c.indices(size)
        return start, max(start, stop), step

    axes: Axes = []
    for d, size in enumerate(shape):
        c = cuts[d] if d < len(cuts) else slice(None)
        if several and isinstance(c, list):
            ranges = [range_of(one, d, size) for one in c]
            axes.append([one for one in ranges if one[0] < one[1]] or [(0, 0, 1)])
        else:
            axes.append([range_of(c, d, size)])
    return axes


def info_of(core: _core.Checkpoint, index: int, files: Sequence[str] | None = None) -> TensorInfo:
    """The checkpoint's entry of tensor number ``index``; for many, ``files`` are its files, listed once."""
    name, dtype, shape, file, begin, end = core.info(index)
    return TensorInfo(name, dtype, shape, end - begin, core.path(file) if files is None else files[file], (begin, end))


def select(core: _core.Checkpoint, names: Names = None, slices: Slices = None) -> Selection:
    """The selection that ``names`` and ``slices`` stand for, in the order asked (file order for globs and predicates).

    Raises:
        UnknownTensorError: a name that is not there, or a glob that nothing matches.
        SliceError: a range outside its tensor, or one that goes backwards.
        InvalidError: slices of a tensor that is not among the names.
    """
    wants = _numbers(core, names)
    keys = core.keys() if wants is None else [core.info(i)[0] for i in wants]
    selection = Selection(core, keys, wants)
    if slices is None:
        return selection
    regions: list[Region | None] = [None] * len(keys)
    files = core.files()

    def cut_to(want: int, info: TensorInfo, cut: Any) -> None:
        axes = axes_of(info, cut)
        if any(len(ranges) > 1 for ranges in axes):
            selection.scattered[want] = axes
        elif any(ranges[0] != (0, size, 1) for ranges, size in zip(axes, info.shape, strict=True)):
            regions[want] = [ranges[0] for ranges in axes]

    if callable(slices):
        for want in range(len(keys)):
            info = info_of(core, selection.tensor(want), files)
            cut = slices(info)
            if cut is not None:
                cut_to(want, info, cut)
    else:
        if not isinstance(slices, Mapping):
            raise ArgumentTypeError(f"slices={slices!r}: give a dict by name, or a function that takes a TensorInfo")
        place = {name: want for want, name in enumerate(keys)}
        for name, cut in slices.items():
            if name not in place:
                if name not in core:
                    raise unknown(core, name)
                raise InvalidError(f"slices: {name} is not among the names to load")
            want = place[name]
            cut_to(want, info_of(core, selection.tensor(want), files), cut)
    if any(r is not None for r in regions):
        selection.regions = regions
    return selection
