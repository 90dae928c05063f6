"""The local cache of the Hugging Face Hub: which folder ``org/name@revision`` stands for. Never the network, and
nothing is written here. What the cache lacks, `_hub_network` reads. With a disk cache, the core brings whole files into
the local cache too (`_hub_layout`).

A repository there is a folder ``models--org--name`` (checked against huggingface_hub 2.4):

    refs/<branch or tag>         a commit hash; absent where only commits were asked for by their hash
    snapshots/<commit>/<path>    a link to ../../blobs/<digest>; a plain file where links were not possible
    blobs/<digest>               sha256 of the content for LFS and Xet files, git's blob sha1 for all others; may itself
                                 be a link into <cache>/blobs, whose names are Xet hashes and no digests of the content
    trees/<commit>.json          what the repository holds at that commit, with digests; newer versions only

huggingface_hub is neither imported nor needed.
"""

from __future__ import annotations

import errno
import json
import os
import re
import stat
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import unquote

from . import _core
from ._choices import Storage
from ._errors import AccessError, InvalidError, NotFoundError, PenstockError, ReadError
from ._late_imports import importing
from ._patience import asking, patiently
from ._report import size_text

SCHEME = "hf://"
DEFAULT_REVISION = "main"

ADVICE = "`hf download "
"""How the sentence begins that says how to fill the cache."""
_SHOWN = 8
"""Names that an error lists before it counts the rest."""

_PART = r"\w(?:[\w.-]{0,94}\w)?"
REPOSITORY = rf"(?:{_PART}/)?{_PART}"
_SHORT = re.compile(rf"(?P<repository>{REPOSITORY})(?:@(?P<revision>.*))?", re.ASCII | re.DOTALL)
# In the scheme's grammar a slash ends the revision, except in those that always have one; others are written with %2F
_LONG = re.compile(
    rf"{SCHEME}(?:models/)?(?P<repository>{_PART}/{_PART}|{_PART}(?!/))"
    r"(?:@(?P<revision>refs/(?:pr/\d+|convert/[\w.-]+)(?![^/])|[^/]*))?(?:/(?P<within>.*))?",
    re.ASCII | re.DOTALL,
)
_FILE = re.compile(r".*\.(safetensors|json|bin|pt|pth|ckpt|gguf|git)", re.DOTALL)
COMMIT = re.compile(r"[0-9a-f]{40}")
_DIGEST = re.compile(r"[0-9a-f]{64}|[0-9a-f]{40}")
# What git forbids in the names of branches and tags, of which some would lead out of the cache
_NO_REVISION = re.compile(r"\.\.|(?:^|/)(?:\.|/|$)|[\x00-\x20\x7f~^:?*\[\\]")
_SHARD = re.compile(r"(?P<set>.+)-\d+-of-(?P<count>\d+)\.safetensors")


class Reference(NamedTuple):
    """The repository, revision and path that a source names."""

    repository: str
    """``org/name``, or the ``name`` of an old repository without an owner."""
    revision: str
    """Branch, tag or commit hash."""
    within: str
    """Path of a folder or file in the repository; empty for its root."""

    def __str__(self) -> str:
        return f"{self.repository}@{self.revision}" + (f"/{self.within}" if self.within else "")


class Snapshot(NamedTuple):
    """A commit of a repository in the cache."""

    reference: Reference
    storage: Path
    """The repository's folder, which holds refs, snapshots and blobs."""
    commit: str
    path: Path
    """The folder or file of the snapshot that was asked for; need not be there."""


# What is asked for


def parse(source: str) -> Reference | None:
    """The reference that ``source`` stands for; None if it cannot be a repository.

    Raises:
        InvalidError: it can be nothing else, but what it asks for makes no sense.
    """
    explicit = source.startswith(SCHEME)
    match = (_LONG if explicit else _SHORT).fullmatch(source)
    if match is None and explicit:
        raise InvalidError(f"{source!r} is not {SCHEME}org/name, {SCHEME}org/name@revision or one with a path after it")
    if match is None:
        return None
    if explicit and (other := re.match(rf"{SCHEME}(datasets|spaces|kernels|buckets)/", source)):
        raise InvalidError(f"{source!r}: {other[1]} have no checkpoints: give a repository of a model")
    found = match.groupdict()
    repository, revision, within = found["repository"], found["revision"], (found.get("within") or "").rstrip("/")
    # A path with such an ending that is not there is a path that is not there; the Hub allows neither -- nor ..
    if not explicit and revision is None and _FILE.fullmatch(repository):
        return None
    if "--" in repository or ".." in repository:
        if explicit:
            raise InvalidError(f"{source!r}: {repository} is not the name of a repository: it contains -- or ..")
        return None
    if revision is None:
        revision = DEFAULT_REVISION
    elif explicit:
        revision = unquote(revision)
    if not revision or _NO_REVISION.search(revision):
        raise InvalidError(f"{source!r}: {revision!r} is not a revision: give a branch, a tag or a commit hash after @")
    if within and any(part in ("", ".", "..") or "\0" in part for part in within.split("/")):
        raise InvalidError(f"{source!r}: {within!r} is not a path inside a repository")
    return Reference(repository, revision, within)


def home() -> Path:
    """The folder in which huggingface_hub would keep the token and the cache with this environment."""
    found = os.environ.get("HF_HOME")
    if found is None:
        caches = os.environ.get("XDG_CACHE_HOME", str(Path("~") / ".cache"))
        found = str(Path(caches) / "huggingface")
    return Path(os.path.expandvars(os.path.expanduser(found)))  # noqa: PTH111


def cache_folder() -> Path:
    """The cache that huggingface_hub would use with this environment."""
    found = os.environ.get("HF_HUB_CACHE", os.environ.get("HUGGINGFACE_HUB_CACHE", str(home() / "hub")))
    return Path(os.path.expandvars(os.path.expanduser(found)))  # noqa: PTH111


def cached_folder(repository: str) -> Path:
    """The folder of a repository in that cache, whether it is there or not."""
    return cache_folder() / "--".join(("models", *repository.split("/")))


def is_true(value: str | None) -> bool:
    """Whether this value switches a variable of huggingface_hub on."""
    return value is not None and value.upper() in ("1", "ON", "YES", "TRUE")


def _offline() -> str | None:
    """The variable that keeps huggingface_hub from the network, if one does."""
    for name in ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE"):
        if value := os.environ.get(name):
            return name if is_true(value) else None
    return None


def asks_network(source: str, storage: Storage | None = None) -> bool:
    """Whether the Hub is asked over the network for what the cache lacks. Without ``hf://``, a name that has no owner
    is more likely a path that is not there."""
    reference = parse(source)
    if reference is None or _offline() is not None or _core.asks_for_versions(storage) is False:
        return False
    return source.startswith(SCHEME) or "/" in reference.repository


def asks_first(reference: Reference, storage: Storage | None) -> bool:
    """Whether the Hub is asked for the commit of a branch or tag although the cache has one: with a disk cache, because
    what was fetched is in the cache then."""
    return COMMIT.fullmatch(reference.revision) is None and _core.asks_for_versions(storage) is True


def _fetch(reference: Reference, what: str) -> str:
    """How to get what is not there."""
    revision = "" if reference.revision == DEFAULT_REVISION else f" --revision {reference.revision}"
    offline = _offline()
    unset = f", with {offline} unset" if offline else ""
    itself = f"penstock writes nothing there, and reads it from the Hub if {offline} is unset" if offline else ""
    itself = itself or "penstock itself writes there only with a disk cache"
    return f"{ADVICE}{reference.repository}{revision}`{unset} fetches {what}; {itself}"


# What is there


def find(source: str, absent: PenstockError | None = None) -> Snapshot:
    """The snapshot that ``source`` stands for; ``absent`` is the error of looking for a path of that name first.

    Raises:
        NotFoundError: the cache has no such repository or revision; ``absent`` if ``source`` is no name of a
            repository, or is a path that is there.
        InvalidError: as `parse`.
        AccessError, ReadError: the cache cannot be looked at.
    """
    asking(source)
    if absent is not None and os.path.lexists(source):
        raise absent
    reference = parse(source)
    if reference is None:
        raise absent or NotFoundError("this is not the name of a repository", path=source)
    storage = cached_folder(reference.repository)
    try:
        if not _is_folder(storage):
            raise _no_repository(source, reference, storage, absent is not None)
        commit = _commit(source, reference, storage)
    except PenstockError:
        raise
    except OSError as error:
        kind = AccessError if isinstance(error, PermissionError) else ReadError
        message = f"{source}: cannot look into the local Hub cache: {error}"
        raise kind(message, path=str(storage), errno=error.errno) from error
    return Snapshot(reference, storage, commit, storage / "snapshots" / commit / reference.within)


def _no_repository(source: str, reference: Reference, storage: Path, looked: bool) -> NotFoundError:
    path = "No such file or directory, and " if looked else ""
    message = f"{source}: {path}no such repository in the local Hub cache: there is no {storage}"
    if similar := _similar(storage.parent, reference.repository):
        message += f" (but there is {similar})"
    message += f". HF_HUB_CACHE or HF_HOME would name another cache. {_fetch(reference, 'one that is on the Hub')}"
    return NotFoundError(message, path=source, errno=errno.ENOENT)


def _commit(source: str, reference: Reference, storage: Path) -> str:
    revision = reference.revision
    if "/" not in revision and _is_folder(storage / "snapshots" / revision):
        return revision
    ref = storage / "refs" / revision
    asking(ref)
    try:
        commit = ref.read_text("utf-8").strip()
    except (FileNotFoundError, NotADirectoryError, IsADirectoryError):
        raise _no_revision(source, reference, storage) from None
    except UnicodeDecodeError:
        commit = ""
    if not COMMIT.fullmatch(commit):
        message = f"{source}: {ref} holds no commit hash: the cache is damaged. {_fetch(reference, 'it again')}"
        raise NotFoundError(message, path=str(ref))
    if not _is_folder(storage / "snapshots" / commit):
        message = (
            f"{source}: {revision} is commit {commit}, and none of its files has been downloaded{_unfinished(storage)}"
        )
        message += f". {_there(storage)}. {_fetch(reference, 'it')}"
        raise NotFoundError(message, path=str(storage / "snapshots" / commit))
    return commit


def _no_revision(source: str, reference: Reference, storage: Path) -> NotFoundError:
    message = f"{source}: no revision {reference.revision} of {reference.repository} in the local Hub cache, {storage}"
    message += f"{_unfinished(storage)}. {_there(storage)}. {_fetch(reference, reference.revision)}"
    return NotFoundError(message, path=str(storage))


def _there(storage: Path) -> str:
    """The revisions in the cache, for the end of a sentence."""
    commits = sorted(entry.name for entry in _entries(storage / "snapshots") if entry.is_dir())
    named = {}
    for ref in sorted(path for path in (storage / "refs").rglob("*") if path.is_file()):
        asking(ref)
        named[str(ref.relative_to(storage / "refs"))] = ref.read_text("utf-8", "replace").strip()
    shown = [f"{name} ({commit[:8]})" for name, commit in named.items() if commit in commits]
    shown += [commit for commit in commits if commit not in named.values()]
    return f"Revisions that are there: {listed(shown)}" if shown else "No other revision is there"


def _similar(cache: Path, repository: str) -> str | None:
    """A repository of the cache with nearly this name."""
    with importing():
        import difflib

    prefix = "models--"
    names = [entry.name[len(prefix) :] for entry in _entries(cache) if entry.name.startswith(prefix)]
    names = [name.replace("--", "/") for name in names]
    lower = {name.lower(): name for name in names}
    close = difflib.get_close_matches(repository.lower(), lower, n=1, cutoff=0.85)
    return lower[close[0]] if close else None


def _unfinished(storage: Path) -> str:
    """Downloads that have not ended, for the end of a sentence."""
    sizes = []
    for entry in _entries(storage / "blobs"):
        if entry.name.endswith(".incomplete"):
            try:
                sizes.append(entry.stat().st_size)
            except FileNotFoundError:  # it has just been finished
                continue
    if not sizes:
        return ""
    return f", but a download that has not ended ({size_text(sum(sizes))} in {storage / 'blobs'}/*.incomplete)"


def _is_folder(path: Path) -> bool:
    """Whether it is a folder. `Path.is_dir` hides, from Python 3.14 on, that it may not be looked at."""
    asking(path)
    try:
        return stat.S_ISDIR(path.stat().st_mode)
    except (FileNotFoundError, NotADirectoryError):
        return False


def _entries(folder: Path) -> list[os.DirEntry[str]]:
    asking(folder)
    try:
        with os.scandir(folder) as found:
            return sorted(found, key=lambda entry: entry.name)
    except (FileNotFoundError, NotADirectoryError):
        return []


def listed(names: list[str]) -> str:
    """These names, or the first of them and how many more there are."""
    more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return ", ".join(names[:_SHOWN]) + more


# Opening it


def open_snapshot(
    snapshot: Snapshot, stall_timeout: float | None = None, variant: str | None = None
) -> _core.Checkpoint:
    """The checkpoint in this snapshot. An index whose files are not there is one of which they were not downloaded.

    Raises:
        NotFoundError: it has none, or files of it have not been downloaded or were removed.
        StalledError: the file system does not answer.
    """
    try:
        core = _core.Checkpoint.open([str(snapshot.path)], stall_timeout, variant=variant, leftover=False)
    except NotFoundError as error:
        why = error
        try:
            raise patiently(lambda: _incomplete(snapshot, why), stall_timeout, str(snapshot.path)) from None
        finally:
            del why  # an error keeps this frame, and would keep itself with it
    # A folder may hold what somebody has put together; a part of a repository is what an interrupted download leaves
    for name, there, count in partial_sets([Path(file).name for file in core.files()]):
        message = f"{there} of the {count} shard files of {name!r} are there, by their names, and no index"
        lacking = NotFoundError(message, path=str(snapshot.path))
        found = patiently(lambda e=lacking: _in_part(snapshot, e), stall_timeout, str(snapshot.path))  # type: ignore[misc]
        if found is not None:
            raise found
    return core


def partial_sets(names: list[str]) -> list[tuple[str, int, int]]:
    """Incomplete sets of shard files: name, number of files in ``names``, and number of all files."""
    shards = [match for match in map(_SHARD.fullmatch, names) if match]
    sets = Counter(shard["set"] for shard in shards)
    parts = {(shard["set"], int(shard["count"])) for shard in shards}
    return sorted((name, sets[name], count) for name, count in parts if sets[name] < count)


def _in_part(snapshot: Snapshot, error: NotFoundError) -> NotFoundError | None:
    """The error for shards that are not all there, unless they were chosen by an index or by their names."""
    if any(snapshot.path.glob("*.safetensors.index.json")) or not snapshot.path.is_dir():
        return None
    return _incomplete(snapshot, error)


def _incomplete(snapshot: Snapshot, error: NotFoundError) -> NotFoundError:
    """The error for a snapshot in which ``error`` says that something is not there."""
    reference, storage = snapshot.reference, snapshot.storage
    root = storage / "snapshots" / snapshot.commit
    folder = snapshot.path if snapshot.path.is_dir() else snapshot.path.parent
    broken = [entry for entry in _entries(folder) if entry.is_symlink() and not os.path.exists(entry.path)]  # noqa: PTH110
    if not os.path.lexists(snapshot.path):
        message = f"the snapshot has no {reference.within}"
        if held := [entry.name for entry in _entries(root)]:
            message += f"; it holds {listed(held)}"
    elif broken and (snapshot.path.is_dir() or snapshot.path.name in [entry.name for entry in broken]):
        links = [f"{entry.name} -> {os.readlink(entry.path)}" for entry in broken]  # noqa: PTH115
        message = f"blobs are missing, links to nothing: {listed(links)}; a copy or clean-up that was interrupted?"
    else:
        message = error.message
    message += _unfinished(storage)
    inside = sorted({str(path.parent.relative_to(root)) for path in root.rglob("*.safetensors")} - {"."})
    if inside and not reference.within and not any(folder.glob("*.safetensors")):
        example = f"{SCHEME}{reference.repository}@{reference.revision.replace('/', '%2F')}/{inside[0]}"
        message += f". Folders of it have some: {listed(inside)}; open {example}"
    elif absent := _not_downloaded(storage, snapshot.commit, root, reference.within):
        message += f". The repository also has {listed(absent)}, not downloaded yet"
    message += f". {_fetch(reference, 'what is missing')}"
    return NotFoundError(f"{reference} in the local Hub cache ({root}): {message}", path=error.path)


def _not_downloaded(storage: Path, commit: str, root: Path, within: str) -> list[str]:
    """Safetensors files and indexes of the repository's commit that the snapshot lacks, as far as that is known."""
    names = [name for name in _tree(storage, commit) if name.endswith((".safetensors", ".safetensors.index.json"))]
    return [n for n in names if n.startswith(f"{within}/" if within else "") and not os.path.lexists(root / n)]


def _tree(storage: Path, commit: str) -> dict[str, dict[str, Any]]:
    """The files of the repository at this commit, as far as huggingface_hub has kept them."""
    asking(storage)
    try:
        listing = json.loads((storage / "trees" / f"{commit}.json").read_text("utf-8"))
        files = listing["files"] if listing["format_version"] == 1 else {}
        return {str(name): dict(about) for name, about in files.items()}
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return {}  # it is no more than a cache of the Hub's answer


# Digests of what it holds


class Expected(NamedTuple):
    """The expected hash of a file's content."""

    algorithm: str
    """"sha256", or "git-sha1": the sha1 of ``blob <size>``, a zero byte and the content."""
    digest: str
    """In lower-case hexadecimal."""
    source: str
    """The source of the hash: "blob name" or "tree listing" (of the cache), "Hub", or "list" (of the caller)."""


def expected_digest(path: str) -> Expected | None:
    """The hash that the cache expects of the file at ``path``; None if it has none, or if the file is in no cache."""
    for place in _places(path):
        folder, name = Path(place).parent, Path(place).name
        if folder.name == "blobs" and _DIGEST.fullmatch(name) and (folder.parent / "snapshots").is_dir():
            return expected_of(name, "blob name")
    # Without links the file itself lies in the snapshot: `place` is now what the last link led to
    parts = Path(place).absolute().parts
    for i in range(len(parts) - 2, 0, -1):
        if parts[i - 1] == "snapshots" and COMMIT.fullmatch(parts[i]):
            about = _tree(Path(*parts[: i - 1]), parts[i]).get("/".join(parts[i + 1 :]), {})
            digest = about.get("lfs_sha256") or about.get("blob_id")
            if isinstance(digest, str):
                return expected_of(digest, "tree listing")
    return None


def expected_of(digest: str, source: str) -> Expected | None:
    """The hash that a digest states, sha256 or git's sha1; None if it is neither."""
    if not _DIGEST.fullmatch(digest):
        return None
    return Expected("sha256" if len(digest) == 64 else "git-sha1", digest, source)


def _places(path: str) -> Iterator[str]:
    """``path``, and where each of the links that it goes through leads."""
    yield path
    for _ in range(40):  # as many as Linux follows
        asking(path)
        try:
            target = os.readlink(path)  # noqa: PTH115
        except OSError:
            return
        path = str(Path(path).parent / target)
        yield path


def files_of(snapshot: Snapshot) -> list[str]:
    """Paths of all files of the snapshot, or of the part of it that was asked for."""
    if not snapshot.path.is_dir():
        return [str(snapshot.path)]

    def is_one(path: Path) -> bool:
        asking(path)
        return path.is_file() or (path.is_symlink() and not path.is_dir())

    return sorted(str(path) for path in snapshot.path.rglob("*") if is_one(path))
