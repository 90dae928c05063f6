"""Errors: kinds, the exceptions they also are, and their way across processes."""

import pickle

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
    "Device": RuntimeError,
    "OutOfMemory": MemoryError,
    "Limit": OSError,
    "Forked": RuntimeError,
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
    error = from_core(kind, "why", "/a", (0, 8), 2)
    error.touched = ["x"]
    again = pickle.loads(pickle.dumps(error))
    assert type(again) is type(error)
    assert str(again) == str(error)
    assert (again.kind, again.path, again.range, again.errno, again.touched) == (kind, "/a", (0, 8), 2, ["x"])


def test_a_path_is_named_once():
    assert str(from_core("Io", "/a/b: broken", "/a/b")) == "/a/b: broken"


def test_a_kind_from_a_newer_core_is_still_an_error():
    error = from_core("Melted", "too hot", "/a")
    assert type(error) is PenstockError
    assert error.kind == "Melted"
    assert pickle.loads(pickle.dumps(error)).kind == "Melted"
