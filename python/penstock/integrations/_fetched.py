"""A model at an address, for engines that want a folder: its small files are fetched into one, before any weights.

For one address the folder has the same path in every run, because engines keep what they compile by the path of the
model. It is this process's alone, which a lock says, and is removed when the process ends. Other processes that run at
the same time have numbers behind the name. What a killed process has left, the next one takes over.

`penstock.quiesce` lets go of the lock, because an image of the process cannot open a folder that is gone. A note in the
folder says then whose it is.
"""

from __future__ import annotations

import atexit
import fcntl
import hashlib
import json
import os
import re
import shutil
import tempfile
import threading
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

from .. import _core, _running
from .._checkpoint import Checkpoint
from .._choices import Storage
from .._errors import InvalidError, NotFoundError, PenstockError
from .._paths import without_secrets
from ._format import FORMAT
from ._pins import PINS, check_pinned, pins_of, versions_of
from ._remote import Files, file_name, is_remote, open_files, temporary_directory
from ._small_files import Names, Read, small_files

MOST = 64 << 20
"""Bytes of a small file. The largest tokenizers have half of that."""
#: One of these is what an engine cannot do without.
_CONFIGURATIONS = ("config.json", "params.json")
ADVICE = (
    "give a folder with the configuration and the tokenizer for the model, and the address of its weights in "
    '--model-loader-extra-config: {"weights": "..."}'
)


class Fetched(NamedTuple):
    """A model that the engine finds in a folder, and its weights elsewhere."""

    folder: str
    weights: str


class _Place(NamedTuple):
    """Where a model is."""

    weights: str
    """The source to open. On the Hub it names a commit, which is then the same for all ranks."""
    names: Names
    read: Read


#: Processes with one address that have a folder of the same path in every run. One more gets a random name.
_MOST_FOLDERS = 32
_filling = threading.Lock()
#: By path: a descriptor of the folder, which has the lock (-1: no lock, because the name is random or the process was
#: quiesced), and the process that has it.
_held: dict[str, tuple[int, int]] = {}
#: In a folder without a lock: the process that it belongs to.
_NOTE = ".penstock-process"


def fetch(
    place: str, storage: Storage | None, *, code: bool = False, weights: bool = True, which: Files = "model"
) -> Fetched:
    """Fetches what an engine wants of the model at ``place`` besides its weights.

    Of the weights the folder has the headers: engines look for names and dtypes there. Nothing can be loaded from it.

    Args:
        place: A folder in an object store or on the Hub, or an index or a shard file in one.
        storage: How servers are asked.
        code: Whether to fetch Python files too. An engine runs them if it is told to trust them.
        weights: Whether it has weights and a configuration; a tokenizer alone needs neither.
        which: The weights that are meant.

    Raises:
        InvalidError: a web server, which lists nothing.
        NotFoundError: there is no such folder, or no configuration or no checkpoint in it.
        UnsupportedError: one of the files, or its name, is too long, or no file can be called so.
        ChangedError: the model was replaced meanwhile.
        WriteError: no folder can be written to.
        PenstockError: as `penstock.open`.
    """
    with _running.under_way(f"a fetch of the small files of {without_secrets(place)}"):
        return _fetched(place, storage, code, weights, which)


def _fetched(place: str, storage: Storage | None, code: bool, weights: bool, which: Files) -> Fetched:
    found = _place(place, storage)
    # Before the small files, and once more after them: so they are of one version with the weights
    checkpoint: Checkpoint | None = None
    failed: PenstockError | None = None
    if weights:
        try:
            checkpoint = open_files(found.weights, storage, which)
        except PenstockError as error:
            failed = error
    files = small_files(place, found.names, found.read, code)
    if weights and not any(name in files for name in _CONFIGURATIONS):
        held = ", ".join(sorted(found.names(""))[:8])
        text = f"there is no {' or '.join(_CONFIGURATIONS)} beside the weights, only {held}: {ADVICE}"
        raise NotFoundError(text, path=without_secrets(place))
    if failed is not None:
        raise failed
    if checkpoint is not None:
        check_pinned(open_files(found.weights, storage, which), versions_of(checkpoint), "this start began")
        headers = headers_of(checkpoint)
        files = {name: content for name, content in files.items() if not _is_left_over(name, content, headers)}
        files |= {**headers, PINS: pins_of(checkpoint)}
    endpoint = str((storage or {}).get("endpoint", ""))
    digest = hashlib.sha256(f"{endpoint} {place}".encode()).hexdigest()[:12]
    last = re.sub(r"[^A-Za-z0-9._]+", "_", place.rstrip("/").rpartition("/")[2])[-40:]
    with _filling:
        folder = _claimed(f"{last}-{digest}")
        _fill(folder, files)
    return Fetched(folder, found.weights)


def _place(place: str, storage: Storage | None) -> _Place:
    if place.startswith("hf://"):
        from .._hub_folder import HubFolder

        on_hub = HubFolder(place, MOST, storage)
        return _Place(on_hub.at, on_hub.names, on_hub.read)
    if place.lower().startswith(("http://", "https://")):
        text = f"a web server does not say which files it has: {ADVICE}"
        raise InvalidError(f"{without_secrets(place)}: {text}")
    # As `penstock.open`: what ends like a file is one. One slash ends a folder; if there are more, they are of its name
    folder = place.rpartition("/")[0] if place.endswith((".safetensors", ".json")) else place.removesuffix("/")

    def names(within: str) -> list[str]:
        return _core.names_in("/".join(filter(None, (folder, within))) + "/", None, storage, folders=True)

    def read(files: Sequence[str]) -> list[bytes]:
        return _core.contents([f"{folder}/{name}" for name in files], MOST, None, storage)

    return _Place(place, names, read)


def _is_left_over(name: str, content: bytes, shards: Collection[str]) -> bool:
    """Whether this is an index of other shards: an engine would look for those, and find nothing."""
    if not name.endswith(".safetensors.index.json"):
        return False
    with suppress(ValueError, KeyError, TypeError, AttributeError):
        return not set(shards) <= set(json.loads(content)["weight_map"].values())
    return True


def headers_of(checkpoint: Checkpoint) -> dict[str, bytes]:
    """Shard files without tensors, by name. Whatever reads a tensor from such a file fails, because it ends there."""
    core = checkpoint._core
    files: dict[str, bytes] = {}
    for number, path in enumerate(checkpoint.files):
        start, tensors = core.data_start(number), range(*core.file_tensors(number))
        header: dict[str, Any] = {}
        if metadata := core.file_metadata(number):
            header["__metadata__"] = metadata
        for index in tensors:
            name, dtype, shape, _, begin, end = core.info(index)
            header[name] = {"dtype": dtype, "shape": shape, "data_offsets": (begin - start, end - start)}
        text = json.dumps(header).encode()
        files[file_name(path)] = len(text).to_bytes(8, "little") + text
    return files


def _claimed(name: str) -> str:
    """The folder of this process that is called so, or with a number behind it if other processes have that."""
    first = str(Path(temporary_directory(), f"penstock-{os.getuid()}-{name}"))
    for path, (descriptor, process) in list(_held.items()):
        if process == os.getpid() and path.startswith(first):
            # After a restore of the process elsewhere it is gone
            if descriptor >= 0 and Path(path).is_dir():
                return path
            _let_go(path)
            with suppress(OSError):
                Path(path).mkdir(0o700)
            if _locked(path):
                return path
    for path in (first, *(f"{first}-{number}" for number in range(1, _MOST_FOLDERS))):
        with suppress(OSError):  # it may be there
            Path(path).mkdir(0o700)
        if _locked(path):
            return path
    path = tempfile.mkdtemp(prefix=f"{Path(first).name}-", dir=temporary_directory())
    _held[path] = -1, os.getpid()
    return path


def _locked(path: str) -> bool:
    """Whether this folder is private, and has become this process's."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    except OSError:
        return False
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        about = os.fstat(descriptor)
        private = about.st_uid == os.getuid() and not about.st_mode & 0o077
        if private and os.path.samestat(about, os.lstat(path)) and not _is_anothers(path):
            _held[path] = descriptor, os.getpid()
            descriptor = -1
            return True
    except OSError:  # another process has it, or has just removed it
        pass
    finally:
        if descriptor >= 0:
            os.close(descriptor)
    return False


def _fill(folder: str, files: Mapping[str, bytes]) -> None:
    """Has the folder hold these files and no others. Each is there whole or not at all."""
    root = Path(folder)
    for name, content in files.items():
        to = root / name
        to.parent.mkdir(parents=True, exist_ok=True)
        new = to.with_name(f".{to.name}.new")
        new.write_bytes(content)
        new.replace(to)
    for path in root.rglob("*"):
        if path.is_file() and str(path.relative_to(root)) not in files:
            path.unlink()


def _process(number: int | str = "self") -> str:
    """The identity of a process: its number, its start time, and the namespace of its number."""
    began = Path(f"/proc/{number}/stat").read_text().rpartition(")")[2].split()[19]
    return f"{os.getpid() if number == 'self' else number} {began} {Path('/proc/self/ns/pid').readlink()}"


def _is_anothers(path: str) -> bool:
    """Whether this folder belongs to another process, which has no lock on it."""
    try:
        noted = Path(path, _NOTE).read_text()
    except OSError:
        return False
    number, _, rest = noted.partition(" ")
    if not number.isdecimal() or rest.rpartition(" ")[2] != str(Path("/proc/self/ns/pid").readlink()):
        return True  # nobody here can say whether it lives
    try:
        return noted == _process(number) and int(number) != os.getpid()
    except OSError:
        return False  # it has ended


def _let_go(path: str) -> None:
    """Gives the lock of a folder back, if there is one."""
    descriptor, _ = _held.pop(path)
    if descriptor >= 0:
        os.close(descriptor)


def _let_go_of_all() -> None:
    """Gives the locks of this process back. Its folders stay its own."""
    with _filling:
        for path, (descriptor, process) in list(_held.items()):
            if process == os.getpid() and descriptor >= 0:
                with suppress(OSError):  # it is gone
                    Path(path, _NOTE).write_text(_process())
                _let_go(path)
                _held[path] = -1, process


_running.keepers.append(_let_go_of_all)


def _forget_the_lock() -> None:
    """In a forked child: another thread of the parent may have held it."""
    global _filling
    _filling = threading.Lock()


os.register_at_fork(after_in_child=_forget_the_lock)


@atexit.register
def remove_all() -> None:
    """Removes the folders of this process. Its forked children have none of their own."""
    for path, (descriptor, process) in list(_held.items()):
        if process == os.getpid() and _held.pop(path, None) is not None:
            shutil.rmtree(path, ignore_errors=True)
            if descriptor >= 0:
                os.close(descriptor)


def with_weights(given: Mapping[str, Any], fetched: Sequence[Fetched]) -> dict[str, Any]:
    """The user's options for the engine's loader, with the places of these models' weights.

    Raises:
        InvalidError: that names another place for the weights.
    """
    others = given.get("weights") or {}
    if not isinstance(others, Mapping):
        raise InvalidError(
            f"the model is an address, and weights={without_secrets(repr(others))} is another one: {ADVICE}"
        )
    return {**given, "weights": {**others, **{one.folder: one.weights for one in fetched}}}


def refuse_revision(place: Any, **revisions: Any) -> None:
    """Raises InvalidError if ``place`` is an address, and one of its ``revisions`` is given beside it."""
    if not isinstance(place, str) or not is_remote(place):
        return
    for name, revision in revisions.items():
        if revision is not None:
            text = f"{name}={revision!r}: this is an address, which has none, except hf://org/name@revision"
            raise InvalidError(f"{without_secrets(place)}: {text}")


def is_ours(load_format: Any, model: Any) -> bool:
    """Whether an engine's arguments are for a model at an address, and for Penstock."""
    ours = isinstance(load_format, str) and load_format.lower() == FORMAT
    return ours and isinstance(model, str) and is_remote(model)
