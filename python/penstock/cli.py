# PYTHON_ARGCOMPLETE_OK
"""The command line: ``penstock inspect | load | plan | verify | warm | evict | pull | push | cache | doctor | trace |
bench | convert | synth | serve | selftest | engines``.

Exit status: 0 success, 1 a check failed, 2 wrong usage, 3 an error, 4 `verify` has no digest to compare with, 77
`selftest` finds no GPU, 130 interrupted. An error is one line on standard error; PENSTOCK_TRACEBACK=1 adds the
traceback. With ``--json`` standard output is one JSON document in every case.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import io
import json
import os
import re
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, cast, get_args

from . import _core
from ._checkpoint import Checkpoint, open_as
from ._choices import LAYOUTS, ORDERS, Scope, Storage
from ._device import any_device
from ._dtypes import DTYPES
from ._errors import (
    AccessError,
    InvalidError,
    LimitError,
    NotFoundError,
    OutOfMemoryError,
    PenstockError,
    ReadError,
    SchemeError,
    StalledError,
    UnsupportedError,
)
from ._event_words import Measured, by_source
from ._events import NOTHING, observe
from ._frameworks import FRAMEWORKS
from ._load import load
from ._options import default_text, make_options, options_listed
from ._paths import is_web, local_path, source_path, target_path, without_secrets
from ._report import Report, size_text
from ._selection import info_of
from ._terminal import Parser, WrongUsage, styled, table, wrapped

OK, FAILED, USAGE, ERROR, UNCOMPARED, INTERRUPTED = 0, 1, 2, 3, 4, 130

_SOURCE = """a safetensors file, several files, a folder, an index file, or the name of a repository of the
Hugging Face Hub: org/name, org/name@revision"""


_OVER_NETWORK = ("inspect", "load", "plan", "verify", "pull", "doctor", "convert")
"""Commands that take web addresses, and ask the Hub for what its local cache lacks."""
_WRITTEN = ("into", "folder", "trace", "html", "json")
"""Arguments that name what is to be written."""
_TARGETS = {"push": "address", "convert": "into"}
"""The argument with the address, of commands that write to object stores."""


class _Failed(Exception):
    """A check failed; what there is to say has been said."""

    def __init__(self, status: int = FAILED) -> None:
        self.status = status


class _Uncompared(_Failed):
    """Digests were to be compared, and none of them is known."""

    def __init__(self) -> None:
        super().__init__(UNCOMPARED)


def _print(args: argparse.Namespace, document: dict[str, Any], text: str | Callable[[], str]) -> None:
    said = text if isinstance(text, str) else ""
    if args.json:
        said = json.dumps(document, indent=2, default=str)
    elif not isinstance(text, str):
        said = text()
    try:
        sys.stdout.write(said + "\n")
    except BrokenPipeError:
        _nobody_reads()


def _nobody_reads() -> None:
    """The reader has seen enough, as in `penstock inspect ... | head`. The exit status is still told."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _open(args: argparse.Namespace, stall_timeout: float | None = None) -> Checkpoint:
    sources: list[str] = args.source
    storage = cast("Storage", dict(getattr(args, "storage", [])))
    found: Any = sources[0] if len(sources) == 1 else sources
    network = args.command in _OVER_NETWORK
    return open_as("source", found, stall_timeout, storage, network=network, variant=args.variant)


def _refuse_schemes(args: argparse.Namespace) -> None:
    """Refuses paths that begin with a scheme, such as s3://, before anything is done."""
    for argument in ("source", "path", "address", "file", "folder", "into", "trace", "html", "digests", "json"):
        value = getattr(args, argument, None)
        listed = value if isinstance(value, list) else [value]
        for path in listed:
            if not isinstance(path, str):
                continue
            may_be = ("source", "path", "address")
            if argument == _TARGETS.get(args.command):
                target_path(path, argument)
                continue
            repository = len(listed) == 1 and argument in may_be and str(path).startswith("hf://")
            if repository:
                continue
            if argument in may_be and args.command in _OVER_NETWORK:
                source_path(path, argument)
            elif args.command in ("warm", "evict") and is_web(path):
                raise SchemeError(
                    f"{without_secrets(path)}: this is on a server, and no page cache has it: {args.command} is for "
                    "files of this machine",
                    path=without_secrets(path),
                )
            else:
                local_path(path, argument, written=argument in _WRITTEN and args.command != "push")


# inspect


def _ranges(numbers: Iterable[int]) -> str:
    """ "0..3,7" for 0, 1, 2, 3, 7."""
    spans: list[list[int]] = []
    for n in sorted(set(numbers)):
        if spans and spans[-1][1] == n - 1:
            spans[-1][1] = n
        else:
            spans.append([n, n])
    return ",".join(str(a) if a == b else f"{a}..{b}" for a, b in spans)


_NUMBER = re.compile(r"(?<![^.])\d+(?![^.])")


def _folded(checkpoint: Checkpoint) -> list[dict[str, Any]]:
    """Tensors grouped where they differ in the numbers of their names alone: layers.{0..31}.mlp.weight."""
    groups: dict[tuple[str, str, tuple[int, ...]], dict[str, Any]] = {}
    core = checkpoint._core
    for i in range(len(checkpoint)):
        name, dtype, shape, _, begin, end = core.info(i)
        group = groups.setdefault(
            (_NUMBER.sub("#", name), dtype, shape),
            {"dtype": dtype, "shape": list(shape), "count": 0, "nbytes": 0, "numbers": []},
        )
        group["count"] += 1
        group["nbytes"] += end - begin
        found = _NUMBER.findall(name)
        if not group["numbers"]:
            group["numbers"] = [set() for _ in found]
        for seen, number in zip(group["numbers"], found, strict=True):
            seen.add(int(number))
    folded = []
    for (pattern, _, _), group in groups.items():
        numbers = iter(group.pop("numbers"))

        def number(_: re.Match[str], numbers: Any = numbers) -> str:
            seen = next(numbers)
            return str(*seen) if len(seen) == 1 else "{" + _ranges(seen) + "}"

        folded.append({"name": re.sub("#", number, pattern) if "#" in pattern else pattern, **group})
    return folded


def _tree(folded: list[dict[str, Any]], depth: int | None) -> str:
    """The groups as a tree along the dots of their names."""
    root: dict[str, Any] = {}
    for group in folded:
        node = root
        # a dot between braces separates the ends of a range, not the parts of a name
        *path, leaf = re.split(r"\.(?![^{]*\})", group["name"])
        for part in path:
            node = node.setdefault(part, {})
            if not isinstance(node, dict) or "nbytes" in node:
                break
        else:
            while leaf in node:
                leaf += " "  # same name, other dtype or shape
            node[leaf] = group
            continue
        root[group["name"]] = group

    rows: list[list[str]] = []

    def total(node: dict[str, Any]) -> tuple[int, int]:
        if isinstance(node.get("nbytes"), int):
            return node["count"], node["nbytes"]
        parts = [total(child) for child in node.values()]
        return sum(c for c, _ in parts), sum(n for _, n in parts)

    def walk(node: dict[str, Any], indent: int) -> None:
        for name, child in node.items():
            while not isinstance(child.get("nbytes"), int) and len(child) == 1:  # a chain of single children: one line
                [(below, child)] = child.items()
                name = f"{name}.{below}"
            count, nbytes = total(child)
            leaf = isinstance(child.get("nbytes"), int)
            many = f"x {count}" if count > 1 else ""
            what = [child["dtype"], str(child["shape"])] if leaf else ["", ""]
            rows.append(["  " * indent + name.rstrip(), *what, many, size_text(nbytes)])
            if not leaf and (depth is None or indent + 1 < depth):
                walk(child, indent + 1)

    walk(root, 0)
    return table(rows, right=(3, 4))


def _count(number: int) -> str:
    """A number for people: 137.02 M."""
    for unit, scale in (("T", 1e12), ("G", 1e9), ("M", 1e6), ("k", 1e3)):
        if number >= scale:
            return f"{number / scale:.2f} {unit}"
    return str(number)


def _inspect(args: argparse.Namespace) -> None:
    checkpoint = _open(args, args.stall_timeout)
    core = checkpoint._core
    by_dtype: dict[str, dict[str, int]] = {}
    for dtype, wants in sorted(core.by_dtype().items()):
        sizes = [core.info(w) for w in wants]
        by_dtype[dtype] = {
            "tensors": len(wants),
            "nbytes": sum(end - begin for *_, begin, end in sizes),
            "parameters": sum((end - begin) * 8 // DTYPES[dtype].bits for *_, begin, end in sizes),
        }
    files: list[dict[str, Any]] = []
    for i, path in enumerate(checkpoint.files):
        first, last = core.file_tensors(i)
        start = core.data_start(i)
        end = core.info(last - 1)[5] if last > first else start
        files.append({"path": path, "tensors": last - first, "header_bytes": start, "nbytes": end - start})
    document: dict[str, Any] = {
        "files": files,
        "tensors": len(checkpoint),
        "nbytes": checkpoint.nbytes,
        "parameters": sum(d["parameters"] for d in by_dtype.values()),
        "dtypes": by_dtype,
        "metadata": checkpoint.metadata,
        "warnings": checkpoint.warnings,
    }
    if args.tensors or args.json:
        paths = checkpoint.files
        infos = [info_of(core, i, paths) for i in range(len(checkpoint))]
        document["entries"] = [info._asdict() for info in infos]

    def text() -> str:
        summary = (
            f"{len(checkpoint)} tensors, {size_text(checkpoint.nbytes)}, {_count(document['parameters'])} elements in "
            f"{len(files)} file{'s' * (len(files) != 1)}"
        )
        shards = [[f["path"], f"{f['tensors']} tensors", size_text(f["nbytes"])] for f in files]
        kinds = [
            [d, f"{v['tensors']} tensors", f"{_count(v['parameters'])} elements", size_text(v["nbytes"])]
            for d, v in by_dtype.items()
        ]
        parts = [styled(summary, "bold"), table(shards, right=(1, 2)), table(kinds, right=(1, 2, 3))]
        if checkpoint.metadata:
            parts.append(wrapped("\n".join(f"{k}: {v}" for k, v in checkpoint.metadata.items())))
        parts.extend(wrapped(f"{styled('warning', 'yellow')}: {w}") for w in checkpoint.warnings)
        if args.tensors:
            rows = [[t.name, t.dtype, str(list(t.shape)), size_text(t.nbytes)] for t in infos]
            parts.append(table(rows, right=(3,)))
        else:
            parts.append(_tree(_folded(checkpoint), args.depth))
        return "\n\n".join(part for part in parts if part)

    _print(args, document, text)


# load


def _option_lines(group: str) -> str:
    """The lines of `penstock load --help` for a group of options: the form and the purpose of each."""
    lines = []
    for option in _core.option_table():
        if option["group"] == group:
            texts = f"{', '.join(option['texts'])}: " if "|" not in option["word"] and option["texts"] else ""
            default = f" ({default_text(option)})" if option["form"] != "Undecided" else ""
            lines.append(f"{option['name']}={option['word']}\t{texts}{option['help']}{default}")
    return "\n".join(lines)


def _setting(text: str) -> tuple[str, str]:
    name, equals, value = text.partition("=")
    if not equals or name not in _core.storage_settings():
        raise argparse.ArgumentTypeError(f"give NAME=VALUE; the names are {', '.join(_core.storage_settings())}")
    return name, value


def _option(text: str) -> tuple[str, Any]:
    name, equals, value = text.partition("=")
    if not equals:
        raise argparse.ArgumentTypeError(f"{text!r} is not NAME=VALUE; {options_listed()}")
    if value.lower() in ("true", "false"):
        return name, value.lower() == "true"
    for kind in (int, float):
        try:
            return name, kind(value)
        except ValueError:
            pass
    return name, value


def _seconds(text: str) -> float:
    try:
        return _core.stall_timeout(float(text))
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not a positive number of seconds") from None


def _shown(report: Report) -> str:
    """A report that fits the terminal, its first line bold."""
    first, *rest = wrapped(str(report)).split("\n")
    return "\n".join([styled(first, "bold"), *rest])


def _load(args: argparse.Namespace) -> None:
    try:
        options = make_options(dict(args.option) | ({"trace": args.trace} if args.trace else {}))
    except (TypeError, ValueError) as error:  # wrong usage here, whatever it is in a program
        raise InvalidError(str(error)) from error
    checkpoint = _open(args, options.stall_timeout)
    # No framework is needed to move bytes, and importing one takes seconds. Casts and torch's own devices need one.
    where = any_device(args.device)
    bytes_alone = args.framework is None and args.dtype in (None, "raw") and (where.is_cpu or where.is_gpu)
    request, adapter = checkpoint._prepare(
        args.device,
        args.names or None,
        args.dtype,
        "dlpack" if bytes_alone else args.framework,
        options,
        None,
        args.order,
    )
    if bytes_alone:
        adapter.misaligned = True  # as for torch: a tensor that the file misaligns stays in the mapping
    with observe("load", checkpoint) as seen:
        state = load(request._replace(seen=seen), adapter, False if args.no_progress or args.json else None)
    report = checkpoint.last_report
    assert report is not None
    del state
    _print(args, dict(report), lambda: _shown(report))


# plan


def _plan(args: argparse.Namespace) -> None:
    from ._cut import Cut, Parallel
    from ._plan import packed, plan_of

    checkpoint = _open(args, args.stall_timeout)
    parallel = Parallel(args.tp, args.pp, args.dp, args.ep)
    cut = Cut(checkpoint.values(), parallel)
    core, files = checkpoint._core, checkpoint.files
    known: dict[tuple[int, int, int], bytes] = {}
    places = [cut.place(rank) for rank in range(parallel.ranks)]
    for rank, place in enumerate(places):
        if place not in known:  # one after the other: those of all ranks may be more than memory holds
            known[place] = packed(core, cut.wants(rank), files)
    plan = plan_of([known[place] for place in places], core, args.nodes, args.scope)
    times = plan.seconds(storage_rate=args.storage_rate, node_rate=args.node_rate, network=args.network)
    alone, together = times["alone"]["seconds"], times["together"]["seconds"]
    quicker = None if alone is None else "together" if together < alone else "alone" if alone < together else "equal"
    document = {
        "parallel": parallel._asdict(),
        "whole_bytes": cut.whole_bytes,
        "scope": args.scope,
        "rates": {"storage": args.storage_rate, "node": args.node_rate, "network": args.network},
        "times": times,
        "quicker": quicker,
        **plan,
    }

    def text() -> str:
        ways = ", ".join(f"{name} {value}" for name, value in parallel._asdict().items() if value > 1) or "one rank"
        count = len(plan["nodes"])
        head = f"{len(checkpoint)} tensors, {size_text(checkpoint.nbytes)}; {ways}: {parallel.ranks} rank"
        head += f"{'s' * (parallel.ranks != 1)} on {count} node{'s' * (count != 1)}"
        lines = [styled(head, "bold")]
        if parallel.tp > 1:
            lines.append(wrapped(f"not divided by tp: {size_text(cut.whole_bytes)}, whole on every rank that has them"))
        lines += ["", table(plan.rows(times), right=(1, 2)), ""]
        if said := plan.unwanted():
            lines.append(wrapped(said))
        if quicker is None:
            lines.append(wrapped("give --storage-rate, --node-rate or --network for times"))
        elif quicker == "equal":
            lines.append("both take as long")
        else:
            more, less = max(alone, together), min(alone, together)
            lines.append(f"{quicker} is quicker: {more / less:.1f} times" if less else f"{quicker} is quicker")
        return "\n".join(lines)

    _print(args, document, text)


# verify


def _listed(path: str) -> dict[str, str]:
    """Digests by file name from the output of sha256sum."""
    listed = {}
    for number, line in enumerate(Path(path).read_text("utf-8", "surrogateescape").splitlines(), 1):
        if not line.strip() or line.startswith("#"):
            continue
        match = re.fullmatch(r"\\?([0-9a-fA-F]{64})[ \t]+\*?(.+)", line.strip())
        if match is None:
            raise InvalidError(f"line {number} is not '<sha256>  <file>', the format of sha256sum", path=path)
        listed[Path(match.group(2)).name] = match.group(1).lower()
    return listed


def _is_there(source: str, error: PenstockError) -> bool:
    """Whether this is a path on disk, the name of a repository that the Hub cache has, or an address at which something
    is; ``error`` is that of opening it."""
    from . import _hub

    if is_web(source):
        return error.status is None or error.path != without_secrets(source)
    if Path(source).exists():
        return True
    try:
        return _hub.parse(source) is not None and bool(_hub.find(source))
    except NotFoundError:
        return False


def _verify(args: argparse.Namespace) -> None:
    from ._hub import Expected, expected_digest
    from ._patience import patiently

    listed = _listed(args.digests) if args.digests else {}
    try:
        checkpoint = _open(args, args.stall_timeout)
    except (StalledError, SchemeError, LimitError, OutOfMemoryError):  # nothing was checked
        raise
    except PenstockError as error:
        if isinstance(error, NotFoundError) and not all(_is_there(source, error) for source in args.source):
            raise
        if isinstance(error, (AccessError, ReadError)) and is_web(error.path):
            raise  # no server has said what it has
        document = {"ok": False, "problems": [{"kind": error.kind, "path": error.path, "message": str(error)}]}
        _print(args, document, f"FAILED  {error}")
        raise _Failed from None
    files: list[dict[str, Any]] = [{"path": path, "ok": True} for path in checkpoint.files]
    problems = []
    unused = set(listed)
    if args.sha256 or args.digests:
        paths = checkpoint._all_files(args.stall_timeout)
        unused -= {Path(path).name for path in paths}
        known = {
            path: Expected("sha256", listed[Path(path).name], "list") for path in paths if Path(path).name in listed
        }
        files = []
        for found in checkpoint._hashed(known, False if args.json else None, args.stall_timeout):
            source = found.expected.source if found.expected else None
            named = {found.algorithm.replace("-", "_"): found.digest, "compared_with": source}
            files.append({"path": found.path, "ok": found.error is None, **named})
            if found.error is not None:
                message = str(found.error)
                problems.append({"kind": found.error.kind, "path": found.path, "message": message})
    for name in sorted(unused):
        message = f"{args.digests}: lists {name}, which is not a file of this checkpoint"
        problems.append({"kind": "Digest", "path": name, "message": message})
    digested = bool(args.sha256 or args.digests)
    compared = sum(bool(file.get("compared_with")) for file in files)
    uncompared = digested and compared == 0
    document = {
        "ok": not problems and not uncompared,
        "files": files,
        "compared": compared if digested else None,
        "tensors": len(checkpoint),
        "nbytes": checkpoint.nbytes,
        "warnings": checkpoint.warnings,
        "problems": problems,
    }
    from_hub, on_servers = checkpoint._listed is not None, any(map(is_web, checkpoint.files))
    # Asked beforehand: a file system may hang
    comparable = not (digested or on_servers) and patiently(
        lambda: all(expected_digest(path) for path in checkpoint.files), args.stall_timeout
    )

    def text() -> str:
        lines = []
        for file in files:
            seen = [
                f"  {name} {file[key] or '?'} ({file['compared_with'] or 'nothing to compare it with'})"
                for name, key in (("sha256", "sha256"), ("git-sha1", "git_sha1"))
                if key in file
            ]
            well = "hashed" if digested and not file["compared_with"] else "ok"
            mark = styled(f"{well:8}", "green") if file["ok"] else styled(f"{'FAILED':8}", "bold red")
            lines.append(f"{mark}{file['path']}{''.join(seen)}")
        lines += [f"{styled('FAILED', 'bold red')}  {p['message']}" for p in problems]
        lines += [f"{styled('warning', 'yellow')} {w}" for w in checkpoint.warnings]
        state = f"{len(problems)} problem{'s' * (len(problems) != 1)}" if problems else "all well"
        lines.append(f"headers, bounds and index of {len(checkpoint)} tensors, {size_text(checkpoint.nbytes)}: {state}")
        said = ""
        if uncompared:
            said = "no content was compared: no digest of these files is known. --digests takes a list of digests"
            said = f"every byte was read, of the versions that were opened, and {said}" if on_servers else said
        elif digested:
            said = f"contents of {compared} of {len(files)} files were compared with their digests"
        elif comparable:
            said = "contents were not compared. The Hub cache has their digests: --sha256 compares"
        elif from_hub:
            said = "contents were not read. The Hub has their digests: --sha256 reads every byte, and compares"
        elif on_servers:
            said = "contents were not read: --sha256 reads every byte"
        lines += [wrapped(said)] if said else []
        return "\n".join(lines)

    _print(args, document, text)
    if problems:
        raise _Failed
    if uncompared:
        raise _Uncompared


# warm, evict


def _page_cache(args: argparse.Namespace) -> None:
    paths = _open(args, args.stall_timeout).files
    evict = args.command == "evict"
    files: list[dict[str, Any]] = []
    with NOTHING if evict else observe("warm", args.source) as seen:
        for path in paths:
            begun = time.perf_counter()
            before, nbytes, _ = _core.residency(path, args.stall_timeout)
            after = _core.evict(path) if evict else _core.warm(path, args.threads, args.stall_timeout)
            files.append({"path": path, "nbytes": nbytes, "resident_before": before, "resident_bytes": after})
            took = time.perf_counter() - begun
            seen.count(
                Measured(nbytes, 0, took, by_source(buffered=max(0, after - before)), move=took, cache_hits=before)
            )
    resident, nbytes = sum(f["resident_bytes"] for f in files), sum(f["nbytes"] for f in files)
    ok = resident == 0 if evict else resident >= nbytes

    def text() -> str:
        rows = [
            [
                f["path"],
                size_text(f["nbytes"]),
                f"resident {size_text(f['resident_before'])} ->",
                size_text(f["resident_bytes"]),
            ]
            for f in files
        ]
        lines = [table(rows, right=(1, 3)), f"{size_text(resident)} of {size_text(nbytes)} in the page cache"]
        if not ok and evict:
            lines.append(
                "the rest is mapped, dirty or in use by another process: it stays until that process releases it"
            )
        elif not ok:
            lines.append("the rest did not stay: there is too little free memory (see the cgroup in `penstock doctor`)")
        return "\n".join(lines)

    _print(args, {"ok": ok, "files": files, "nbytes": nbytes, "resident_bytes": resident}, text)
    if not ok:
        raise _Failed


# pull, cache


def _cache_storage(args: argparse.Namespace) -> Storage:
    """The settings of servers, with the disk cache that was named."""
    folder = {"disk_cache": args.disk_cache} if args.disk_cache else {}
    return cast("Storage", {**dict(args.storage), **folder})


def _pull(args: argparse.Namespace) -> None:
    from . import _disk_cache, _pull

    storage = _cache_storage(args)
    named = storage.get("disk_cache") or os.environ.get(_disk_cache.VARIABLE)
    if args.folder is None and not named:
        raise InvalidError(f"where to? Give a FOLDER, or --disk-cache FOLDER, or set {_disk_cache.VARIABLE}")
    progress = False if args.no_progress or args.json else None
    also, variant = args.also, args.variant
    pulled = _pull.pull(args.address, args.folder, also=also, storage=storage, variant=variant, progress=progress)
    document = {
        "ok": True,
        "address": without_secrets(args.address),
        "folder": args.folder,
        "disk_cache": None if named is None else os.fspath(named),
        "files": [file._asdict() for file in pulled.files],
        "nbytes": sum(file.nbytes for file in pulled.files),
        "received_bytes": pulled.received_bytes,
        "uncached": pulled.uncached,
        "seconds": pulled.seconds,
    }
    _print(args, document, lambda: wrapped(_pull.described(pulled, args.folder, document["disk_cache"])))


def _push(args: argparse.Namespace) -> None:
    from . import _push

    storage = cast("Storage", dict(args.storage))
    if args.folder is None:
        if not args.clear:
            raise InvalidError("what? Give FOLDER and ADDRESS, or --clear ADDRESS")
        cleared = _push.clear_bucket(args.address, storage=storage)
        document = {"ok": True, "address": args.address, "cleared": cleared._asdict()}
        _print(args, document, lambda: wrapped(_push.describe_cleared(cleared)))
        return
    progress = False if args.no_progress or args.json else None
    pushed = _push.push(args.folder, args.address, clear=args.clear, progress=progress, storage=storage)
    document = {
        "ok": True,
        "folder": args.folder,
        "address": args.address,
        "files": [file._asdict() for file in pushed.files],
        "nbytes": sum(file.nbytes for file in pushed.files),
        "cleared": pushed.cleared._asdict(),
        "report": pushed.report,
        "seconds": pushed.seconds,
    }
    _print(args, document, lambda: wrapped(_push.described(pushed)))


def _cache(args: argparse.Namespace) -> None:
    from . import _disk_cache

    cache = _disk_cache.open_cache(args.disk_cache, cast("Storage", dict(args.storage)))
    if args.cache == "ls":
        found = _disk_cache.listed(cache)
        _print(args, found, lambda: _disk_cache.described(found))
    elif args.cache == "prune":
        chosen = {"to_size": args.to, "older_than": args.older_than, "prefix": args.prefix}
        how = {name: value for name, value in chosen.items() if value is not None}
        if len(how) + args.all != 1:
            raise InvalidError("say what goes: --all, --to SIZE, --older-than AGE, or how the addresses begin")
        found = _disk_cache.pruned(cache, args.dry_run, **how)
        _print(args, found, lambda: _disk_cache.describe_pruned(found))
    else:
        progress = False if args.no_progress or args.json else None
        found = _disk_cache.compared(cache, args.prefix or "", args.keep, progress)
        _print(args, found, lambda: wrapped(_disk_cache.describe_compared(found)))
        if not found["ok"]:
            raise _Failed


# doctor


def _place(path: str) -> str | None:
    """``path``, or the snapshot that it stands for where it is the name of a repository in the Hub cache; None if it is
    on servers."""
    from . import _hub

    if is_web(path):
        return None
    if os.path.lexists(path) or _hub.parse(path) is None:
        return path
    try:
        return str(_hub.find(path, NotFoundError("No such file or directory", path=path)).path)
    except NotFoundError:
        if _hub.asks_network(path):
            return None
        raise


def _doctor(args: argparse.Namespace) -> None:
    place = _place(args.path)
    if place is not None:
        from . import _doctor as doctor

        found = doctor.examine(place, measure=not args.no_measure)
        _print(args, found, lambda: wrapped(doctor.describe(found)))
        return
    from . import _doctor_network as network

    storage = cast("Storage", dict(args.storage))
    found = network.examine(args.path, storage, measure=not args.no_measure)
    _print(args, found, lambda: wrapped(network.describe(found)))
    if not found["ok"]:
        raise _Failed


# trace


def _trace(args: argparse.Namespace) -> None:
    import dataclasses

    from . import _ceiling
    from .page import timeline, write_trace

    wanted = "give the file that `penstock load --trace FILE` wrote"
    try:
        with Path(args.file).open("rb") as file:
            head = file.read(1024)
            # A zero byte is in the first eight of every safetensors file, and in no text
            content = b"" if b"\0" in head else head + file.read()
    except IsADirectoryError:
        content, head = b"", b"\0"
    if b"\0" in head:
        raise InvalidError(f"not a trace: {wanted} (`penstock inspect` shows a checkpoint)", path=args.file)
    try:
        trace = json.loads(content.decode("utf-8"))
        summary = timeline.summarise(trace)
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        # Not the error itself: one of decoding holds the whole file
        raise InvalidError(
            f"not a trace, or not a whole one ({type(error).__name__}): {wanted}", path=args.file
        ) from None
    if args.html:
        disk = "it was not measured (--no-measure)" if args.no_measure else _ceiling.disk(timeline.files(trace))
        write_trace(trace, args.html, f"One load: {Path(args.file).name}", disk)
    _print(args, dataclasses.asdict(summary), summary.sentence())


# bench


def _bench(args: argparse.Namespace) -> None:
    from .bench import command

    if not command.run(args):
        raise _Failed


# selftest


def _selftest(args: argparse.Namespace) -> None:
    lacking = [name for name in ("torch", "numpy", "pytest", "pytest_timeout") if not importlib.util.find_spec(name)]
    if lacking:
        names = " ".join(name.replace("_", "-") for name in lacking)
        raise UnsupportedError(f"the tests on a GPU need {', '.join(lacking)}: pip install {names}")
    from .selftest import run

    if status := run.run(args):
        raise _Failed(status)


# engines


def _engines(args: argparse.Namespace) -> None:
    from .integrations import _report_command as command

    found = command.run(args)
    _print(args, found, lambda: wrapped(command.described(found)))


# synth


_UNITS: dict[str, int] = {"": 1, "b": 1, **{f"{p}b": 10 ** (3 * i) for i, p in enumerate("kmgt", 1)}}
_UNITS |= {f"{p}ib": 1 << (10 * i) for i, p in enumerate("kmgt", 1)}


def _convert(args: argparse.Namespace) -> None:
    from ._convert import convert

    report = convert(
        args.source,
        args.into,
        dtype=args.dtype,
        max_shard_size=None if args.max_shard_size == "none" else args.max_shard_size,
        layout=args.layout,
        order=args.order,
        fsync=args.fsync,
        progress=False if args.no_progress else None,
        storage=cast("Storage", dict(args.storage)),
        variant=args.variant,
    )
    text = (
        f"{report.tensors} tensors, {size_text(report.nbytes)} in {len(report.files)} "
        f"file{'s' * (len(report.files) != 1)} in {report.seconds:.2f} s: {report.gbps:.2f} GB/s"
    )
    _print(args, {"ok": True, "into": args.into if is_web(args.into) else str(Path(args.into)), "report": report}, text)


def _threads(text: str) -> int:
    if not text.isdecimal():
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of threads")
    return int(text)


def _size(text: str) -> float:
    match = re.fullmatch(r"([0-9._]+(?:e[0-9]+)?)\s*([a-z]*)", text.strip().lower())
    with contextlib.suppress(KeyError, ValueError):
        if match is not None:
            return float(match[1]) * _UNITS[match[2]]
    raise argparse.ArgumentTypeError(f"{text!r} is not a number of bytes, such as 3GB, 512MiB or 3e9")


def _rate(text: str) -> float:
    rate = _size(text.strip().lower().removesuffix("/s"))
    if rate <= 0:
        raise argparse.ArgumentTypeError(f"{text!r} is no rate, such as 10GB/s")
    return rate


def _bytes(text: str) -> int:
    return int(_size(text))


_AGES = {"s": 1, "m": 60, "min": 60, "h": 3600, "d": 86400, "w": 604800}


def _age(text: str) -> float:
    match = re.fullmatch(r"([0-9]+(?:\.[0-9]+)?)\s*([a-z]+)", text.strip().lower())
    if match is None or match[2] not in _AGES:
        raise argparse.ArgumentTypeError(f"{text!r} is not a time, such as 7d, 12h or 30min")
    return float(match[1]) * _AGES[match[2]]


def _positive(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number, 1 or more")
    return int(text)


def _synth(args: argparse.Namespace) -> None:
    try:
        from .synthetic import layouts, synth
    except ModuleNotFoundError as error:
        if error.name != "numpy":
            raise
        raise UnsupportedError("penstock synth needs numpy, which is not installed here: pip install numpy") from error

    if args.list:
        listed: list[dict[str, Any]] = []
        for name in layouts.MODELS:
            model = layouts.model(name)
            files = model.split(model.blocks)
            sizes = [tensor.nbytes for file in files for tensor in file]
            about = {"files": len(files), "tensors": len(sizes), "nbytes": sum(sizes)}
            listed.append({"name": name, "repository": model.repository, **about})
        head = ["name", "of", "files", "tensors", "bytes"]
        rows = [[m["name"], m["repository"], str(m["files"]), f"{m['tensors']:,}", f"{m['nbytes']:,}"] for m in listed]
        _print(args, {"layouts": listed}, table([head, *rows], right=(2, 3, 4)))
        return
    if args.name is None or args.folder is None:
        raise InvalidError("give the NAME of a model and a FOLDER, or --list")

    folder = Path(args.folder)
    layout = layouts.build(args.name, layers=args.layers, nbytes=args.nbytes, scale=args.scale, align=args.align)
    there = synth.in_place(layout, folder, seed=args.seed)
    start = time.perf_counter()
    synth.write(layout, folder, seed=args.seed)
    seconds = time.perf_counter() - start
    document = {
        "folder": str(folder),
        "name": layout.name,
        "files": layout.files,
        "tensors": len(layout.tensors),
        "nbytes": layout.nbytes,
        "cut": layout.cut,
        "seed": args.seed,
        "written": not there,
        "seconds": None if there else seconds,
    }

    def text() -> str:
        count = len(layout.shards)
        files = f"{count} file{'s' * (count != 1)}"
        lines = [f"{folder}: {layout.name}, {len(layout.tensors):,} tensors, {size_text(layout.nbytes)} in {files}"]
        if layout.cut:
            lines.append(f"cut to {layout.cut}")
        rate = f"{layout.nbytes / seconds / 1e9:.2f} GB/s" if seconds else ""
        lines.append("in place already" if there else f"written in {seconds:.1f} s: {rate}")
        return "\n".join(lines)

    _print(args, document, text)


# serve


def _serve(args: argparse.Namespace) -> None:
    from ._serve import run

    def say(document: dict[str, Any], text: str) -> None:
        _print(args, document, text)
        sys.stdout.flush()

    run(args, say)


def _port(text: str) -> int:
    if not text.isdecimal() or int(text) > 65535:
        raise argparse.ArgumentTypeError(f"{text!r} is not a port: 0 to 65535")
    return int(text)


class _Version(argparse.Action):
    """Prints what this build is, line by line: argparse's own action would wrap it."""

    def __call__(self, parser: argparse.ArgumentParser, *_: Any) -> None:
        from ._built import described

        sys.stdout.write(described() + "\n")
        parser.exit()


def _parser(bench: bool = True, selftest: bool = True) -> argparse.ArgumentParser:
    """The parser of all commands; with the arguments of `bench` and `selftest`, which their folders know, if asked."""
    parser = Parser(
        prog="penstock",
        description="Loads and examines safetensors checkpoints. `penstock COMMAND --help` shows how to use a command.",
        epilog="exit status: 0 success, 1 a check failed, 2 wrong usage, 3 an error, "
        "4 verify has no digest to compare with, 77 selftest finds no GPU, 130 interrupted",
    )
    help = "show version, commit, features and platform, and exit"
    parser.add_argument("--version", action=_Version, nargs=0, help=help)
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")

    def command(name: str, run: Callable[[argparse.Namespace], None], help: str) -> argparse.ArgumentParser:
        made = commands.add_parser(name, help=help, description=help[0].upper() + help[1:] + ".")
        made.add_argument("--json", action="store_true", help="print one JSON document instead of text")
        made.set_defaults(run=run)
        return made

    def with_source(made: argparse.ArgumentParser) -> argparse.ArgumentParser:
        made.add_argument("source", nargs="+", help=_SOURCE)
        help = "of a folder or a repository, the files of this variant: fp16 is model.fp16.safetensors"
        made.add_argument("--variant", metavar="NAME", help=help)
        return made

    def with_patience(made: argparse.ArgumentParser) -> argparse.ArgumentParser:
        help = "fail if the file system does not answer for SECONDS (default: PENSTOCK_STALL_TIMEOUT, or 120)"
        made.add_argument("--stall-timeout", type=_seconds, metavar="SECONDS", help=help)
        return made

    def with_storage(made: argparse.ArgumentParser) -> argparse.ArgumentParser:
        help = "set how servers are asked (docs/api.md lists the names); may be repeated"
        made.add_argument("--storage", action="append", default=[], type=_setting, metavar="NAME=VALUE", help=help)
        return made

    help = "show files, tensors, dtypes and sizes"
    made = with_storage(with_patience(with_source(command("inspect", _inspect, help))))
    help = "list every tensor; by default similar layers are shown as one"
    made.add_argument("--tensors", action="store_true", help=help)
    made.add_argument("--depth", type=int, metavar="N", help="show at most N levels of the tree")

    made = with_storage(with_source(command("load", _load, "load a checkpoint and print a report: time, speed, bytes")))
    made.add_argument("--device", default="cpu", help='where to load to: "cpu" (default), "cuda:0", ...')
    help = f"also make tensors of this framework: {', '.join(FRAMEWORKS)}"
    made.add_argument("--framework", choices=list(FRAMEWORKS), metavar="NAME", help=help)
    made.add_argument("--names", action="append", metavar="GLOB", help="load only these tensors; may be repeated")
    made.add_argument("--dtype", help='cast to this floating-point dtype, or "raw" for plain bytes')
    help = "read in the order of the file, or layer by layer (default: file)"
    made.add_argument("--order", choices=ORDERS, default="file", help=help)
    made.add_argument("--no-progress", action="store_true", help="show no progress bar")
    made.add_argument("--trace", metavar="FILE", help="write to FILE what happened when, for Chrome or Perfetto")
    help, name = "set one of the options below; may be repeated", "NAME=VALUE"
    given = made.add_argument("-o", "--option", action="append", default=[], type=_option, metavar=name, help=help)
    given.completer = lambda **_: [f"{name}=" for name in _core.Options.names()]  # type: ignore[attr-defined]
    for group in _core.Options.groups():
        made.add_argument_group(f"{group} options, each as -o NAME=VALUE", _option_lines(group))

    help = "say what the ranks of a parallel model will read, alone and together, and how long that takes"
    made = with_storage(with_patience(with_source(command("plan", _plan, help))))
    for name, help in (
        ("tp", "ranks that divide matrices"),
        ("pp", "ranks that divide layers"),
        ("dp", "replicas"),
        ("ep", "ranks that divide experts: of the tp x dp ranks that have the same layers"),
        ("nodes", "nodes, among which the ranks are divided in their order"),
    ):
        made.add_argument(f"--{name}", type=_positive, default=1, metavar="N", help=f"{help} (default: 1)")
    for name, help in (
        ("storage-rate", "what the storage gives to all nodes together, such as 10GB/s"),
        ("node-rate", "what one node gets of it"),
        ("network", "what one node sends to others, and receives at the same time"),
    ):
        made.add_argument(f"--{name}", type=_rate, metavar="RATE", help=f"{help} (default: no bound)")
    help = "which ranks read for each other: all (the default), or those of one node"
    made.add_argument("--scope", choices=get_args(Scope), default="world", help=help)

    help = "check headers, bounds and index; with --sha256 every byte"
    made = with_storage(with_patience(with_source(command("verify", _verify, help))))
    help = "hash every file, and compare it with the digest that the Hub, or its cache, has of it"
    made.add_argument("--sha256", action="store_true", help=help)
    help = "compare with the digests in FILE, which has the format of sha256sum"
    made.add_argument("--digests", metavar="FILE", help=help)

    made = with_patience(with_source(command("warm", _page_cache, "read the files into the page cache")))
    help = "the number of threads that read (default: penstock chooses)"
    made.add_argument("--threads", type=_threads, default=0, metavar="N", help=help)

    help = "remove the files from the page cache; needs no root"
    with_patience(with_source(command("evict", _page_cache, help)))

    def with_cache(made: argparse.ArgumentParser) -> argparse.ArgumentParser:
        help = "the folder of the disk cache (default: PENSTOCK_STORAGE_DISK_CACHE)"
        made.add_argument("--disk-cache", metavar="FOLDER", help=help)
        return with_storage(made)

    help = "fetch a model from a server: into the disk cache, or as plain files into a folder"
    made = with_cache(command("pull", _pull, help))
    help = """a folder in an object store (s3://, gs://, az://), a repository (hf://org/name), or an index or a shard
    file, there or on a web server"""
    made.add_argument("address", metavar="ADDRESS", help=help)
    help = "write plain files to it; those that are there in the server's version stay (default: fill the disk cache)"
    made.add_argument("folder", nargs="?", metavar="FOLDER", help=help)
    help = "also fetch all files below this address, or with FOLDER below this folder; may be repeated"
    made.add_argument("--also", action="append", default=[], metavar="PLACE", help=help)
    help = "the files of this variant: fp16 is model.fp16.safetensors"
    made.add_argument("--variant", metavar="NAME", help=help)
    made.add_argument("--no-progress", action="store_true", help="show no progress bar")

    help = "upload a checkpoint's folder to an object store, file by file as they are"
    made = with_storage(command("push", _push, help))
    made.add_argument("folder", nargs="?", metavar="FOLDER", help="the folder: its weights, index and small files")
    made.add_argument("address", metavar="ADDRESS", help="where they go: s3://bucket/prefix, gs://, az://")
    help = """also clear what is older than a day below ADDRESS: incomplete uploads, of whatever program, and shards of
    pushes and saves that no index names; without FOLDER nothing else is done"""
    made.add_argument("--clear", action="store_true", help=help)
    made.add_argument("--no-progress", action="store_true", help="show no progress bar")

    help = "show, shrink or check the disk cache"
    made = commands.add_parser("cache", help=help, description=help[0].upper() + help[1:] + ".")
    made.set_defaults(run=_cache)
    below = made.add_subparsers(dest="cache", required=True, metavar="COMMAND")

    def of_cache(name: str, help: str) -> argparse.ArgumentParser:
        made = with_cache(below.add_parser(name, help=help, description=help[0].upper() + help[1:] + "."))
        made.add_argument("--json", action="store_true", help="print one JSON document instead of text")
        return made

    of_cache("ls", "list what the disk cache has, and its limits")
    made = of_cache("prune", "remove objects from the disk cache, never those that a process has open")
    prefix = "the objects whose addresses begin so"
    made.add_argument("prefix", nargs="?", metavar="ADDRESS", help=prefix)
    made.add_argument("--all", action="store_true", help="remove all objects")
    help = "remove those that were used least recently, until the others have at most SIZE: 100GB"
    made.add_argument("--to", type=_bytes, metavar="SIZE", help=help)
    help = "remove those that were not used for so long: 7d, 12h"
    made.add_argument("--older-than", type=_age, metavar="AGE", help=help)
    made.add_argument("--dry-run", action="store_true", help="remove nothing; say what would go")
    help = "compare what the disk cache has with its checksums; what is bad is fetched again by the next load"
    made = of_cache("verify", help)
    made.add_argument("prefix", nargs="?", metavar="ADDRESS", help=prefix + " (default: all)")
    made.add_argument("--keep", action="store_true", help="leave bad blocks as they are; only say which")
    made.add_argument("--no-progress", action="store_true", help="show no progress bar")

    made = with_storage(command("doctor", _doctor, "show what this machine offers, and how penstock will load on it"))
    help = "a checkpoint or a folder: its file system is examined (default: .). Or its web address: its server is"
    made.add_argument("path", nargs="?", default=".", help=help)
    help = "do not measure how fast this machine reads and copies, or how fast the server sends"
    made.add_argument("--no-measure", action="store_true", help=help)

    made = command("trace", _trace, "say what limited the speed of a load, from its trace")
    made.add_argument("file", metavar="FILE", help="a trace: a file that `penstock load --trace FILE` wrote")
    help = "also write the timeline as an HTML page, with the disk's ceiling; needs plotly"
    made.add_argument("--html", metavar="FILE", help=help)
    help = "with --html: do not read the files again to measure the disk's ceiling"
    made.add_argument("--no-measure", action="store_true", help=help)

    help = "compare the speed of penstock with other loaders and with the limits of this machine"
    made = commands.add_parser("bench", help=help, description=help[0].upper() + help[1:] + ".")
    if bench:
        from .bench import command as benchmark

        benchmark.add_arguments(made)
    made.set_defaults(run=_bench)

    help = "rewrite a checkpoint: other layout, shard size or dtype; also from pickles"
    made = with_storage(with_source(command("convert", _convert, help)))
    made.add_argument("into", metavar="DIRECTORY", help="the folder to write to, or an address: s3://, gs://, az://")
    made.add_argument("--dtype", help="cast to this floating-point dtype")
    help = 'the most bytes of one file, or "none" (default: 5GB)'
    made.add_argument("--max-shard-size", default="5GB", metavar="N", help=help)
    help = "aligned: large tensors begin at a page; compact: as safetensors writes (default: aligned)"
    made.add_argument("--layout", choices=LAYOUTS, default="aligned", help=help)
    help = "layer: keep the tensors of a layer together (default: file)"
    made.add_argument("--order", choices=ORDERS, default="file", help=help)
    help = "do not wait until the files are on stable storage"
    made.add_argument("--no-fsync", dest="fsync", action="store_false", help=help)
    made.add_argument("--no-progress", action="store_true", help="show no progress bar")

    made = command("synth", _synth, "write a checkpoint with the layout of a public model, filled with random bytes")
    made.add_argument("name", nargs="?", help="the name of a model that --list shows")
    help = "the folder to write to; it must hold no files except those of an earlier synth"
    made.add_argument("folder", nargs="?", help=help)
    made.add_argument("--list", action="store_true", help="list the models, with their files, tensors and bytes")
    made.add_argument("--layers", type=int, metavar="L", help="write only the first L layers, with embeddings and head")
    help = "write only as many whole layers as fit into N bytes: 3GB, 512MiB, 3e9"
    made.add_argument("--nbytes", type=_size, metavar="N", help=help)
    help = "multiply the longest dimension of every tensor by S (at most 1)"
    made.add_argument("--scale", type=float, default=1, metavar="S", help=help)
    help = "begin the data at a multiple of N bytes (default: as in the published file)"
    made.add_argument("--align", type=int, metavar="N", help=help)
    made.add_argument("--seed", type=int, default=0, metavar="N", help="the seed of the random bytes (default: 0)")

    made = command("serve", _serve, "serve the files of a folder over HTTP, read-only, until Ctrl-C")
    made.add_argument("path", metavar="FOLDER", help="the folder; hidden files are not served")
    help = "the port to listen on; 0 takes a free one (default: 8080)"
    made.add_argument("--port", type=_port, default=8080, metavar="N", help=help)
    help = "the address to listen on: 0.0.0.0 or :: for all (default: 127.0.0.1, which is for this machine alone)"
    made.add_argument("--host", default="127.0.0.1", metavar="ADDRESS", help=help)
    help = "clients must show the token in FILE: Authorization: Bearer (default: PENSTOCK_SERVE_TOKEN, or none)"
    made.add_argument("--token-file", metavar="FILE", help=help)
    help = "let other machines read without a token"
    made.add_argument("--no-token", action="store_true", help=help)
    made.add_argument("--tls-cert", metavar="PEM", help="speak TLS: the certificate chain")
    made.add_argument("--tls-key", metavar="PEM", help="speak TLS: the private key")
    help = "answer at most N connections at a time (default: 1024)"
    made.add_argument("--max-connections", type=_positive, default=1024, metavar="N", help=help)
    help = "copy each piece of a file, and compare the file before the piece is sent"
    made.add_argument("--no-sendfile", action="store_true", help=help)
    help = "write each request to standard error"
    made.add_argument("--access-log", action="store_true", help=help)

    help = "test and measure loads to the GPUs of this machine, and write a report that can be sent"
    made = commands.add_parser("selftest", help=help, description=help[0].upper() + help[1:] + ".")
    made.add_argument("--gpu", action="store_true", required=True, help="on GPUs: the only tests that there are so far")
    if selftest:
        from .selftest import run

        run.add_arguments(made)
    made.set_defaults(run=_selftest, json=False)

    from .integrations import _report_command

    help = "measure how a serving engine starts"
    made = commands.add_parser("engines", help=help, description=help[0].upper() + help[1:] + ".")
    _report_command.add_arguments(made)
    made.set_defaults(run=_engines)
    return parser


def _one_line(error: BaseException) -> str:
    return re.sub(r"\s*\n\s*", "; ", str(error).strip()) or type(error).__name__


def _print_error(kind: str, path: str | None, message: str) -> None:
    document = {"ok": False, "error": {"kind": kind, "path": path, "message": message}}
    try:
        sys.stdout.write(json.dumps(document, indent=2) + "\n")
        sys.stdout.flush()
    except BrokenPipeError:
        _nobody_reads()


def _wants_json(arguments: Sequence[str]) -> bool:
    """Whether arguments that could not be parsed ask for JSON. `bench` takes the name of a file there."""
    options = arguments[: arguments.index("--")] if "--" in arguments else arguments
    return "bench" not in options[:1] and any(len(word) > 2 and "--json".startswith(word) for word in options)


def _wants_traceback() -> bool:
    value = os.environ.get("PENSTOCK_TRACEBACK", "0")
    try:
        value.encode()
    except UnicodeEncodeError:
        raise InvalidError(f"PENSTOCK_TRACEBACK={value!r}: must be UTF-8") from None
    return value not in ("", "0")


def _interrupted(args: argparse.Namespace) -> int:
    if args.json is True:
        _print_error("Interrupted", None, "interrupted")
    sys.stderr.write("penstock: interrupted\n")
    return INTERRUPTED


def _came_of_an_interrupt(error: BaseException) -> bool:
    """Whether an interrupt led to the error: Ctrl-C in the middle of a wait for a thread can leave a lock of Python in
    a state in which giving it back is an error ("release unlocked lock")."""
    while error.__context__ is not None and not isinstance(error, KeyboardInterrupt):
        error = error.__context__
    return isinstance(error, KeyboardInterrupt)


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command line ``argv`` (None: the process' own) and returns the exit status."""
    given = sys.argv[1:] if argv is None else list(argv)
    asked = "_ARGCOMPLETE" in os.environ
    named = next((word for word in given if word[:1] != "-"), None)
    parser = _parser(bench=asked or named == "bench", selftest=asked or named == "selftest")
    if asked:  # the shell asks what could come next: `penstock[cli]` brings what answers
        import argcomplete

        argcomplete.autocomplete(parser)
    try:
        args = parser.parse_args(given)
    except WrongUsage as error:
        if _wants_json(given):
            _print_error("Invalid", None, str(error))
        sys.stderr.write(f"{error.usage}{error}\n")
        return USAGE
    if isinstance(sys.stdout, io.TextIOWrapper):
        # File names need not be UTF-8; they are written as the bytes that they are. A terminal that is not UTF-8 gets
        # escapes for what it lacks
        utf_8 = sys.stdout.encoding.lower().replace("-", "") == "utf8"
        sys.stdout.reconfigure(errors="surrogateescape" if utf_8 else "backslashreplace")
    traceback_wanted = False
    status = OK
    try:
        traceback_wanted = _wants_traceback()
        _refuse_schemes(args)
        try:
            args.run(args)
        except _Failed as failed:
            status = failed.status
        sys.stdout.flush()
    except KeyboardInterrupt:
        return _interrupted(args)
    except BrokenPipeError:
        _nobody_reads()
        return status
    except Exception as error:
        if _came_of_an_interrupt(error):
            return _interrupted(args)
        if traceback_wanted:
            import traceback

            traceback.print_exc()
        kind = error.kind if isinstance(error, PenstockError) else type(error).__name__
        if args.json is True:  # bench has the name of a file there
            _print_error(kind, getattr(error, "path", None), str(error))
        sys.stderr.write(f"penstock {args.command}: {_one_line(error)}\n")
        return USAGE if isinstance(error, InvalidError) else ERROR
    return status


if __name__ == "__main__":
    sys.exit(main())
