"""``penstock push``: the files of a checkpoint's folder become objects in a bucket, as they are.

The files are those that `penstock pull` would bring: weights, their index, and the small files that an engine wants.
The rules of visibility are those of `penstock.save` to an address. The shards come first, then the small files, and the
index, or the only file of weights, last. What a killed push has left is cleared by the next one (`_journal`).
"""

from __future__ import annotations

import json
import os
import posixpath
import re
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple

from . import _core, _journal
from ._checkpoint import Checkpoint, open_as
from ._choices import Storage
from ._core import Options
from ._errors import IndexFileError, NotFoundError, PenstockError
from ._options import make_options
from ._paths import local_path, target_folder
from ._progress import INTERVAL, Meter, Progress
from ._pull import MANIFEST, MOST, checked
from ._report import Report, size_text
from ._running import under_way
from ._tls import warn_of_unchecked
from .integrations._small_files import small_files

DAY = 24 * 3600.0
"""Seconds. What is older, and of no live push of this machine, counts as abandoned."""
_INDEX = ".safetensors.index.json"
_USUAL = "model.safetensors.index.json"
_LONGEST_INDEX = 400_000_000
#: Also those of variants: `model.safetensors.index.fp16.json`
_AN_INDEX = re.compile(r".+\.safetensors\.index(\..+)?\.json")
#: As the core names shards that must not replace others
_TAGGED = re.compile(r".*-s[0-9a-f]{8}(-\d{5}-of-\d{5})?\.safetensors")
#: Names that people hardly give
_SURELY_TAGGED = re.compile(r".+-s[0-9a-f]{8}-\d{5}-of-\d{5}\.safetensors")


class PushedFile(NamedTuple):
    """A file that is an object now."""

    path: str
    """Its path in the folder. The name of the object may have a tag."""
    address: str
    nbytes: int


class Cleared(NamedTuple):
    """The uploads and objects that were cleared in a bucket."""

    uploads: list[str]
    """The addresses of incomplete uploads that the server has forgotten."""
    objects: list[str]
    """The addresses of shards that no index names, which are removed."""
    left: list[str]
    """The reasons for which something could not be cleared."""
    kept: list[str]
    """The addresses of removed shards whose bytes may stay: the bucket keeps versions."""


class Pushed(NamedTuple):
    """The result of `push`."""

    files: list[PushedFile]
    report: Report
    cleared: Cleared
    seconds: float


class _Index(NamedTuple):
    name: str
    text: str
    path: str | None
    """None: it was made, and is no file."""


class _Model:
    """The files of a checkpoint's folder."""

    def __init__(self, folder: str) -> None:
        checkpoint = open_as("folder", folder)
        self.tensors = len(checkpoint)
        self.weights = {checked(_within(folder, file), folder): file for file in checkpoint.files}
        self.sizes = [Path(file).stat().st_size for file in checkpoint.files]
        self.index = _index_of(folder, checkpoint, list(self.weights))
        self.small = _small(folder, self.weights)
        self.paths = {name: str(Path(folder, name)) for name in self.small}

    @property
    def name(self) -> str:
        """The name of the checkpoint."""
        return self.index.name.removesuffix(".index.json") if self.index else next(iter(self.weights))


def _within(folder: str, file: str) -> str:
    return Path(file).relative_to(Path(folder)).as_posix()


def _index_of(folder: str, checkpoint: Checkpoint, files: list[str]) -> _Index | None:
    """The index. Where several files have none, one is made: readers see all of them, or none."""
    names = [name for name in _core.names_in(f"{folder}/") if not name.endswith("/")]
    for number in _core.Checkpoint.to_open(folder, names):
        if names[number].endswith(_INDEX):
            text = _core.contents([f"{folder}/{names[number]}"], _LONGEST_INDEX)[0].decode("utf-8")
            if _named(text, f"{folder}/{names[number]}") == set(files):
                return _Index(names[number], text, f"{folder}/{names[number]}")
    if len(files) == 1:
        return None
    map = {name: _within(folder, info.file) for name, info in checkpoint.items()}
    made = {"metadata": {"total_size": checkpoint.nbytes}, "weight_map": map}
    return _Index(_USUAL, json.dumps(made, indent=2) + "\n", None)


def _named(text: str | bytes, index: str) -> set[str]:
    """The shards that an index names."""
    try:
        return {posixpath.normpath(str(name)) for name in json.loads(text)["weight_map"].values()}
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise IndexFileError(f"this is no index: {error}", path=index) from None


def _small(folder: str, weights: Iterable[str]) -> dict[str, bytes]:
    """The small files of a folder, except indexes: one that names shards which are not pushed would mislead readers."""

    def names(within: str) -> list[str]:
        return _core.names_in(f"{Path(folder, within)}/", folders=True)

    def read(files: list[str] | Any) -> list[bytes]:
        return [bytes(content) for content in _core.contents([str(Path(folder, name)) for name in files], MOST)]

    def is_pushed(path: str) -> bool:
        name = path.rpartition("/")[2]
        return path not in weights and name != MANIFEST and ".safetensors.index" not in name

    top = [name for name in names("") if name != MANIFEST]
    found = small_files(folder, lambda within: names(within) if within else top, read, True)
    return {checked(path, folder): text for path, text in sorted(found.items()) if is_pushed(path)}


def push(
    folder: str | os.PathLike[str],
    address: str,
    *,
    clear: bool = False,
    progress: Progress = None,
    options: Options | dict[str, Any] | None = None,
    storage: Storage | None = None,
) -> Pushed:
    """Uploads a checkpoint's folder.

    Args:
        folder: A folder of this machine.
        address: Where the files go: ``s3://bucket/prefix``, ``gs://``, ``az://``.
        clear: Also clear what is older than a day, as `clear_bucket` does.

    Raises:
        ChangedError: a file was written to while it was read, or the checkpoint at the address by another program.
        WriteError: the journal cannot be written, or another one not be read.
        PenstockError: as `penstock.open` of the folder, and as `penstock.save` to the address.
    """
    begun = time.perf_counter()
    place = target_folder(address, "address")
    source = local_path(folder, "folder")
    made = make_options(options)
    with under_way(f"a push to {place}"), Meter(progress, "push") as meter:
        if not Path(source).is_dir():
            raise NotFoundError("there is no such folder", path=source)
        # Clearing takes a while. The folder is read just before it is sent.
        cleared = clear_bucket(place, storage=storage) if clear else _clear_dead(place, storage)
        model = _Model(source.rstrip("/") or "/")
        save = _core.Save.push(
            place,
            list(model.weights.items()),
            model.index,
            [(name, content, model.paths[name]) for name, content in model.small.items()],
            model.name,
            _journal.new(),
            _journal.machine(),
            made,
            storage,
        )
        try:
            while not save.wait(INTERVAL if meter.active else None):
                meter.update(*save.progress())
            meter.update(*save.progress(), final=True)
            report = Report(save.report(), tensors=model.tensors)
            names = save.files()
        finally:
            save.close()
    warn_of_unchecked()
    return Pushed(_listed(place, model, names), report, cleared, time.perf_counter() - begun)


def _listed(place: str, model: _Model, names: list[str]) -> list[PushedFile]:
    files = [
        PushedFile(path, f"{place}/{name}", size)
        for path, size, name in zip(model.weights, model.sizes, names, strict=False)
    ]
    files += [PushedFile(path, f"{place}/{path}", len(content)) for path, content in model.small.items()]
    if model.index:
        name, text, _ = model.index
        files.append(PushedFile(name, f"{place}/{name}", len(text.encode())))
    return files


# What killed pushes leave


class _Clearing:
    """A bucket that is being cleared."""

    def __init__(self, place: str, storage: Storage | None) -> None:
        self._place, self._storage = place, storage
        self._bucket = _core.Bucket(place, storage)
        self.cleared = Cleared([], [], [], [])
        self._live = {journal.path: journal for journal in _journal.live()}

    def _live_objects(self, beside: _journal.Journal | None = None) -> set[str]:
        """The objects of pushes that run. One may have been killed since, and be the one that is cleared now."""
        others = [journal for path, journal in self._live.items() if beside is None or path != beside.path]
        return {address for journal in others for address in journal.objects()}

    def has(self, journal: _journal.Journal) -> bool:
        """Whether a journal is of this bucket."""

        def bucket(address: str, identity: str | None) -> tuple[str, str]:
            return (identity or "").removesuffix(address), "/".join(address.split("/", 3)[:3])

        return bucket(journal.address, journal.identity) == bucket(self._place, self._bucket.identity())

    def clear_dead(self) -> None:
        """Clears what killed pushes of this machine have left in this bucket."""
        for journal in _journal.dead(self.cleared.left):
            if not self.has(journal):
                continue
            try:
                is_done = self._clear_journal(journal)
            except PenstockError as error:
                self.cleared.left.append(str(error))
                continue
            if is_done:
                journal.path.unlink(missing_ok=True)

    def _clear_journal(self, journal: _journal.Journal) -> bool:
        """Returns whether nothing of the journal was skipped.

        A name with the tag of the push is that push's alone. Another object may be another program's by now.
        """
        for address, upload in journal.uploads():
            self._forget(address, upload)
        is_done = self._clear_lost(journal)
        if journal.index is None:
            return is_done  # its only file is the checkpoint, if it is there
        named = self._named(f"{journal.address}/{journal.index}")
        live, versions = self._live_objects(journal), journal.versions()
        for address in journal.objects():
            there, known = self._bucket.version(address), versions.get(address)
            if there is None or known not in (None, there) or address.removeprefix(f"{journal.address}/") in named:
                continue  # gone, another program's by now, or of use
            if address in live:
                is_done = False
            elif journal.has_tag(address):
                self._remove(address)
            else:
                text = "a killed push may have left it, or another program: remove it if no reader needs it"
                self.cleared.left.append(f"{address}: {text}")
                is_done = False
        return is_done

    def _clear_lost(self, journal: _journal.Journal) -> bool:
        """The same for uploads whose names the push did not live to hear."""
        known = {address for address, _ in journal.uploads()} | set(journal.versions())
        # A try without an answer may have begun an upload beside the known one
        lost = {address for address in journal.objects() if address not in known or journal.has_tag(address)}
        if not lost:
            return True
        try:
            unfinished = _core.Bucket(journal.address, self._storage).unfinished() or []
        except PenstockError as error:
            self.cleared.left.append(f"uploads whose names are not known: {error}")
            return False
        live = {upload for other in self._live.values() for upload in other.uploads()}
        is_done = True
        for address, upload, _ in unfinished:
            if address not in lost or (address, upload) in live:
                continue
            if journal.has_tag(address):
                self._forget(address, upload)
            else:
                text = (
                    "an incomplete upload of a killed push, or of another program: --clear ends it when it is a day old"
                )
                self.cleared.left.append(f"{address}: {text}")
                is_done = False
        return is_done

    def _is_old(self, address: str) -> bool:
        age = self._bucket.age(address)
        return age is not None and age > DAY

    def clear_old(self) -> None:
        """Clears what is older than a day: uploads below the address, and shards that lie directly there."""
        live = {upload for journal in self._live.values() for upload in journal.uploads()}
        for address, upload, age in self._bucket.unfinished() or []:
            if age > DAY and (address, upload) not in live:
                self._forget(address, upload)
        try:
            names = _core.names_in(f"{self._place}/", None, self._storage)
        except NotFoundError:
            return
        tagged = [name for name in names if _TAGGED.fullmatch(name)]
        if not tagged:
            return
        named, unsure = self._named_by_all([name for name in names if _AN_INDEX.fullmatch(name)])
        objects = self._live_objects()
        for name in tagged:
            address = f"{self._place}/{name}"
            if name in named or address in objects:
                continue
            why = unsure
            if not _SURELY_TAGGED.fullmatch(name):
                why = "its name is not like NAME-sTAG-00001-of-00003.safetensors"
            elif why is None and not self._is_old(address):
                why = "it is not a day old"
            if why is None:
                self._remove(address)
            else:
                self.cleared.left.append(f"{address}: no index names it, as far as is known, but {why}")

    def _named_by_all(self, indexes: list[str]) -> tuple[set[str], str | None]:
        """The shards that these indexes name, and the reason for which there may be more."""
        named, unsure = set[str](), None if indexes else "there is no index beside it"
        for name in indexes:
            index = f"{self._place}/{name}"
            try:
                named |= _named(_core.contents([index], _LONGEST_INDEX, None, self._storage)[0], index)
            except PenstockError as error:
                unsure = f"an index cannot be read: {error}"
        return named, unsure

    def _named(self, index: str) -> set[str]:
        try:
            return _named(_core.contents([index], _LONGEST_INDEX, None, self._storage)[0], index)
        except NotFoundError:
            return set()

    def _forget(self, address: str, upload: str) -> None:
        self._bucket.forget(address, upload)
        self.cleared.uploads.append(address)

    def _remove(self, address: str) -> None:
        if self._bucket.remove(address):
            self.cleared.kept.append(address)
        self.cleared.objects.append(address)


def _clear_dead(place: str, storage: Storage | None) -> Cleared:
    clearing = _Clearing(place, storage)
    clearing.clear_dead()
    return clearing.cleared


def clear_bucket(address: str, *, storage: Storage | None = None) -> Cleared:
    """Clears what killed pushes of this machine have left in a bucket, and what is older than a day below the address:
    incomplete uploads, which the server lists, and shards with a tag that no index names. Nothing of a push that runs.

    Raises:
        PenstockError: the server does not list uploads or objects, or does not let them be removed.
    """
    place = target_folder(address, "address")
    with under_way(f"clearing {place}"):
        clearing = _Clearing(place, storage)
        clearing.clear_dead()
        clearing.clear_old()
    return clearing.cleared


def described(pushed: Pushed) -> str:
    """The result of `push`, as text."""
    nbytes = sum(file.nbytes for file in pushed.files)
    many = f"{len(pushed.files)} file{'s' * (len(pushed.files) != 1)}"
    rate = f": {nbytes / pushed.seconds / 1e9:.2f} GB/s" if pushed.seconds else ""
    lines = [f"{many}, {size_text(nbytes)} in {pushed.seconds:.1f} s{rate}"]
    lines += [f"{f['from']}: {f['to']} ({f['reason']})" for f in pushed.report["fallbacks"]]
    return "\n".join([*lines, *_described(pushed.cleared)])


def describe_cleared(cleared: Cleared) -> str:
    """The result of `clear_bucket`, as text."""
    return "\n".join(_described(cleared) or ["nothing to clear"])


def _described(cleared: Cleared) -> list[str]:
    lines = [f"cleared an incomplete upload: {address}" for address in cleared.uploads]
    lines += [f"removed a shard that no index names: {address}" for address in cleared.objects]
    if cleared.kept:
        lines.append(f"the bucket keeps versions: the bytes of {len(cleared.kept)} of these may stay as old ones")
    return lines + [f"not cleared: {why}" for why in cleared.left]
