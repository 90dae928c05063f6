"""Errors: kinds, the exceptions they also are, and their way across processes."""

import json
import pickle
from pathlib import Path

import penstock
import pytest
from penstock import _errors
from penstock._errors import PenstockError, from_core

#: Every `ErrorKind` of the core, and those of Python alone, and what people already catch for it.
CAUGHT_AS = {
    "NotFound": FileNotFoundError,
    "Permission": PermissionError,
    "NotACheckpoint": ValueError,
    "Header": ValueError,
    "Index": ValueError,
    "Truncated": EOFError,
    "Digest": ValueError,
    "Changed": RuntimeError,
    "UnknownTensor": KeyError,
    "Slice": ValueError,
    "Invalid": ValueError,
    "Unsupported": NotImplementedError,
    "Mismatch": ValueError,
    "Io": OSError,
    "Write": OSError,
    "NoSpace": OSError,
    "Timeout": TimeoutError,
    "Cancelled": PenstockError,
    "Peer": ConnectionError,
    "PlanMismatch": ValueError,
    "Device": RuntimeError,
    "OutOfMemory": MemoryError,
    "Limit": OSError,
    "Forked": RuntimeError,
    "Engine": RuntimeError,
    "Busy": RuntimeError,
    "Internal": RuntimeError,
}


@pytest.mark.parametrize(("kind", "builtin"), CAUGHT_AS.items())
def test_every_kind_is_the_exception_people_catch_for_it(kind, builtin):
    error = from_core(kind, "cannot read: gone", "/a/b.safetensors", (8, 16), 5)
    assert isinstance(error, builtin)
    assert isinstance(error, _errors.SafetensorError)
    assert (error.kind, error.path, error.range, error.errno) == (kind, "/a/b.safetensors", (8, 16), 5)
    assert str(error) == "/a/b.safetensors: bytes 8..16: cannot read: gone"


def test_a_kind_for_every_class():
    assert set(CAUGHT_AS) == set(_errors._BY_KIND)


@pytest.mark.parametrize("kind", CAUGHT_AS)
def test_errors_survive_pickling(kind):
    error = from_core(kind, "why", "/a", (0, 8), 2, "w", (16, "nothing"), 503, "r-1")
    error.touched = ["x"]
    again = pickle.loads(pickle.dumps(error))
    assert type(again) is type(error)
    assert str(again) == str(error)
    assert (again.kind, again.path, again.range, again.errno, again.touched) == (kind, "/a", (0, 8), 2, ["x"])
    assert (again.tensor, again.expected, again.found) == ("w", 16, "nothing")
    assert (again.status, again.request_id) == (503, "r-1")


def test_the_failure_of_a_rank_survives_pickling_with_what_is_known_of_it():
    error = from_core("Peer", "rank 2 (h) is silent", peer=(2, "h", "is silent", 5.5))
    again = pickle.loads(pickle.dumps(error))
    assert (again.rank, again.host, again.why, again.since, str(again)) == (2, "h", "is silent", 5.5, str(error))
    unknown = from_core("Peer", "somebody is silent")
    assert (unknown.rank, unknown.host, unknown.why, unknown.since) == (None, None, "somebody is silent", None)


def test_a_path_is_named_once():
    assert str(from_core("Io", "/a/b: broken", "/a/b")) == "/a/b: broken"


def test_a_kind_from_a_newer_core_is_still_an_error():
    error = from_core("Melted", "too hot", "/a")
    assert type(error) is PenstockError
    assert error.kind == "Melted"
    assert pickle.loads(pickle.dumps(error)).kind == "Melted"


def _shard(path: Path, header: dict, data: bytes = b"") -> Path:
    text = json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + data)
    return path


def test_errors_say_which_tensor_and_what_was_expected_and_found(tmp_path):
    """What a program would otherwise have to read out of the message."""
    plain = {"dtype": "F32", "shape": [4, 2]}
    good = _shard(tmp_path / "good.safetensors", {"w": {**plain, "data_offsets": [0, 32]}}, bytes(32))
    checkpoint = penstock.open(good)

    def data(call, *args, **kwargs):
        with pytest.raises(PenstockError) as caught:
            call(*args, **kwargs)
        error = caught.value
        assert error.path is not None
        return type(error).__name__, error.tensor, error.expected, error.found

    broken = _shard(tmp_path / "size.safetensors", {"w": {**plain, "data_offsets": [0, 16]}}, bytes(16))
    assert data(penstock.open, broken) == ("HeaderError", "w", 32, 16)
    hole = _shard(tmp_path / "hole.safetensors", {"w": {**plain, "data_offsets": [8, 40]}}, bytes(40))
    assert data(penstock.open, hole) == ("HeaderError", "w", 0, 8)
    whole = good.stat().st_size
    short = tmp_path / "short.safetensors"
    short.write_bytes(good.read_bytes()[:-5])
    assert data(penstock.open, short) == ("TruncatedError", None, whole, whole - 5)
    header = json.dumps({"w": {**plain, "data_offsets": [0, 32]}}).replace("F32", "F99").encode()
    odd = tmp_path / "odd.safetensors"
    odd.write_bytes(len(header).to_bytes(8, "little") + header + bytes(32))
    assert data(penstock.open, odd) == ("HeaderError", "w", None, None)

    load = checkpoint.load
    assert data(load, framework="np", names=["v", "u"])[:2] == ("UnknownTensorError", "v")
    assert data(load, framework="np", slices={"w": (slice(0, 9), slice(None))})[:2] == ("SliceError", "w")
    handle = penstock.safe_open(good, "np")
    assert data(handle.get_tensor, "v")[:2] == ("UnknownTensorError", "v")
    assert data(handle.get_slice("w").__getitem__, (0, 0, 0))[:2] == ("SliceIndexError", "w")

    with good.open("r+b") as file:
        file.truncate(whole - 8)
    name, tensor, expected, found = data(load, framework="np", options={"copy": True})
    assert (name, tensor) == ("ChangedError", None)
    assert (expected.split(",")[0], found.split(",")[0]) == (f"{whole} bytes", f"{whole - 8} bytes")


#: Calls that no type checker lets through, and what is raised besides `InvalidError`.
MISUSES = {
    "bounds that are no numbers": (lambda c, p: c.load(framework="np", slices={"w": slice(0.0, 1.0)}), TypeError),
    "bounds that are text": (lambda c, p: c.load(framework="np", slices={"w": slice("a", 1)}), TypeError),
    "slices in a list": (lambda c, p: c.load(framework="np", slices=[1]), TypeError),
    "slices without names": (lambda c, p: c.load(framework="np", slices=slice(0, 1)), TypeError),
    "names that are a number": (lambda c, p: c.load(framework="np", names=5), TypeError),
    "a number to save": (lambda c, p: penstock.save_file(5, p / "x.safetensors"), TypeError),
    "a list to save": (lambda c, p: penstock.save_file([c], p / "x.safetensors"), TypeError),
    "a plan without slices": (lambda c, p: penstock.safe_open(c.files[0], "np").prefetch(["w"]), TypeError),
    "a plan that is a number": (lambda c, p: penstock.safe_open(c.files[0], "np").prefetch(5), TypeError),
    "a negative limit of an open": (lambda c, p: penstock.open(c.files[0], stall_timeout=-1), ValueError),
    "a negative limit of a look": (lambda c, p: c.verify(stall_timeout=-1), ValueError),
    "an impossible option": (lambda c, p: c.load(framework="np", options={"extent": 5}), ValueError),
}


@pytest.mark.parametrize("what", MISUSES)
def test_what_makes_no_sense_is_an_error_of_ours(tmp_path, what):
    call, also = MISUSES[what]
    header = {"w": {"dtype": "F32", "shape": [4, 2], "data_offsets": [0, 32]}}
    checkpoint = penstock.open(_shard(tmp_path / "good.safetensors", header, bytes(32)))
    with pytest.raises(also) as caught:
        call(checkpoint, tmp_path)
    assert isinstance(caught.value, PenstockError), repr(caught.value)
    assert [entry.name for entry in tmp_path.iterdir()] == ["good.safetensors"]


def test_limits_that_nothing_reaches_are_none(tmp_path):
    header = {"w": {"dtype": "F32", "shape": [4, 2], "data_offsets": [0, 32]}}
    checkpoint = penstock.open(_shard(tmp_path / "good.safetensors", header, bytes(32)))
    with checkpoint.start(framework="np") as job:
        assert job.wait(10**400)
        assert job.result(10**400)["w"].shape == (4, 2)
    for number, most in enumerate((10**30, "9" * 400, "9" * 30 + "GB")):
        penstock.save(checkpoint.load(framework="np"), tmp_path / f"{number}", max_shard_size=most)
        assert [entry.name for entry in (tmp_path / f"{number}").iterdir()] == ["model.safetensors"]
