"""Every entry point of the extension, each with a call of it that means something.

Run as a program it calls them all: where no thread can be started ("threads"), with arguments that mean nothing
("arguments"), or with one allocation of Python's refused, each in its turn ("memory"). It prints a line for each call
that let something out that is no `Exception`.
"""

from __future__ import annotations

import collections.abc
import ctypes
import math
import mmap
import sys
import warnings
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from typing import Any

from local_server import local_server
from penstock import _core
from penstock._core import CacheFill, Checkpoint, DiskCache, FirstTouch, Leased, Load, Options, Save, View

#: Attributes that Python itself gives a class of the extension. Comparisons are derived, and compare numbers. Who has
#: `__add__` has `__radd__`. Copying or pickling an object leaves `__slotnames__` in its class.
_GIVEN = {f"__{name}__" for name in ("doc", "module", "eq", "ne", "lt", "le", "gt", "ge", "hash", "radd", "slotnames")}


def found() -> set[str]:
    """The names of all that Python can call in the extension, found by looking."""
    names = set()
    for name, value in vars(_core).items():
        if isinstance(value, type):
            names |= {f"{name}.{member}" for member in vars(value) if member not in _GIVEN}
        elif callable(value) and not name.startswith("__"):
            names.add(name)
    return names


class Call:
    """A call: what makes its object (None: a function), and its arguments."""

    def __init__(self, of: Callable[[], Any] | None, *arguments: Any, **keywords: Any) -> None:
        self.of, self.arguments, self.keywords = of, arguments, keywords


class Lying(collections.abc.Sequence):
    """A sequence that says that it has more elements than there is memory."""

    def __len__(self) -> int:
        return sys.maxsize

    def __getitem__(self, index: Any) -> Any:
        raise IndexError


class Served(BaseHTTPRequestHandler):
    """Ranges of one file, with an ETag."""

    content = b""

    def do_GET(self) -> None:
        first, last = map(int, self.headers["Range"].removeprefix("bytes=").split("-"))
        part = self.content[first : last + 1]
        self.send_response(206)
        self.send_header("ETag", '"one"')
        self.send_header("Content-Range", f"bytes {first}-{first + len(part) - 1}/{len(self.content)}")
        self.send_header("Content-Length", str(len(part)))
        self.end_headers()
        self.wfile.write(part)

    def log_message(self, *about: object) -> None:
        pass


def disk_cache(file: Path, folder: Path) -> DiskCache:
    """The work of the disk cache for a load of this file from a server."""
    Served.content = file.read_bytes()
    with local_server(Served) as where:
        storage: Any = {"disk_cache": str(folder / "kept"), "disk_cache_free": 1}
        load = Load.start(Checkpoint.open([f"http://{where}/{file.name}"], 5.0, storage), Options())
        load.wait()
        kept: DiskCache = load.report()["disk_cache"]
        kept.wait()
        load.close()
    return kept


def calls(file: Path, folder: Path) -> dict[str, Call]:
    """A call of each, by name. ``file`` has tensors "a" (F32, 8 elements) and "b" (U8, 4); ``folder`` is written to."""
    options = Options()

    def checkpoint() -> Checkpoint:
        return Checkpoint.open([str(file)])

    def loading(**how: Any) -> Load:
        return Load.start(checkpoint(), Options(**how))

    def loaded() -> Load:
        load = loading()
        load.wait()
        return load

    def traced() -> Load:
        load = loading(trace=folder / "trace.json")
        load.wait()
        return load

    def view() -> View:
        return loaded().views([0])[0]

    def leased() -> Leased:
        found = loaded().lease(1 << 30)
        assert isinstance(found, Leased), f"no leases here: {found}"
        return found

    room = mmap.mmap(-1, 8 << 20, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    place = ctypes.addressof(ctypes.c_char.from_buffer(room)), len(room)

    def first_touch() -> FirstTouch:
        return FirstTouch.ask([place], True)

    arranged: dict[str, Any] = {"layout": "aligned", "order": "file"}
    tensors = [("a", "U8", [4], None, None)]
    kept: dict[str, Any] = {"most": None, "sync": False, "checkpoint": False, "keep": None}

    def filling() -> CacheFill:
        made = checkpoint().fill()
        assert made is not None
        return made

    def seat() -> _core.Seat:
        return _core.Seat("127.0.0.1", Options(), known())

    def lookout() -> _core.Lookout:
        return _core.Lookout("127.0.0.1", Options(), known())

    def known() -> _core.Pass:
        return _core.Pass(0, bytes(16))

    def standing() -> _core.Standing:
        return _core.Standing("127.0.0.1", Options(), known())

    def saving() -> Save:
        return Save.start(str(folder), "saved.safetensors", tensors, {}, options, **arranged, **kept)

    served: dict[str, Any] = {"token": None, "strangers": False, "tls": None}
    served |= {"access_log": False, "sends_files": True, "connections": 8}

    def serving() -> _core.Server:
        return _core.Server.start(str(folder), "127.0.0.1", 0, **served)

    def reader() -> _core.Reader:
        return _core.Reader(checkpoint(), Options())

    def cache() -> _core.CacheFolder:
        return _core.CacheFolder({"disk_cache": str(folder / "cache")})

    def pulling() -> _core.Pull:
        return _core.Pull.start([(str(file), str(folder / "pulled"), ("version", 8, 1))], options)

    keys = {"endpoint": "http://127.0.0.1:1", "access_key_id": "key", "secret_access_key": "secret"}
    index = ("m.safetensors.index.json", '{"weight_map": {"a": "m.safetensors"}}', None)
    pushed = ([("m.safetensors", str(file))], index, [("config.json", b"{}", str(file))], "m.safetensors")

    def bucket() -> _core.Bucket:
        """One whose name cannot be: nobody is asked."""
        return _core.Bucket("s3://no bucket/x", keys)

    repository = (str(folder / "hub"), "org/name", "0" * 40)
    of_hub: dict[str, Any] = {"revision": "main", "asked": 1.0, "symlinks": True}
    of_hub["files"] = [("http://hub/a", "a", "0" * 64)]

    def layout() -> _core.HubLayout:
        return _core.HubLayout(*repository, **of_hub)

    # Made here: where no thread can be started there is no server
    kept_one = disk_cache(file, folder)

    path = str(file)
    measured = {"engine": "threads", "threads": 2, "depth": 2, "block": 4096, "device": 0, "nbytes": 4096}
    floats = {"F32": (2, 32, 1), "U8": (1, 8, 1)}
    table = {
        "authorities": Call(None, {"ca": path}),
        "bound": Call(None, "127.0.0.1"),
        "built": Call(None),
        "certificates": Call(None, {"tls_verify": False}),
        "ceiling": Call(None, "copy", [path], **measured),
        "asks_for_versions": Call(None, {"disk_cache": str(folder / "cache")}),
        "contents": Call(None, [path], 1 << 20, 5.0, {"connections": 3}, ("http://127.0.0.1", "token"), layout()),
        "evict": Call(None, path),
        "exiting": Call(None),
        "gpus": Call(None),
        "head": Call(None, [("a", "U8", [4])], {"key": "value"}, **arranged),
        "shards": Call(None, [("a", "U8", [4])], {"key": "value"}, most=4, **arranged),
        "look": Call(None, path, 1, {"connections": 1}),
        "names_in": Call(None, str(folder), 5.0, {"connections": 3}),
        "probe": Call(None, path),
        "proxy": Call(None, "https://127.0.0.1/x", {"proxy": "http://user@127.0.0.1:1"}),
        "option_table": Call(None),
        "quiesce": Call(None, "told to", 1.0),
        "residency": Call(None, path),
        "release_staging": Call(None),
        "stall_timeout": Call(None, 3.0),
        "leave_cache_to_parent": Call(None),
        "stop_fills": Call(None, "told to", 1.0),
        "stop_reading_ahead": Call(None, 0.1),
        "unchecked_hosts": Call(None),
        "under_way": Call(None),
        "schemes": Call(None),
        "storage_settings": Call(None),
        "storage_table": Call(None),
        "unwritable": Call(None, [(4096, 8192)]),
        "warm": Call(None, path, 3),
        "Options.__new__": Call(None, staging="64MiB", threads=2),
        "Options.__repr__": Call(Options),
        "Options.names": Call(None),
        "Checkpoint.open": Call(
            None, [path], 5.0, {"connections": 3, "anonymous": True}, ("http://127.0.0.1", "token")
        ),
        "Checkpoint.from_bytes": Call(None, file.read_bytes()),
        "Checkpoint.of_ranges": Call(None, [(str(file), [(0, 8), (9, 9)])]),
        "Checkpoint.to_open": Call(None, "folder", ["model.safetensors"]),
        "Checkpoint.__len__": Call(checkpoint),
        "Checkpoint.__contains__": Call(checkpoint, "a"),
        "Checkpoint.index": Call(checkpoint, "a"),
        "Checkpoint.versions": Call(checkpoint),
        "Checkpoint.info": Call(checkpoint, 0),
        "Checkpoint.matching": Call(checkpoint, ["*"]),
        "Checkpoint.in_order": Call(checkpoint, "layer"),
        "Checkpoint.by_dtype": Call(checkpoint, [0, 1]),
        "Checkpoint.file_metadata": Call(checkpoint, 0),
        "Checkpoint.file_tensors": Call(checkpoint, 0),
        "Checkpoint.path": Call(checkpoint, 0),
        "Checkpoint.look": Call(checkpoint, 0, 1),
        "Checkpoint.header_bytes": Call(checkpoint, 0),
        "Checkpoint.data_start": Call(checkpoint, 0),
        "Load.start": Call(
            None,
            checkpoint(),
            Options(copy=True, io="buffered"),
            wants=[0, 1],
            regions=[[(0, 4, 2)], None],
            device="cpu",
            order="file",
            stream=False,
            caller_blocks=False,
            dlpack_device=(1, 0),
            misaligned=True,
        ),
        "Load.grant": Call(loaded, 0, 4096, None, 0),
        "Load.next": Call(loaded, 1.0),
        "Load.take": Call(loaded, 0),
        "Load.wait": Call(loaded, 1.0),
        "Load.mark": Call(traced, "mark", 0.0, 1.0),
        "Load.write_trace": Call(traced, "{}"),
        "Load.address": Call(loaded, 0),
        "Load.capsule": Call(loaded, 0, (2, 32), [8]),
        "Load.capsules": Call(loaded, [0, 1], floats, lambda capsule: capsule),
        "Load.views": Call(loaded, [0]),
        "Leased.hand": Call(leased, 0, list),
        "FirstTouch.ask": Call(None, [place], None),
        "FirstTouch.ahead": Call(first_touch, 0, 100),
        "FirstTouch.turn_small": Call(first_touch, [0]),
        "FirstTouch.end": Call(first_touch, [0]),
        "Load.lease": Call(loaded, 1 << 30),
        "View.capsule": Call(view, (2, 32), [8]),
        "View.__dlpack__": Call(view, stream=None, dl_device=None),
        "Reader.__new__": Call(None, checkpoint(), options),
        "Reader.is_distant": Call(reader, 0),
        "Reader.view": Call(reader, 0, [(0, 4, 2)]),
        "Reader.tensor": Call(reader, 0, None, floats, lambda capsule: capsule),
        "Checkpoint.check_copy": Call(checkpoint, 0, 0, 16),
        "CacheFill.wait": Call(filling, 1.0),
        "DiskCache.wait": Call(lambda: kept_one, 1.0),
        "DiskCache.__add__": Call(lambda: kept_one, kept_one),
        "HubLayout.__new__": Call(None, *repository, **of_hub),
        "CacheFolder.__new__": Call(None, {"disk_cache": str(folder / "cache")}),
        "CacheFolder.prune": Call(cache, to_size=1 << 30, dry_run=True),
        "CacheFolder.verify": Call(cache, "0" * 32, 0, 16, True),
        "Pull.start": Call(
            None,
            [(path, str(folder / "pulled"), ("version", 8, 1))],
            options,
            {"connections": 3},
            ("http://127.0.0.1", "token"),
        ),
        "Pull.wait": Call(pulling, 1.0),
        "Save.start": Call(None, str(folder), "saved.safetensors", tensors, {}, options, **arranged, **kept),
        "Save.push": Call(None, "https://127.0.0.1/x", *pushed, str(folder / "push.jsonl"), "here", options),
        "Save.wait": Call(saving, 1.0),
        "Bucket.__new__": Call(None, "s3://bucket/x", keys),
        "Bucket.version": Call(bucket, "s3://no bucket/x/y"),
        "Bucket.age": Call(bucket, "s3://no bucket/x/y"),
        "Bucket.remove": Call(bucket, "s3://no bucket/x/y"),
        "Bucket.forget": Call(bucket, "s3://no bucket/x/y", "upload"),
        "Save.copied": Call(saving, 1.0),
        "Save.sealed": Call(saving, 1.0),
        "Save.want": Call(saving, 0, None, 1.0),
        "Lookout.__new__": Call(None, "127.0.0.1", Options(), known()),
        "Lookout.close": Call(lookout),
        "Lookout.look": Call(lookout),
        "Lookout.watch": Call(lookout, [("127.0.0.1", 1, bytes(16))], 1.0),
        "Pass.__new__": Call(None, 0, bytes(16)),
        "Pass.mark": Call(known),
        "Pass.matches": Call(known, 0, bytes(16), ""),
        "Standing.__new__": Call(None, "127.0.0.1", Options(), known()),
        "Standing.join": Call(standing, [("127.0.0.1", 1)], [("127.0.0.1", 1, bytes(16))], bytes(16), 1.0, 1.0),
        "Standing.closed": Call(standing),
        "Standing.close": Call(standing, 1),
        "Seat.__new__": Call(None, "127.0.0.1", Options(), known()),
        "Seat.close": Call(seat),
        "Seat.look": Call(seat, [0]),
        "Seat.watch": Call(seat, [("127.0.0.1", 1, bytes(16))], 1.0),
        "Seat.join": Call(seat, [("127.0.0.1", 1)], bytes(16), 1.0),
        "Server.start": Call(None, str(folder), "127.0.0.1", 0, **served),
        "Server.stop": Call(serving, 0.5),
        "Shares.__new__": Call(None, checkpoint(), [_core.pack_wants(checkpoint(), [0])], [0, 0]),
        "is_resident": Call(None, checkpoint(), [0, 1], [None, [(0, 4, 1)]]),
        "missing_where_mappable": Call(None, checkpoint(), [0, 1]),
        "traffic": Call(None, checkpoint(), [_core.pack_wants(checkpoint(), [0])], [0, 0], [0, 1]),
        "pack_wants": Call(None, checkpoint(), [0, 1], [None, [(0, 4, 1)]]),
    }
    objects = {
        "Options": Options,
        "Bucket": bucket,
        "Checkpoint": checkpoint,
        "Load": loaded,
        "View": view,
        "Leased": leased,
        "FirstTouch": first_touch,
        "Save": saving,
        "Reader": reader,
        "CacheFill": filling,
        "CacheFolder": cache,
        "HubLayout": layout,
        "DiskCache": lambda: kept_one,
        "Pull": pulling,
        "Lookout": lookout,
        "Pass": known,
        "Standing": standing,
        "Seat": seat,
        "Server": serving,
        "Mesh": lambda: seat().join([("127.0.0.1", 1)], bytes(16), 1.0),
        "Shares": lambda: _core.Shares(checkpoint(), [_core.pack_wants(checkpoint(), [0])], [0, 0]),
    }
    for name in found() - set(table):  # those without arguments
        owner = name.partition(".")[0]
        if owner in objects:
            table[name] = Call(objects[owner])
    return table


#: Arguments that mean nothing, or too much.
HOSTILE = [
    *(0, 1, -1, 3, 255, 4095, 1 << 31, (1 << 32) - 1, 1 << 32, (1 << 63) - 1, (1 << 64) - 1, 1 << 64, 1 << 200),
    *(math.nan, math.inf, -math.inf, 1e308, -0.0, True, None),
    *("", "\0", "\ud800", "*[", "cuda:4294967295", "direct", "uring", "mapped", "host_to_device", "/proc/self/mem"),
    *(b"", b"\xff" * 9, bytearray(3), object(), Lying(), Options(), range(1 << 40)),
    *([], [0], [(1 << 32) - 1], [""], ["["], [None], [[]], [[(0, 0, 0)]], [[(5, 2, 1)], None]),
    [[(0, 4, 1 << 63)], None],
    *([(0, 1 << 63)], [((1 << 64) - 1, 0)], [-1, -8], [1 << 62, 1 << 62, 1 << 62], [0, 1 << 62, 4], [1] * 70),
    *((), (0, 0), (255, 255), {}, {"": ""}, {1: 2}, {"F32": (2, 32, 1)}, {"F32": (0, 0, 0), "U8": (255, 255, 1 << 62)}),
    *([("a", "F64", [1 << 63, 1 << 63])], [("a", "U8", [])] * 2, [("\0", "F4", [3])], [("a", "X9", [1])]),
    [("a", "F64", [1 << 63, 1 << 63], None, None)],
    [("a", "U8", [4], None, None)] * 2,
    [("__metadata__", "F4", [3], None, None)],
    lambda *_: 1 // 0,
]


def _target(name: str, call: Call) -> Callable[..., Any]:
    """What to call, on an object of its own."""
    *owner, member = name.split(".")
    if not owner:
        return getattr(_core, name)
    kind = getattr(_core, owner[0])
    if member == "__new__":
        return kind
    if call.of is None:
        return getattr(kind, member)
    made = call.of()
    if not callable(getattr(kind, member)):
        return lambda: getattr(made, member)
    return getattr(made, member)


def _variants(call: Call) -> Iterator[tuple[list[Any], dict[str, Any]]]:
    for value in HOSTILE:
        for place in range(len(call.arguments)):
            arguments = list(call.arguments)
            arguments[place] = value
            yield arguments, call.keywords
        for key in call.keywords:
            yield list(call.arguments), {**call.keywords, key: value}
    yield [*call.arguments, 1], call.keywords
    yield [], {}
    yield list(call.arguments), {"nothing of this name": 1}


def escaped(name: str, call: Call, arguments: list[Any], keywords: dict[str, Any]) -> str | None:
    """What a call let out that is no `Exception`."""
    try:
        target = _target(name, call)
        made = target(*arguments, **keywords)
        if isinstance(made, (Load, Save)):
            made.close()
    except Exception as error:
        if type(error).__name__ == "InternalError" and "panicked" in str(error):
            print("panicked:", name, str(error)[:200], flush=True)
        return None
    except BaseException as error:
        return f"{name}: {type(error).__name__}: {error}"
    return None


def starved(name: str, call: Call) -> Iterator[str]:
    """What calls let out in which one allocation of Python's is refused: the first one, then the second one, and so on
    until none is."""
    from _testcapi import remove_mem_hooks, set_nomemory

    panics = 0
    for refused in range(400):
        target, text, hit = _target(name, call), "", False
        try:
            set_nomemory(refused, refused + 1)
            target(*call.arguments, **call.keywords)
            remove_mem_hooks()
        except BaseException as error:
            remove_mem_hooks()
            hit, text = True, f"{type(error).__name__}: {error}"
            panics += "panicked" in text
            if not isinstance(error, Exception):
                yield f"{name}: {text}, with allocation {refused} refused"
        if not hit and refused > 30:
            break
    print("panics:", panics, name, flush=True)


def main(what: str, file: str, folder: str) -> None:
    warnings.simplefilter("ignore")
    table = calls(Path(file), Path(folder))
    assert set(table) == found(), set(table) ^ found()
    if what == "threads":
        from refusals import NO_THREADS, refuse

        refuse(*NO_THREADS)
    for name, call in sorted(table.items()):
        if what == "memory":
            print("entry:", name, flush=True)
            for out in starved(name, call):
                print("escaped:", out, flush=True)
            continue
        ways = [(list(call.arguments), call.keywords)] if what == "threads" else list(_variants(call))
        print("entry:", name, len(ways), flush=True)
        for arguments, keywords in ways:
            if (out := escaped(name, call, arguments, keywords)) is not None:
                print("escaped:", out, flush=True)
                if what == "arguments":
                    print("        ", repr(arguments)[:200], repr(keywords)[:200], flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
