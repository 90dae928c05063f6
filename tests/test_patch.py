"""`patch`: whose names are replaced, who does the work then, and that nothing is left of it."""

from __future__ import annotations

import gc
import importlib
import importlib.util
import inspect
import json
import os
import shutil
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import penstock
import pytest
import torch
from conftest import Oracle, raw, text
from penstock.synthetic.synth import Tensor

safetensors = pytest.importorskip("safetensors")
safetensors_torch = pytest.importorskip("safetensors.torch")

THEIRS = safetensors.safe_open
SOURCES = Path(penstock.__file__).parent.parent


def held() -> dict[str, tuple[tuple[str, ...], tuple[int, ...]]]:
    """The attributes of every module: names and identities. (In sys pytest keeps the last failure.)

    There are hundreds of thousands: a loop over them, before and after each test, would be what the tests take.
    """
    found = {}
    for name, module in list(sys.modules.items()):
        if isinstance(module, ModuleType) and name != "sys" and not name.startswith("penstock"):
            attributes = object.__getattribute__(module, "__dict__").copy()
            found[name] = tuple(attributes), tuple(map(id, attributes.values()))
    return found


def public(names: tuple[str, ...], values: tuple[int, ...]) -> dict[str, int]:
    return {name: value for name, value in zip(names, values, strict=True) if not name.startswith("_")}


@pytest.fixture(autouse=True)
def nothing_left() -> Iterator[None]:
    """Whatever a test does: once its patches are undone, every name is what it was."""
    before, finders = held(), list(sys.meta_path)
    yield
    after = held()
    for module in before:
        if after.get(module) != before[module]:
            then, now = public(*before[module]), public(*after.get(module, ((), ())))
            assert {name: now.get(name) for name in then} == then, module
    assert sys.meta_path == finders
    assert not penstock._patch._routing.patches


@pytest.fixture
def module() -> Iterator[Callable[..., Any]]:
    """Makes a module that is imported: module("accelerate.made_up", attribute=value)."""
    made = []

    def make(name: str, kind: type[ModuleType] = ModuleType, **attributes: Any) -> Any:
        sys.modules[name] = kind(name)
        vars(sys.modules[name]).update(attributes)
        made.append(name)
        return sys.modules[name]

    yield make
    for name in made:
        del sys.modules[name]


@pytest.fixture
def one(write: Callable[..., Path]) -> Path:
    return write(Tensor("a", "F32", (6, 8)), Tensor("b", "BF16", (10,)), metadata={"k": "v"})


# Names


@pytest.mark.parametrize(
    "package",
    ["transformers", "diffusers", "accelerate", "peft", "huggingface_hub", "torch.distributed.checkpoint"],
)
def test_a_module_of_these_packages_has_penstocks_under_its_own_names(module, one, loaded, package):
    made = module(f"{package}.made_up.inner", safe_open=THEIRS, safe_load_file=safetensors_torch.load_file, other=torch)
    with penstock.patch() as patched:
        with made.safe_open(one, "pt") as file:
            assert isinstance(file, penstock.safe_open)
        Oracle(one).same(made.safe_load_file(one))
        assert loaded == ["a", "b"]
        assert {f"{package}.made_up.inner.{name}" for name in ("safe_open", "safe_load_file")} <= set(patched.places)
    assert (made.safe_open, made.safe_load_file, made.other) == (THEIRS, safetensors_torch.load_file, torch)
    assert patched.places == []


def test_other_modules_keep_what_they_have(module):
    theirs = {"safe_open": THEIRS, "load_file": safetensors_torch.load_file}
    made = [module(name, **theirs) for name in ("somebody", "transformersx", "torch.distributed.other_made_up")]
    with penstock.patch():
        for one in made:
            assert (one.safe_open, one.load_file) == tuple(theirs.values())


def test_everything_of_safetensors_itself_is_replaced():
    with penstock.patch() as patched:
        assert {"safetensors.safe_open", "safetensors.torch.safe_open"} <= set(patched.places)
        for name in ("load_file", "load_model", "save", "save_file", "save_model"):
            assert f"safetensors.torch.{name}" in patched.places
        places = [module for module, (_, values) in held().items() if id(THEIRS) in values]
        assert not [module for module in places if module.startswith("safetensors")]


def test_a_module_that_is_imported_meanwhile_has_penstocks_until_the_end(module):
    with penstock.patch():
        late = module("anybodys", safe_open=safetensors.safe_open, load_file=safetensors_torch.load_file)
        assert issubclass(late.safe_open, penstock.safe_open)
    assert (late.safe_open, late.load_file) == (THEIRS, safetensors_torch.load_file)


def test_a_module_that_is_gone_from_sys_modules_gets_its_names_back():
    made = sys.modules["peft.made_up"] = ModuleType("peft.made_up")
    made.safe_open = THEIRS
    with penstock.patch():
        assert made.safe_open is not THEIRS
        del sys.modules["peft.made_up"]
    assert made.safe_open is THEIRS


def test_what_somebody_else_has_put_there_meanwhile_stays(module):
    made = module("accelerate.made_up", safe_open=THEIRS)
    with penstock.patch():
        made.safe_open = sentinel = object()
    assert made.safe_open is sentinel


def test_somebodys_wrapper_around_the_patched_class_survives_a_second_patch(module, one):
    with penstock.patch():
        ours = safetensors.safe_open

        def wrapper(*args: Any, **kwargs: Any) -> Any:
            return ours(*args, **kwargs)

        safetensors.safe_open = wrapper
    try:
        for _ in range(2):
            assert type(safetensors.safe_open(one, "pt", device="mps")) is THEIRS
            with penstock.patch():
                assert type(safetensors.safe_open(one, "pt", device="mps")) is THEIRS
                assert isinstance(safetensors.safe_open(one, "pt"), penstock.safe_open)
    finally:
        safetensors.safe_open = THEIRS


class Touchy(ModuleType):
    """A module that does not like to be asked for attributes."""

    def __getattr__(self, name: str) -> Any:
        raise AssertionError(f"{name} was asked for")

    def __setattr__(self, name: str, value: Any) -> None:
        raise AssertionError(f"{name} was set")


@pytest.mark.parametrize("name", ["transformers.core_model_loading", "safetensors.flax", "diffusers.made_up"])
def test_a_module_that_somebody_keeps_from_being_imported_is_no_obstacle(monkeypatch, name):
    monkeypatch.setitem(sys.modules, name, None)
    with penstock.patch() as patched:
        assert "safetensors.safe_open" in patched.places


def test_lazy_modules_stay_asleep(module, tmp_path):
    touchy = module("transformers.touchy", Touchy, safe_open=THEIRS)
    (tmp_path / "slow.py").write_text("raise AssertionError('woken')")
    spec = importlib.util.spec_from_file_location("diffusers.slow", tmp_path / "slow.py")
    assert spec is not None and spec.loader is not None
    lazy = importlib.util.module_from_spec(spec)
    importlib.util.LazyLoader(spec.loader).exec_module(lazy)
    sys.modules["diffusers.slow"] = lazy
    try:
        with penstock.patch():
            assert touchy.safe_open is not THEIRS
        assert touchy.safe_open is THEIRS
    finally:
        del sys.modules["diffusers.slow"]


def test_modules_of_safetensors_that_are_imported_later_are_replaced_too(python, one):
    code = """
import sys, penstock, safetensors
patched = penstock.patch()
assert "safetensors.numpy" not in sys.modules
import safetensors.numpy as late
assert "safetensors.numpy.save_file" in patched.places and "safetensors.numpy.load_file" in patched.places
assert type(late.__loader__).__module__ == type(late.__spec__.loader).__module__ == "_frozen_importlib_external"
opened = late.safe_open(sys.argv[1], framework="np")
assert isinstance(opened, penstock.safe_open), opened
patched.undo()
for name in ("load_file", "save_file"):
    assert not hasattr(getattr(late, name), "__wrapped__"), name
import safetensors._safetensors_rust as rust
assert late.safe_open is safetensors.safe_open is rust.safe_open and not issubclass(rust.safe_open, penstock.safe_open)
import importlib
importlib.reload(late)
assert not hasattr(late.save_file, "__wrapped__")
print("well")
"""
    run = python(code, one)
    assert run.stdout == "well\n", run.stderr


# Nesting, threads, errors


def test_patches_nest_and_end_with_the_last_one():
    outer, inner = penstock.patch(), penstock.patch()
    assert safetensors.safe_open is not THEIRS
    outer.undo()
    outer.undo()
    assert safetensors.safe_open is not THEIRS
    assert outer.places == []
    assert "safetensors.safe_open" in inner.places
    inner.undo()
    assert safetensors.safe_open is THEIRS


def test_an_error_in_the_block_ends_it_too():
    with pytest.raises(ZeroDivisionError), penstock.patch():
        raise ZeroDivisionError
    assert safetensors.safe_open is THEIRS


def test_a_patch_that_nobody_keeps_stays(module):
    patched = penstock.patch()
    penstock.patch()
    gc.collect()
    patched.undo()
    assert safetensors.safe_open is not THEIRS
    [kept] = penstock._patch._routing.patches
    kept.undo()
    assert safetensors.safe_open is THEIRS


def test_threads_may_patch_undo_and_load_at_once(module, one):
    made = module("accelerate.made_up", safe_open=THEIRS, load_file=safetensors_torch.load_file)
    expected = Oracle(one)
    errors: list[BaseException] = []

    def patching() -> None:
        try:
            for _ in range(40):
                with penstock.patch():
                    assert made.safe_open is not THEIRS
        except BaseException as error:
            errors.append(error)

    def loading() -> None:
        try:
            for _ in range(40):
                with made.safe_open(one, framework="pt") as file:
                    assert raw(file.get_tensor("a")) == expected["a"]
                assert raw(made.load_file(one)["b"]) == expected["b"]
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=target) for target in (patching, loading, patching, loading)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors
    assert made.safe_open is THEIRS


def test_without_safetensors_there_is_nothing_to_patch(python):
    code = """
import sys
sys.modules["safetensors"] = None
import penstock
try:
    penstock.patch()
except penstock.UnsupportedError as error:
    print(error)
"""
    run = python(code)
    assert "safetensors is not installed" in run.stdout, run.stderr


# Who does the work


def test_files_are_opened_and_loaded_by_penstock(one, loaded):
    expected = Oracle(one)
    with penstock.patch():
        with safetensors.safe_open(filename=one, framework="pt", device="cpu", backend="mmap") as file:
            assert isinstance(file, penstock.safe_open)
            assert file.metadata() == {"k": "v"}
            assert raw(file.get_slice("a")[1:3]) == expected["a"][32:96]
        file = safetensors.safe_open(one, "pt")
        assert raw(file.get_tensor("b")) == expected["b"]
        file.__exit__(None, None, None)
        with pytest.raises(safetensors.SafetensorError, match="File is closed"):
            file.keys()
        expected.same(safetensors_torch.load_file(one, device="cpu"))
    assert loaded == ["a", "b", "a", "b"]


@pytest.mark.parametrize("device", ["mps", "xpu:0", "npu"])
def test_other_devices_are_left_to_safetensors(one, loaded, device):
    with penstock.patch():
        file = safetensors.safe_open(one, framework="pt", device=device)
        assert type(file) is THEIRS
        assert file.keys() == ["a", "b"]
        with pytest.raises(Exception, match=r"."):
            safetensors_torch.load_file(one, device=device)
    assert loaded == []


def test_a_number_is_left_to_safetensors_where_torch_is_built_for_another_accelerator(one, monkeypatch):
    with penstock.patch():
        assert isinstance(safetensors.safe_open(one, "pt", device=0), penstock.safe_open)
        monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda: torch.device("xpu"))
        assert type(safetensors.safe_open(one, "pt", device=0)) is THEIRS


@pytest.mark.parametrize(
    "arguments",
    [
        {"framework": "nonsense"},
        {"framework": "pt", "device": "nonsense"},
        {"framework": "pt", "backend": "nonsense"},
        {"framework": "np", "device": "cuda"},
        {"framework": "pt", "nonsense": 1},
    ],
    ids=str,
)
def test_what_makes_no_sense_is_refused_in_the_words_of_safetensors(one, arguments):
    with pytest.raises((safetensors.SafetensorError, TypeError)) as theirs:
        THEIRS(one, **arguments)
    with penstock.patch(), pytest.raises(type(theirs.value)) as ours:
        safetensors.safe_open(one, **arguments)
    assert type(ours.value) is type(theirs.value)
    assert str(ours.value) == str(theirs.value)


@pytest.mark.parametrize("arguments", [(), ("x",), ("x", "cpu", "mmap")], ids=str)
def test_arguments_that_are_missing_or_too_many_are_a_type_error(arguments):
    with penstock.patch():
        with pytest.raises(TypeError):
            safetensors.safe_open(*arguments, *arguments[2:])
        if len(arguments) != 1:
            with pytest.raises(TypeError):
                safetensors_torch.load_file(*arguments)


def test_errors_stay_safetensors_and_file_not_found(tmp_path, one):
    (tmp_path / "bad.safetensors").write_bytes(b"\x08\0\0\0\0\0\0\0{nothing")
    with penstock.patch():
        for load in (safetensors_torch.load_file, lambda path: safetensors.safe_open(path, "pt")):
            with pytest.raises(FileNotFoundError):
                load(tmp_path / "none.safetensors")
            with pytest.raises(safetensors.SafetensorError):
                load(tmp_path / "bad.safetensors")
        with pytest.raises(safetensors.SafetensorError, match="File does not contain tensor c"):
            safetensors.safe_open(one, "pt").get_tensor("c")


def test_the_class_still_tells_an_open_file(one):
    before = THEIRS(one, "pt")
    with penstock.patch():
        kind = safetensors.safe_open
        assert isinstance(kind, type)
        assert isinstance(kind(one, "pt"), kind)
        assert isinstance(kind(one, "pt", device="mps"), kind)
        assert isinstance(before, kind)
        assert not isinstance(one, kind)
        assert {name for name in dir(THEIRS) if not name.startswith("_")} <= set(dir(kind))
        assert list(inspect.signature(kind).parameters)[:4] == list(inspect.signature(THEIRS).parameters)


def test_functions_keep_their_name_and_signature():
    load_file = safetensors_torch.load_file
    with penstock.patch():
        assert safetensors_torch.load_file is not load_file
        assert safetensors_torch.load_file.__doc__ == load_file.__doc__
        assert inspect.signature(safetensors_torch.load_file) == inspect.signature(load_file)


def test_what_somebody_has_kept_of_it_is_safetensors_again_afterwards(one, loaded):
    with penstock.patch():
        kept = safetensors.safe_open, safetensors_torch.load_file
        file = safetensors.safe_open(one, "pt")
        part = file.get_slice("a")
    assert type(kept[0](one, "pt")) is THEIRS
    Oracle(one).same(dict(sorted(kept[1](one).items())))
    assert loaded == []
    assert raw(file.get_tensor("b")) == Oracle(one)["b"]  # what was opened meanwhile goes on
    assert raw(part[:1]) == Oracle(one)["a"][:32]
    assert loaded == ["b", "a"]


# What safetensors takes, and nothing else


@pytest.fixture
def around(one, tmp_path, monkeypatch) -> Path:
    """A folder with what penstock opens and safetensors does not: a folder, an index, a cached repository."""
    (tmp_path / "folder").mkdir()
    shutil.copy(one, tmp_path / "folder" / "model.safetensors")
    index = {"weight_map": {"a": one.name, "b": one.name}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    (tmp_path / "cut.safetensors").write_bytes(one.read_bytes()[:-1])
    (tmp_path / "bad.safetensors").write_bytes(b"\x08\0\0\0\0\0\0\0{nothing")
    (tmp_path / "pointer").write_text("version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 1\n")
    (tmp_path / "empty").touch()
    (tmp_path / "dangling").symlink_to("nowhere")
    commit = "0123456789abcdef0123456789abcdef01234567"
    storage = tmp_path / "hub" / "models--org--name"
    (storage / "snapshots" / commit).mkdir(parents=True)
    shutil.copy(one, storage / "snapshots" / commit / "model.safetensors")
    (storage / "refs").mkdir()
    (storage / "refs" / "main").write_text(commit)
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.chdir(tmp_path)
    return tmp_path


class AsBytes:
    def __fspath__(self) -> bytes:
        return b"model.safetensors"


#: No file of the format each, though penstock itself opens some of them.
NO_FILES: dict[str, Any] = {
    "a cached repository": "org/name",
    "a revision": "org/name@main",
    "a folder": "folder",
    "a folder with a slash": "folder/",
    "the path of a folder": Path("folder"),
    "an index": "model.safetensors.index.json",
    "a list": ["model.safetensors"],
    "a tuple": ("model.safetensors",),
    "no files": [],
    "a mapping": {"model.safetensors": 1},
    "bytes": b"model.safetensors",
    "a path of bytes": AsBytes(),
    "nothing": None,
    "a number": 3,
    "an empty name": "",
    "a missing file": "none.safetensors",
    "a missing bare name": "none",
    "a dangling link": "dangling",
    "a file with a slash": "model.safetensors/",
    "a path through a file": "model.safetensors/x",
    "a name with a zero": "a\0b",
    "a long name": "x" * 300,
    "half a file": "cut.safetensors",
    "a malformed header": "bad.safetensors",
    "a pointer of Git LFS": "pointer",
    "an empty file": "empty",
    "a device": "/dev/null",
}


def calls() -> dict[str, Callable[[Any], Any]]:
    """Every function that the patch replaces and that opens a file, in every framework that is installed."""
    model = torch.nn.Module()
    model.register_buffer("a", torch.zeros(6, 8))
    model.register_buffer("b", torch.zeros(10, dtype=torch.bfloat16))
    found: dict[str, Callable[[Any], Any]] = {
        "load_model": lambda path: safetensors_torch.load_model(model, path),
        "torch.load_file": lambda path: safetensors_torch.load_file(path),
    }
    for name, module in (("pt", "torch"), ("np", "numpy"), ("jax", "jax"), ("flax", "jax")):
        if importlib.util.find_spec(module):
            found[f"safe_open {name}"] = lambda path, name=name: safetensors.safe_open(path, name).keys()
    for name, module in (("numpy", "numpy"), ("flax", "jax")):
        if importlib.util.find_spec(module):
            ours = importlib.import_module(f"safetensors.{name}")
            found[f"{name}.load_file"] = lambda path, ours=ours: ours.load_file(path)
    return found


@pytest.mark.sampled(9)
@pytest.mark.parametrize("what", NO_FILES)
def test_what_safetensors_does_not_open_is_refused_in_its_words(around, loaded, what):
    for call, open_it in calls().items():
        with pytest.raises(Exception, match=r".") as theirs:
            open_it(NO_FILES[what])
        with penstock.patch(), pytest.raises(type(theirs.value)) as ours:
            open_it(NO_FILES[what])
        assert type(ours.value) is type(theirs.value), call
        assert str(ours.value) == str(theirs.value), call
        assert ours.value.args == theirs.value.args, call
    assert loaded == []


def test_every_path_that_safetensors_opens_is_opened_by_penstock(around, loaded):
    (around / "link").symlink_to("model.safetensors")

    class AsText:
        def __fspath__(self) -> str:
            return "model.safetensors"

    for path in ("model.safetensors", "./model.safetensors", around / "model.safetensors", "link", AsText()):
        for call, open_it in calls().items():
            if call == "numpy.load_file":  # it has no BF16
                continue
            with penstock.patch():
                open_it(path)
            assert call.startswith("safe_open") or loaded, call
            del loaded[:]


def test_the_cause_of_a_refusal_is_what_penstock_has_to_say(around):
    with penstock.patch(), pytest.raises(safetensors.SafetensorError) as caught:
        safetensors_torch.load_file("pointer")
    assert type(caught.value) is safetensors.SafetensorError
    assert isinstance(caught.value.__cause__, penstock.NotACheckpointError)
    assert "git lfs pull" in str(caught.value.__cause__)


def test_a_file_that_safetensors_alone_opens_is_opened_by_it(tmp_path, loaded):
    # The same name twice: to penstock an error, to safetensors the last one counts
    header = (
        b'{"a":{"dtype":"U8","shape":[1],"data_offsets":[0,1]},"a":{"dtype":"U8","shape":[1],"data_offsets":[0,1]}}'
    )
    (tmp_path / "twice").write_bytes(len(header).to_bytes(8, "little") + header + b"\7")
    theirs = safetensors_torch.load_file(tmp_path / "twice")
    with pytest.raises(penstock.HeaderError):
        penstock.open(tmp_path / "twice")
    with penstock.patch():
        assert type(safetensors.safe_open(tmp_path / "twice", "pt")) is THEIRS
        assert torch.equal(safetensors_torch.load_file(tmp_path / "twice")["a"], theirs["a"])
    assert loaded == []


def test_a_scheme_is_a_file_that_is_not_found_as_there(around, loaded):
    for call, open_it in calls().items():
        with pytest.raises(FileNotFoundError):
            open_it("hf://org/name")
        with penstock.patch(), pytest.raises(FileNotFoundError, match="hf://"):
            open_it("hf://org/name")
        assert loaded == [], call


def test_a_fifo_is_refused_and_not_waited_for(tmp_path):
    os.mkfifo(tmp_path / "fifo")  # safetensors would wait for somebody who writes to it
    with penstock.patch():
        for call, open_it in calls().items():
            with pytest.raises(penstock.NotACheckpointError, match="FIFO"):
                open_it(tmp_path / "fifo")
            assert call


@pytest.mark.parametrize("error", [penstock.StalledError, penstock.ReadError, penstock.LimitError])
def test_what_the_machine_refuses_is_not_tried_again_by_safetensors(one, monkeypatch, error):
    def failing(*_: Any, **__: Any) -> Any:
        raise error("made up", path=str(one))

    with penstock.patch():
        monkeypatch.setattr(penstock._checkpoint, "_core", SimpleNamespace(Checkpoint=SimpleNamespace(open=failing)))
        for open_it in calls().values():
            with pytest.raises(error, match="made up"):
                open_it(one)


@pytest.mark.parametrize(
    "device", ["cpu:0", "cpu:1", torch.device("cpu"), torch.device("cuda"), "rocm:0", "gpu:0", "meta", "CPU", b"cpu"],
    ids=repr,
)  # fmt: skip
@pytest.mark.parametrize("framework", ["pt", "np", "jax"])
def test_devices_that_penstock_alone_understands_are_refused_in_the_words_of_safetensors(one, framework, device):
    with pytest.raises(safetensors.SafetensorError) as theirs:
        THEIRS(one, framework, device).get_tensor("a")
    with penstock.patch(), pytest.raises(safetensors.SafetensorError) as ours:
        safetensors.safe_open(one, framework, device).get_tensor("a")
    assert (type(ours.value), str(ours.value)) == (type(theirs.value), str(theirs.value))
    if framework == "pt":
        with penstock.patch(), pytest.raises(safetensors.SafetensorError) as loading:
            safetensors_torch.load_file(one, device)
        assert (type(loading.value), str(loading.value)) == (type(theirs.value), str(theirs.value))


def test_no_backend_is_a_type_error_as_there(one):
    for call in (
        lambda: safetensors.safe_open(one, "pt", backend=None),
        lambda: safetensors_torch.load_file(one, backend=None),
    ):
        with pytest.raises(TypeError) as theirs:
            call()
        with penstock.patch(), pytest.raises(TypeError) as ours:
            call()
        assert (type(ours.value), str(ours.value)) == (type(theirs.value), str(theirs.value))


def test_a_dtype_that_the_framework_lacks_is_refused_in_the_words_of_safetensors(write):
    path = write(Tensor("a", "F6_E2M3", (8,)))
    for call, open_it in calls().items():
        if "load_file" in call:
            with pytest.raises(Exception, match=r".") as theirs:
                open_it(path)
            with penstock.patch(), pytest.raises(type(theirs.value)) as ours:
                open_it(path)
            assert (type(ours.value), str(ours.value)) == (type(theirs.value), str(theirs.value)), call


@pytest.mark.parametrize("path", [b"x", None, 3, ["x"], AsBytes(), "x/", "x/."], ids=text)
def test_where_safetensors_does_not_save_nothing_is_saved(tmp_path, monkeypatch, path):
    monkeypatch.chdir(tmp_path)
    model = torch.nn.Linear(2, 2)
    numpy = importlib.import_module("safetensors.numpy")
    for call in (
        lambda: safetensors_torch.save_file({"a": torch.ones(2)}, path),
        lambda: numpy.save_file({"a": torch.ones(2).numpy()}, path),
        lambda: safetensors_torch.save_model(model, path),
    ):
        with pytest.raises((safetensors.SafetensorError, TypeError)) as theirs:
            call()
        with penstock.patch(), pytest.raises(type(theirs.value)) as ours:
            call()
        assert (type(ours.value), str(ours.value)) == (type(theirs.value), str(theirs.value))
    assert list(tmp_path.iterdir()) == []


# Models and saving


def test_models_are_loaded_by_penstock_tied_tensors_included(tmp_path, loaded):
    def made() -> torch.nn.Module:
        model = torch.nn.ModuleDict({"a": torch.nn.Linear(8, 8), "b": torch.nn.Linear(8, 8)})
        model["b"].weight = model["a"].weight
        return model

    model, path = made(), str(tmp_path / "model.safetensors")
    safetensors_torch.save_model(model, path)
    other = made()
    with penstock.patch():
        missing, unexpected = safetensors_torch.load_model(other, path)
    assert not missing
    assert not unexpected
    assert sorted(loaded) == ["a.bias", "a.weight", "b.bias"]
    assert all(torch.equal(one, two) for one, two in zip(model.parameters(), other.parameters(), strict=True))


class Wrapped(torch.Tensor):
    """Not torch's own kind of tensor."""


SPECIAL = {
    "subclass": lambda: torch.ones(3).as_subclass(Wrapped),
    "meta": lambda: torch.ones(3, device="meta"),
    "conjugate": lambda: torch.ones(3, dtype=torch.complex64).conj(),
    "negative": lambda: torch.ones(3, dtype=torch.complex64).conj().imag,
    "sparse": lambda: torch.ones(3).to_sparse(),
    "number": lambda: 3,
}


@pytest.fixture
def saved(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What penstock has written since: the names of files, and "bytes" for content that was returned."""
    done: list[str] = []
    write, to_bytes = penstock._save._write, penstock._save.to_bytes

    def written(request: Any, *more: Any) -> Any:
        result = write(request, *more)
        done.append(request.name)
        return result

    def returned(*args: Any, **kwargs: Any) -> bytes:
        done.append("bytes")
        return to_bytes(*args, **kwargs)

    monkeypatch.setattr(penstock._save, "_write", written)
    monkeypatch.setattr(penstock._save, "to_bytes", returned)
    return done


@pytest.mark.parametrize("kind", SPECIAL)
def test_what_is_no_plain_tensor_is_left_to_safetensors(tmp_path, saved, kind):
    def outcome() -> Any:
        path = tmp_path / "a.safetensors"
        path.unlink(missing_ok=True)
        try:
            safetensors_torch.save_file({"a": SPECIAL[kind]()}, path)
        except Exception as error:
            return type(error), str(error)
        return path.read_bytes()

    theirs = outcome()
    with penstock.patch():
        assert outcome() == theirs
    assert saved == []


#: Sizes and dtypes that safetensors puts into another order than the one given.
TENSORS: dict[str, Callable[[], torch.Tensor]] = {
    "w": lambda: torch.arange(231.0).reshape(33, 7),
    "b": lambda: torch.arange(5),
    "half": lambda: torch.ones(3, dtype=torch.bfloat16),
    "scalar": lambda: torch.tensor(True),
    "empty": lambda: torch.empty(0, 4, dtype=torch.float16),
    "a": lambda: torch.arange(13, dtype=torch.uint8),
}
METADATA = {"none": None, "one": {"k": "v"}}


def tied() -> torch.nn.Module:
    """A module with a tied tensor, and one that is not contiguous."""
    model = torch.nn.ModuleDict({"b": torch.nn.Linear(8, 8), "a": torch.nn.Linear(8, 8)})
    model["b"].weight = model["a"].weight
    model["c"] = torch.nn.Linear(8, 4, bias=False)
    model["c"].weight = torch.nn.Parameter(torch.arange(32.0).reshape(8, 4).T)
    return model


def arrays() -> dict[str, Any]:
    """The tensors as arrays of numpy."""
    return {name: make().float().numpy() if name == "half" else make().numpy() for name, make in TENSORS.items()}


@pytest.mark.parametrize("metadata", METADATA.values(), ids=METADATA)
def test_what_is_saved_is_byte_for_byte_what_safetensors_writes(tmp_path, saved, metadata):
    torch.manual_seed(0)
    numpy, tensors, model = importlib.import_module("safetensors.numpy"), {n: t() for n, t in TENSORS.items()}, tied()

    def outcome() -> list[Any]:
        paths = [tmp_path / name for name in ("torch", "numpy", "model")]
        assert safetensors_torch.save_file(tensors, paths[0], metadata) is None
        assert numpy.save_file(arrays(), str(paths[1]), metadata=metadata) is None
        # The name of the tied tensor is a key of the metadata too, and of two the order is not determined
        assert safetensors_torch.save_model(model, str(paths[2])) is None
        files = [path.read_bytes() for path in paths]
        return [*files, safetensors_torch.save(tensors, metadata=metadata), numpy.save(arrays(), metadata)]

    theirs = outcome()
    assert saved == []
    with penstock.patch():
        ours = outcome()
    assert saved == ["torch", "numpy", "model", "bytes", "bytes"]
    assert ours == theirs
    assert list(model.state_dict()) == ["b.weight", "b.bias", "a.weight", "a.bias", "c.weight"]


def test_arrays_of_jax_are_saved_byte_for_byte_as_safetensors_writes_them(tmp_path, saved):
    jax = pytest.importorskip("jax")
    flax = importlib.import_module("safetensors.flax")

    def outcome() -> tuple[bytes, bytes]:
        tensors = {"w": jax.numpy.arange(21.0).reshape(3, 7), "h": jax.numpy.ones(5, dtype="bfloat16")}
        flax.save_file(tensors, tmp_path / "a.safetensors", {"k": "v"})
        return (tmp_path / "a.safetensors").read_bytes(), flax.save(dict(tensors))

    theirs = outcome()
    with penstock.patch():
        assert outcome() == theirs
    assert saved == ["a.safetensors", "bytes"]


REFUSED: dict[str, Callable[[Path], Any]] = {
    "shared": lambda path: safetensors_torch.save_file(dict.fromkeys("ab", torch.ones(4)), path),
    "not contiguous": lambda path: safetensors_torch.save_file({"a": torch.ones(4, 4).T}, path),
    "bytes of what is shared": lambda path: safetensors_torch.save(dict.fromkeys("ab", torch.ones(4))),
    "not packed": lambda path: safetensors_torch.save_model(tied(), str(path), force_contiguous=False),
    "no dict": lambda path: safetensors_torch.save_file([("a", torch.ones(4))], path),
    "dtype": lambda path: safetensors_torch.save_file({"a": torch.ones(4, dtype=torch.complex128)}, path),
    "metadata": lambda path: safetensors_torch.save_file({"a": torch.ones(4)}, path, {"a": 1}),
    "no folder": lambda path: safetensors_torch.save_file({"a": torch.ones(4)}, path / "b" / "c"),
    "arguments": lambda path: safetensors_torch.save_file({"a": torch.ones(4)}),
    "no model": lambda path: safetensors_torch.save_model(3, str(path)),
    "a model that is none": lambda path: safetensors_torch.save_model(torch.nn.Linear, str(path)),
}


@pytest.mark.parametrize("what", REFUSED)
def test_what_safetensors_refuses_to_save_is_refused_while_patched(tmp_path, what):
    path = tmp_path / "a.safetensors"
    with pytest.raises(Exception, match=r".") as theirs:
        REFUSED[what](path)
    with penstock.patch(), pytest.raises(type(theirs.value)) as ours:
        REFUSED[what](path)
    if what != "no folder":  # an error of the file system is penstock's, and safetensors' only in kind
        assert type(ours.value) is type(theirs.value)
        if "shared" not in what:  # the names come in any order there
            assert str(ours.value) == str(theirs.value)
    assert not path.exists()


def test_a_models_state_is_asked_for_once(tmp_path, saved):
    class Asked(torch.nn.Linear):
        times = 0

        def state_dict(self, *args: Any, **kwargs: Any) -> Any:
            self.times += 1
            return super().state_dict(*args, **kwargs)

    model = Asked(3, 5)
    with penstock.patch():
        safetensors_torch.save_model(model, str(tmp_path / "model"))
    assert saved == ["model"]
    assert model.times == 1


def test_a_function_that_somebody_has_kept_saves_with_safetensors_afterwards(tmp_path, saved):
    with penstock.patch():
        kept = safetensors_torch.save_file
        kept({"a": torch.ones(4)}, tmp_path / "a")
    kept({"a": torch.ones(4)}, tmp_path / "b")
    assert saved == ["a"]
    assert (tmp_path / "a").read_bytes() == (tmp_path / "b").read_bytes()


# What it costs


@pytest.mark.machine
def test_it_takes_less_than_a_twentieth_of_a_second(module):
    # More modules than a program with many models of transformers has
    for number in range(2000):
        theirs = {"safe_open": THEIRS} if number % 100 == 0 else {}
        module(f"transformers.made_up.m{number}", **{f"name{i}": object() for i in range(60)}, **theirs)
    taken = []
    for _ in range(5):
        begun = time.perf_counter()
        with penstock.patch() as patched:
            taken.append(time.perf_counter() - begun)
            assert len(patched.places) >= 20
    assert min(taken) < 0.05


def test_a_patch_that_ctrl_c_interrupts_is_undone(monkeypatch: pytest.MonkeyPatch):
    import safetensors

    def interrupted(*_: Any) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(penstock._patch._routing, "_replace", interrupted)
        with pytest.raises(KeyboardInterrupt):
            penstock.patch()
    assert not penstock._patch._routing.patches
    assert safetensors.safe_open is THEIRS
