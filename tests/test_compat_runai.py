"""Programs written for the Run:ai model streamer, on `penstock.compat.runai_model_streamer`, from files.

Where the original is installed, programs run on it as well. Those that load from buckets are in
`tests/servers/test_runai.py`, and what its own repository has of programs `make runai-examples` runs.
"""

from __future__ import annotations

import fcntl
import gc
import importlib
import importlib.util
import json
import os
import pickle
import random
import struct
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import fakegpu
import ordeal
import penstock
import pytest
import torch
from conftest import Oracle, raw
from fakegpu import fresh, torch_on
from penstock import _core
from penstock.compat import _errors, _runai_buckets, _runai_settings
from penstock.compat import runai_model_streamer as face
from penstock.compat.runai_model_streamer import FileChunks, FileStreamer, ObjectStorageModel, SafetensorsStreamer
from penstock.synthetic.synth import Tensor

MIB = 1 << 20
FILES = ["model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"]
#: Dtypes of the original, with shapes that misalign those after them.
KINDS = ["F64", "F32", "F16", "BF16", "I64", "I32", "I16", "I8", "U8", "BOOL", "F8_E4M3", "F8_E5M2", "F8_E8M0", "U16"]

Write = Callable[..., Path]


@pytest.fixture(autouse=True)
def no_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in os.environ if name.startswith(("RUNAI_", "AWS_", "GOOGLE_", "CLOUD_STORAGE_"))]:
        monkeypatch.delenv(name)
    monkeypatch.setattr(_runai_settings, "_warned", set())


@pytest.fixture(params=["penstock", "runai"])
def module(request: pytest.FixtureRequest) -> ModuleType:
    """The face, and the original where it is installed."""
    if request.param == "penstock":
        return face
    if importlib.util.find_spec("runai_model_streamer") is None:
        pytest.skip("the Run:ai model streamer is not installed")
    return importlib.import_module("runai_model_streamer")


@pytest.fixture
def files(write: Write, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[str]:
    """Two files in the current directory, by the names that they have there."""
    monkeypatch.chdir(tmp_path)
    first = [Tensor(f"first.{kind}", kind, (3, number + 1)) for number, kind in enumerate(KINDS)]
    second = [
        Tensor("second.scalar", "I64", ()),
        Tensor("second.none", "F32", (0, 4)),
        Tensor("second.w", "F32", (70, 9)),
    ]
    write(*first, name=FILES[0])
    write(*second, name=FILES[1], seed=1)
    return FILES


@pytest.fixture
def held(write: Write) -> Path:
    """24 tensors of 400,000 bytes."""
    return write(*(Tensor(f"layers.{i}.weight", "F32", (1000, 100)) for i in range(24)))


def same(files: list[Any], found: dict[str, torch.Tensor], names: list[str] | None = None) -> None:
    """Asserts that these tensors, all of the files' or those named, have come: in any order, as files may be read."""
    oracle = Oracle([Path(file) for file in files])
    assert sorted(found) == sorted(oracle.entries if names is None else names)
    for name, tensor in found.items():
        assert (raw(tensor), tuple(tensor.shape)) == (oracle[name], oracle.shape(name)), name


def streamed(module: ModuleType, files: list[str], **how: Any) -> dict[str, torch.Tensor]:
    with module.SafetensorsStreamer() as streamer:
        streamer.stream_files(files, **how)
        return dict(streamer.get_tensors())


# Programs


def test_tensors_of_several_files_with_their_dtypes_and_shapes(module, files):
    with module.SafetensorsStreamer() as streamer:
        streamer.stream_files(files)
        found = {}
        for name, tensor in streamer.get_tensors():
            assert tensor.data_ptr() % tensor.element_size() == 0 and tensor.is_contiguous()
            found[name] = tensor
    same(files, found)


def test_tensors_that_are_kept_stay_what_they_were(module, held, monkeypatch):
    """Beyond the next one, the context and the streamer, with memory for two of them."""
    monkeypatch.setenv("RUNAI_STREAMER_MEMORY_LIMIT", "1000000")
    kept = streamed(module, [str(held)])
    gc.collect()
    same([held], kept)
    first, *others = kept.values()
    first.fill_(7)
    assert all(float(tensor.flatten()[0]) != 7 for tensor in others)


def test_one_file_and_the_cpu_in_every_spelling(module, files):
    for device in ("cpu", None, torch.device("cpu")):
        with module.SafetensorsStreamer() as streamer:
            streamer.stream_file(files[1], None, device, False)
            same(files[1:], dict(streamer.get_tensors()))


def test_one_stream_after_the_other_in_one_context(module, files):
    with module.SafetensorsStreamer() as streamer:
        for file in (*files, files[0]):
            streamer.stream_file(file)
            same([file], dict(streamer.get_tensors()))
            assert list(streamer.get_tensors()) == [], "each tensor comes once"
        streamer.stream_files([])
        assert list(streamer.get_tensors()) == []


def test_a_stream_in_the_middle_of_another_is_refused_and_after_it_is_given_up_works(module, held, files):
    with module.SafetensorsStreamer() as streamer:
        streamer.stream_file(str(held))
        tensors = streamer.get_tensors()
        next(tensors)
        with pytest.raises(ValueError):
            streamer.stream_files(files)
        tensors.close()
        streamer.stream_files(files)
        assert len(dict(streamer.get_tensors())) == len(KINDS) + 3


def test_chosen_names_alone_are_there(module, files):
    names = ["second.w", "first.I8", "second.scalar"]
    with module.SafetensorsStreamer() as streamer:
        streamer.stream_files(files, tensor_names=names)
        assert streamer.total_size == 3 * 8 + 8 + 70 * 9 * 4
        metadata = streamer.files_to_tensors_metadata
        assert {file: [one.name for one in listed] for file, listed in metadata.items()} == {
            0: ["first.I8"],
            1: ["second.scalar", "second.w"],
        }
        found = dict(streamer.get_tensors())
    same(files, found, names)
    for wrong in ("first.I8", [], ["first.I8", "third"]):
        with module.SafetensorsStreamer() as streamer, pytest.raises(ValueError):
            streamer.stream_files(files, tensor_names=wrong)


def test_metadata_of_every_tensor_by_the_number_of_its_file(module, files):
    with module.SafetensorsStreamer() as streamer:
        streamer.stream_files(files[::-1])
        metadata = streamer.files_to_tensors_metadata
        assert sum(len(listed) for listed in metadata.values()) == len(KINDS) + 3
        found = dict(streamer.get_tensors())
    assert {one.name.split(".")[0] for one in metadata[0]} == {"second"}
    assert streamer.total_size == sum(tensor.nbytes for tensor in found.values())
    for file, listed in metadata.items():
        data = Path(files[1 - file]).read_bytes()
        start = 8 + struct.unpack("<Q", data[:8])[0]
        for one in listed:
            tensor = found[one.name]
            assert one.get_torch_dtype() == tensor.dtype and one.get_storage_shape() == list(tensor.shape) == one.shape
            assert one.get_bytesize() == tensor.nbytes and one.get_item_count() == tensor.numel()
            assert one.get_element_size() == tensor.element_size()
            assert data[start + one.offsets.start : start + one.offsets.end] == raw(tensor)


def test_f4_is_pairs(module, write):
    if not hasattr(torch, "float4_e2m1fn_x2"):
        pytest.skip("this torch has no F4")
    path = write(Tensor("a", "F4", (6, 8)), Tensor("b", "U8", (5,)))
    with module.SafetensorsStreamer() as streamer:
        streamer.stream_file(str(path))
        [one] = [one for one in streamer.files_to_tensors_metadata[0] if one.name == "a"]
        assert (one.shape, one.get_storage_shape(), one.get_element_size()) == ([6, 8], [6, 4], 1)
        found = dict(streamer.get_tensors())
    assert (found["a"].dtype, tuple(found["a"].shape)) == (torch.float4_e2m1fn_x2, (6, 4))
    assert found["a"].view(torch.uint8).numpy().tobytes() == Oracle(path)["a"]


def damaged(header: object, data: bytes, length: int | None = None) -> bytes:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(text) if length is None else length) + text + data


ONE = {"dtype": "U8", "shape": [10], "data_offsets": [0, 10]}
DAMAGE = {
    "empty": b"",
    "cut in the header": damaged({"a": ONE}, b"")[:30],
    "cut in the data": damaged({"a": ONE}, b"x" * 9),
    "more than the header says": damaged({"a": ONE}, b"x" * 11),
    "a header of 101 MiB": damaged(b"{}", b"", (100 << 20) + 1),
    "no JSON": damaged(b'{"a": {"dtype": ', b"x" * 10),
    "no UTF-8": damaged(b'{"\xff": 1}', b""),
    "shape and offsets": damaged({"a": {"dtype": "F32", "shape": [10], "data_offsets": [0, 4]}}, b"x" * 4),
    "overlap": damaged({"a": ONE, "b": {**ONE, "data_offsets": [5, 15]}}, b"x" * 15),
    "a hole": damaged({"a": ONE, "b": {**ONE, "data_offsets": [20, 30]}}, b"x" * 30),
    "an unknown dtype": damaged({"a": {**ONE, "dtype": "ALIEN"}}, b"x" * 10),
    "a dtype that torch lacks": damaged({"a": {"dtype": "F6_E2M3", "shape": [4], "data_offsets": [0, 3]}}, b"xyz"),
}


@pytest.mark.parametrize("what", DAMAGE)
def test_damage_is_a_value_error(module, tmp_path, what):
    path = tmp_path / "x.safetensors"
    path.write_bytes(DAMAGE[what])
    with module.SafetensorsStreamer() as streamer, pytest.raises(ValueError):
        streamer.stream_file(str(path))
        list(streamer.get_tensors())


def test_a_file_that_is_not_there_is_a_value_error(module, tmp_path):
    path = str(tmp_path / "none.safetensors")
    with module.SafetensorsStreamer() as streamer, pytest.raises(ValueError):
        streamer.stream_file(path)
    with module.FileStreamer() as streamer, pytest.raises(ValueError):
        streamer.stream_files([module.FileChunks(0, path, [0], [1])])
        list(streamer.get_chunks())


def test_random_files_in_random_orders(module, tmp_path, write):
    """The scenario of the original's fuzzing: random dtypes, shapes, and numbers of tensors and files."""
    chance = random.Random(20)
    for round in range(8):
        paths = []
        for number in range(chance.randint(1, 6)):
            tensors = [
                Tensor(
                    f"{number}.{index}",
                    chance.choice(KINDS),
                    tuple(chance.randint(1, 10) for _ in range(chance.randint(1, 4))),
                )
                for index in range(chance.randint(1, 12))
            ]
            paths.append(write(*tensors, name=f"{round}-{number}.safetensors", seed=chance.randint(0, 1 << 30)))
        chance.shuffle(paths)
        same(paths, streamed(module, [str(path) for path in paths]))


def test_files_in_a_folder_are_listed(module, files, tmp_path):
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "deeper").mkdir()
    (tmp_path / "deeper" / "x.safetensors").write_bytes(b"")
    assert sorted(module.list_safetensors(str(tmp_path))) == [str(tmp_path / name) for name in FILES]
    assert module.list_safetensors(str(tmp_path / "none")) == []
    with pytest.raises(NotImplementedError):
        module.pull_files(str(tmp_path), str(tmp_path / "copy"))
    with pytest.raises(ValueError):
        module.ObjectStorageModel(str(tmp_path), str(tmp_path / "copy"))
    assert not (tmp_path / "copy.lock").exists()


# Byte ranges


def test_ranges_of_any_files(module, tmp_path):
    """Ranges in any order, empty ones and ones that overlap; bytes that come are the caller's."""
    chance = random.Random(3)
    contents, requests, expected = {}, [], {}
    for id in range(5):
        path = tmp_path / f"{id}.bin"
        contents[id] = chance.randbytes(chance.randint(1, 60_000))
        path.write_bytes(contents[id])
        ranges = [(0, 0), (0, len(contents[id]))]
        for _ in range(40):
            begin = chance.randint(0, len(contents[id]))
            ranges.append((begin, chance.randint(0, min(700, len(contents[id]) - begin))))
        chance.shuffle(ranges)
        requests.append(module.FileChunks(id, str(path), [begin for begin, _ in ranges], [size for _, size in ranges]))
        expected |= {(id, number): contents[id][begin : begin + size] for number, (begin, size) in enumerate(ranges)}
    with module.FileStreamer() as streamer:
        streamer.stream_files(requests)
        found = {}
        for id, number, tensor in streamer.get_chunks():
            assert tensor.dtype == torch.uint8 and tuple(tensor.shape) == (1, len(expected[id, number]))
            assert (id, number) not in found
            found[id, number] = tensor
    assert {key: tensor.numpy().tobytes() for key, tensor in found.items()} == expected


def test_ranges_that_follow_each_other(module, tmp_path):
    path = tmp_path / "book.txt"
    path.write_text("XTest Text1TestText2Test-Text3\n")
    request = module.FileChunks.contiguous(17, str(path), 1, [10, 0, 9, 10])
    assert (request.total_size(), request.max_chunk_size()) == (29, 10)
    with module.FileStreamer() as streamer:
        streamer.stream_files([request], memory_limit=10)
        found = {(id, number): tensor.numpy().tobytes().decode() for id, number, tensor in streamer.get_chunks()}
    assert found == {(17, 0): "Test Text1", (17, 1): "", (17, 2): "TestText2", (17, 3): "Test-Text3"}


def test_ranges_as_before_0_17(tmp_path):
    path = tmp_path / "x"
    path.write_bytes(bytes(range(50)))
    for request in (FileChunks(1, str(path), 3, [4, 5]), FileChunks(id=1, path=str(path), offset=3, chunks=[4, 5])):
        assert (request.offset, request.chunks, request.offsets) == (3, [4, 5], [3, 7])
        with FileStreamer() as streamer:
            streamer.stream_files([request])
            assert [raw(tensor) for _, _, tensor in streamer.get_chunks()] == [bytes(range(3, 7)), bytes(range(7, 12))]


def test_ranges_that_make_no_sense_are_refused(tmp_path):
    path = tmp_path / "x"
    path.write_bytes(b"0123456789")
    name = str(path)
    with pytest.raises(penstock.InvalidError, match="2 offsets and 1 sizes"):
        FileChunks(0, name, [1, 2], [3])
    with pytest.raises(penstock.InvalidError, match="the offsets and the sizes"):
        FileChunks(0, name)
    for requests, kind, says in (
        ([FileChunks(0, name, [0], [11])], penstock.TruncatedError, "bytes 0..11: the range ends at 11"),
        ([FileChunks(0, name, [-1], [2])], penstock.InvalidError, "begins at -1"),
        ([FileChunks(0, name, [0], [1]), FileChunks(0, name, [2], [1])], penstock.InvalidError, "two FileChunks"),
    ):
        with FileStreamer() as streamer, pytest.raises(kind, match=says) as caught:
            streamer.stream_files(requests)
        assert isinstance(caught.value, ValueError) and name in str(caught.value)


def test_the_core_reads_ranges_that_ascend(tmp_path):
    first, second = tmp_path / "a", tmp_path / "b"
    first.write_bytes(bytes(range(100)))
    second.write_bytes(b"x")
    found = _core.Checkpoint.of_ranges([(str(second), []), (str(first), [(0, 0), (5, 9), (9, 9), (90, 100)])])
    assert [found.info(number) for number in range(len(found))] == [
        ("0", "U8", (0,), 1, 0, 0),
        ("1", "U8", (4,), 1, 5, 9),
        ("2", "U8", (0,), 1, 9, 9),
        ("3", "U8", (10,), 1, 90, 100),
    ]
    for wrong in ([(5, 9), (8, 12)], [(9, 5)], [(5, 9), (0, 2)]):
        with pytest.raises(penstock.InvalidError, match="must ascend"):
            _core.Checkpoint.of_ranges([(str(first), wrong)])
    with pytest.raises(penstock.NotFoundError, match="none"):
        _core.Checkpoint.of_ranges([(str(tmp_path / "none"), [])])


# The face alone


def test_a_gpu_gets_the_tensors(held, monkeypatch):
    if not fakegpu.LIBRARY:
        pytest.skip(fakegpu.NO_LIBRARY)
    monkeypatch.setenv("PENSTOCK_GPU_LIBRARY", f"cuda:{fakegpu.LIBRARY}")
    oracle = Oracle(held)
    with fresh() as fake, torch_on(fake, monkeypatch), SafetensorsStreamer() as streamer:
        streamer.stream_file(str(held), device="cuda:0")
        found = dict(streamer.get_tensors())
        assert sorted(found) == sorted(oracle.entries)
        assert all(fake.read(tensor.data_ptr(), tensor.nbytes) == oracle[name] for name, tensor in found.items())
        del found
        gc.collect()


def test_outside_the_context_nothing_works_and_what_runs_ends_with_an_error(held):
    streamer = SafetensorsStreamer()
    with pytest.raises(ValueError, match="outside its context"):
        streamer.stream_file(str(held))
    with streamer:
        streamer.stream_file(str(held))
        tensors = streamer.get_tensors()
        next(tensors)
    assert not ordeal.threads(2.0)
    with pytest.raises(ValueError, match="outside its context") as caught:
        next(tensors)
    assert isinstance(caught.value, RuntimeError) and isinstance(caught.value, penstock.PenstockError)
    with pytest.raises(ValueError, match="outside its context"):
        next(streamer.get_tensors())


def test_errors_are_those_of_penstock_too_and_keep_what_they_say(held):
    held.write_bytes(held.read_bytes()[:-1])
    with SafetensorsStreamer() as streamer, pytest.raises(penstock.TruncatedError) as caught:
        streamer.stream_file(str(held))
    error = caught.value
    assert isinstance(error, ValueError) and isinstance(error, EOFError)
    assert error.path == str(held) and error.range is not None and error.found is not None
    again = pickle.loads(pickle.dumps(error))
    assert (type(again), str(again), again.range, again.path) == (type(error), str(error), error.range, error.path)


@pytest.mark.parametrize("kind", [kind for kind, _ in _errors._AS_VALUE_ERRORS], ids=lambda kind: kind.__name__)
def test_every_kind_of_error_becomes_a_value_error(kind):
    given = kind("why", path="where", range=(1, 2), errno=5, tensor="a")
    with pytest.raises(ValueError) as caught, _errors.value_errors():
        raise given
    found = caught.value
    assert isinstance(found, kind) and str(found) == str(given)
    assert (found.kind, found.path, found.range, found.errno, found.tensor) == (given.kind, "where", (1, 2), 5, "a")


def test_a_name_in_two_files_is_an_error_that_names_it(write):
    paths = [str(write(Tensor("a", "F32", (4,)), name=f"{letter}.safetensors")) for letter in "xy"]
    with (
        SafetensorsStreamer() as streamer,
        pytest.raises(ValueError, match=r"tensor \W*a\W* is also in .*x\.safetensors"),
    ):
        streamer.stream_files(paths)


def settings(path: Path, monkeypatch: pytest.MonkeyPatch, **how: Any) -> dict[str, Any]:
    """The options of a stream."""
    seen: dict[str, Any] = {}
    real = penstock.Checkpoint.stream

    def stream(self: Any, device: Any, names: Any, **given: Any) -> Any:
        seen.update(given["options"])
        return real(self, device, names, **given)

    with monkeypatch.context() as patched, SafetensorsStreamer() as streamer:
        patched.setattr(penstock.Checkpoint, "stream", stream)
        streamer.stream_file(str(path), **how)
    return seen


def test_variables_reach_the_engine(held, monkeypatch):
    def found(**variables: str) -> dict[str, Any]:
        with monkeypatch.context() as patched:
            for name, text in variables.items():
                patched.setenv(f"RUNAI_STREAMER_{name}", text)
            same([held], streamed(face, [str(held)]))
            return settings(held, monkeypatch)

    whole = 24 * 400_000
    assert found() == {}
    assert found(CONCURRENCY="3", FS_QUEUE_DEPTH="9") == {"threads": 3, "depth": 9}
    assert found(CHUNK_BYTESIZE="5000001") == {"extent": 5_001_216}
    assert found(CHUNK_BYTESIZE="1") == {"extent": 2 * MIB}
    assert found(CHUNK_BYTESIZE="1", FS_CHUNK_BYTESIZE="3145728") == {"extent": 3 * MIB}
    assert found(MEMORY_LIMIT="-1") == {"window": whole}
    assert found(MEMORY_LIMIT="0") == {"window": 1, "staging": 8 * MIB}
    assert found(MEMORY_LIMIT="104857600") == {"window": 100 * MIB, "staging": 100 * MIB}
    assert found(MEMORY_LIMIT="40000000000") == {"window": 40_000_000_000}
    assert found(FS_STRATEGY="sync_buffered") == {"io": "buffered"}
    assert found(FS_STRATEGY="libaio_direct, sync_buffered")["io"] in ("threads", "buffered")
    assert found(OBJ_CONCURRENCY="5", S3_UNSIGNED="1", DIST="0") == {}, "these are for buckets, and for ranks"


def test_a_gpus_memory_is_not_what_the_limit_bounds(monkeypatch):
    monkeypatch.setenv("RUNAI_STREAMER_MEMORY_LIMIT", "16777216")
    limit = _runai_settings.Limit.of(None)
    assert _runai_settings.options_for([], False, 1 << 40, 1, limit) == {"staging": 16 * MIB}
    assert _runai_settings.options_for([], True, 1 << 40, 1, limit) == {"staging": 16 * MIB, "window": 16 * MIB}
    monkeypatch.setenv("RUNAI_STREAMER_MEMORY_LIMIT", "-1")
    assert _runai_settings.options_for([], False, 1 << 40, 1, _runai_settings.Limit.of(None)) == {}
    assert _runai_settings.Limit.of(5) == _runai_settings.Limit(5), "an argument wins"


def test_ranks_have_settings_of_their_own(monkeypatch):
    options = _runai_settings.options_for
    limit = _runai_settings.Limit(64 * MIB)
    assert options([], True, 1, 4, limit) == {"scope": "node", "window": 16 * MIB, "staging": 16 * MIB}
    monkeypatch.setenv("RUNAI_STREAMER_DIST_GLOBAL", "1")
    monkeypatch.setenv("RUNAI_STREAMER_DIST_TIMEOUT", "7")
    assert options([], True, 1, 2, _runai_settings.Limit(None)) == {"scope": "world", "join_timeout": 7.0}


@pytest.mark.parametrize(
    "name",
    ["CONCURRENCY", "CHUNK_BYTESIZE", "FS_CHUNK_BYTESIZE", "MEMORY_LIMIT", "FS_QUEUE_DEPTH", "FS_STRATEGY"],
)
def test_a_variable_that_makes_no_sense_is_refused(held, monkeypatch, name):
    for wrong in ("-2", "many", ""):
        monkeypatch.setenv(f"RUNAI_STREAMER_{name}", wrong)
        with SafetensorsStreamer() as streamer, pytest.raises(ValueError, match=f"RUNAI_STREAMER_{name}="):
            streamer.stream_file(str(held))


def test_variables_of_ranks_that_make_no_sense_are_refused(held, monkeypatch):
    monkeypatch.setenv("RUNAI_STREAMER_DIST", "yes")
    with SafetensorsStreamer() as streamer:
        streamer.stream_file(str(held))
        with pytest.raises(ValueError, match="RUNAI_STREAMER_DIST='yes': give 0, 1 or auto"):
            streamer.stream_file(str(held), is_distributed=True)


def test_settings_of_buckets(monkeypatch):
    storage = _runai_settings.storage_for
    assert storage(["/a", "b"]) is None
    assert storage(["s3://b/x"]) is None
    keys = face.S3Credentials("id", "secret", region_name="eu", endpoint="http://h:1")
    given = {"access_key_id": "id", "secret_access_key": "secret", "region": "eu", "endpoint": "http://h:1"}
    assert storage(["s3://b/x"], keys) == given
    assert "secret" not in repr(keys)
    assert storage(["gs://b/x"], keys) is None and storage(["az://b/x"], keys) is None
    for name, text in {
        "CONCURRENCY": "4", "CHUNK_BYTESIZE": "6000000", "S3_USE_VIRTUAL_ADDRESSING": "0", "S3_UNSIGNED": "1",
        "S3_ENDPOINT": "http://other", "GCS_USE_ANONYMOUS_CREDENTIALS": "True",
    }.items():  # fmt: skip
        monkeypatch.setenv(f"RUNAI_STREAMER_{name}", text)
    monkeypatch.setenv("AWS_CA_BUNDLE", "/ca.pem")
    common = {"connections": 4, "request_bytes": 6_000_000}
    own = {"addressing": "path", "anonymous": True, "ca": "/ca.pem", "endpoint": "http://other"}
    assert storage(["s3://b/x"]) == common | own
    assert storage(["gs://b/x"]) == common | {"anonymous": True}
    assert storage(["az://b/x"]) == common
    monkeypatch.setenv("RUNAI_STREAMER_OBJ_CONCURRENCY", "7")
    monkeypatch.setenv("RUNAI_STREAMER_CHUNK_BYTESIZE", "1")
    monkeypatch.setenv("RUNAI_STREAMER_S3_USE_VIRTUAL_ADDRESSING", "1")
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://first")
    own = {"addressing": "virtual", "anonymous": True, "ca": "/ca.pem"}
    assert storage(["s3://b/x"]) == {"connections": 7, "request_bytes": 5 * MIB} | own
    monkeypatch.setenv("CLOUD_STORAGE_EMULATOR_ENDPOINT", "http://double")
    assert (storage(["gs://b/x"]) or {})["endpoint"] == "http://double"
    monkeypatch.setenv("RUNAI_STREAMER_S3_UNSIGNED", "maybe")
    with pytest.raises(penstock.InvalidError, match="RUNAI_STREAMER_S3_UNSIGNED='maybe': give 0 or 1"):
        storage(["s3://b/x"])


def test_the_file_with_googles_credentials_is_the_one_that_counts_here(monkeypatch):
    monkeypatch.setenv("GOOGLE_APPLICATION_CREDENTIALS", "")
    monkeypatch.setenv("RUNAI_STREAMER_GCS_CREDENTIAL_FILE", "/one.json")
    _runai_settings.storage_for(["s3://b/x"])
    assert os.environ["GOOGLE_APPLICATION_CREDENTIALS"] == ""
    _runai_settings.storage_for(["gs://b/x"])
    assert os.environ["GOOGLE_APPLICATION_CREDENTIALS"] == "/one.json"
    monkeypatch.setenv("GOOGLE_APPLICATION_CREDENTIALS", "/two.json")
    with pytest.raises(penstock.InvalidError, match="name two files"):
        _runai_settings.storage_for(["gs://b/x"])


def test_variables_without_an_effect_are_told_once_with_the_reason(held, monkeypatch):
    for name in ("RING_BUFFERS", "GCS_USE_GRPC", "SOMETHING_NEW", "NO_BOTO3_SESSION", "CONCURRENCY"):
        monkeypatch.setenv(f"RUNAI_STREAMER_{name}", "1")
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        for _ in range(2):
            streamed(face, [str(held)])
    said = [str(one.message) for one in told if one.category is RuntimeWarning]
    assert len(said) == 3
    assert (
        said[0]
        == "RUNAI_STREAMER_GCS_USE_GRPC has no effect: Google Cloud Storage is asked over HTTP; gRPC is not supported"
    )
    assert said[1].startswith("RUNAI_STREAMER_RING_BUFFERS has no effect: there is no ring")
    assert said[2] == "RUNAI_STREAMER_SOMETHING_NEW has no effect: Penstock does not know this variable"


def test_no_variable_is_in_two_lists():
    lists = [set(_runai_settings.USED), set(_runai_settings.MOOT), set(_runai_settings.WITHOUT_EFFECT)]
    assert sum(map(len, lists)) == len(set.union(*lists))


def test_paths_are_a_list_of_paths(files):
    with SafetensorsStreamer() as streamer:
        for wrong in (files[0], [b"x"], [3]):
            with pytest.raises(TypeError, match="paths="):
                streamer.stream_files(wrong)
        streamer.stream_files([Path(file) for file in files])  # type: ignore[misc]
        assert len(dict(streamer.get_tensors())) == len(KINDS) + 3
        assert len(streamer.files_to_tensors_metadata) == 2


def test_it_imports_neither_torch_nor_the_original(python, small):
    code = """
import sys
from penstock.compat import runai_model_streamer as face
assert face.list_safetensors(sys.argv[1])
print([m for m in ("torch", "numpy", "boto3", "runai_model_streamer") if m in sys.modules])
"""
    run = python(code, small)
    assert run.stdout.strip() == "[]", run.stderr


def test_everything_that_is_public_is_documented():
    for name in face.__all__:
        assert isinstance(getattr(face, name), str) or getattr(face, name).__doc__, name
    for found in (SafetensorsStreamer, FileStreamer, face.DistributedStreamer, ObjectStorageModel):
        for name in vars(found):
            assert name.startswith("_") or isinstance(vars(found)[name], str) or getattr(found, name).__doc__, name


# Models in a bucket, whose files something else copies here


@pytest.fixture
def copied(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[tuple[Any, ...]]]:
    """The calls of `pull_files`, which writes one file."""
    calls: list[tuple[Any, ...]] = []

    def pull(model: str, dst: str, *patterns: Any) -> None:
        calls.append((model, dst, *patterns))
        Path(dst, "model.safetensors").write_bytes(b"weights")

    monkeypatch.setattr(_runai_buckets, "pull_files", pull)
    yield calls


def is_locked(path: Path) -> bool:
    with path.open("a") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
    return False


def test_a_model_is_copied_once_and_anew_after_a_failure(tmp_path, copied):
    folder, lock = tmp_path / "model", tmp_path / "model.lock"
    folder.mkdir()
    (folder / "left").write_bytes(b"over")
    with pytest.raises(KeyError), ObjectStorageModel("s3://b/m", f"{folder}/") as model:
        assert (model.dir, is_locked(lock), list(folder.iterdir())) == (str(folder), True, [])
        model.pull_files(["*"])
        raise KeyError
    assert not is_locked(lock) and not (folder / ".runai_complete").exists()
    for _ in range(2):
        with ObjectStorageModel(model_path="s3://b/m", dst=str(folder)) as model:
            model.pull_files(ignore_pattern=["*.bin"])
            model.pull_files(allow_pattern=["*.json"])
        assert sorted(path.name for path in folder.iterdir()) == [".runai_complete", "model.safetensors"]
        assert not is_locked(lock)
    assert copied == [
        ("s3://b/m/", str(folder), ["*"], None, None),
        ("s3://b/m/", str(folder), None, ["*.bin"], None),
        ("s3://b/m/", str(folder), ["*.json"], None, None),
    ]


def test_complete_models_are_shared_and_a_copy_waits_for_its_turn(tmp_path, copied):
    folder = str(tmp_path / "model")
    with ObjectStorageModel("gs://b/m", folder) as model:
        model.pull_files()
    with ObjectStorageModel("gs://b/m", folder), ObjectStorageModel("gs://b/m", folder):
        pass
    model = ObjectStorageModel("az://b/m", str(tmp_path / "dropped"))
    assert is_locked(tmp_path / "dropped.lock")
    del model
    gc.collect()
    assert not is_locked(tmp_path / "dropped.lock")


def test_a_model_of_which_nothing_came_is_an_error(tmp_path, copied, monkeypatch):
    monkeypatch.setattr(_runai_buckets, "pull_files", lambda *_: None)
    folder = str(tmp_path / "model")
    with (
        pytest.raises(RuntimeError, match="no file of s3://b/m/ was copied") as caught,
        ObjectStorageModel("s3://b/m", folder) as model,
    ):
        model.pull_files()
    assert isinstance(caught.value, penstock.PenstockError)
    assert not is_locked(tmp_path / "model.lock") and not (tmp_path / "model" / ".runai_complete").exists()


def test_processes_that_want_one_model_copy_it_once(tmp_path, torch_python):
    code = """
import os, sys, time
from pathlib import Path
from penstock.compat import _runai_buckets
from penstock.compat.runai_model_streamer import ObjectStorageModel
def pull(model, dst, *patterns):
    time.sleep(0.1)
    Path(dst, str(os.getpid())).write_bytes(b"x")
_runai_buckets.pull_files = pull
children = []
for _ in range(6):
    pid = os.fork()
    if pid == 0:
        with ObjectStorageModel("s3://b/m", sys.argv[1]) as model:
            model.pull_files()
            assert len(os.listdir(model.dir)) - (".runai_complete" in os.listdir(model.dir)) == 1
        os._exit(0)
    children.append(pid)
print([os.waitpid(pid, 0)[1] for pid in children], len(os.listdir(sys.argv[1])))
"""
    run = torch_python(code, tmp_path / "model")
    assert run.stdout.strip() == f"{[0] * 6} 2", run.stderr


# `make runai-examples`


@pytest.fixture
def tool() -> Any:
    path = Path(__file__).parents[1] / "tools" / "runai_examples.py"
    spec = importlib.util.spec_from_file_location("runai_examples", path)
    assert spec is not None and spec.loader is not None
    found = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(found)
    return found


def test_the_tool_changes_imports_and_nothing_else(tool):
    text = """
from runai_model_streamer import SafetensorsStreamer
    from runai_model_streamer.file_streamer.requests_iterator import (
import runai_model_streamer.safetensors_streamer.safetensors_streamer as _ss_module
print("runai_model_streamer import")
"""
    assert (
        tool.changed(text)
        == """
from penstock.compat.runai_model_streamer import SafetensorsStreamer
    from penstock.compat.runai_model_streamer import (
import penstock.compat._runai_buckets as _ss_module
print("runai_model_streamer import")
"""
    )


def test_the_tool_refuses_another_checkout(tool, tmp_path, monkeypatch, capsys):
    (tmp_path / "examples").mkdir()
    (tmp_path / "examples" / "one.ipynb").write_text("{}")
    monkeypatch.setattr("sys.argv", ["runai_examples.py", str(tmp_path)])
    assert tool.main() == 2
    assert f"is no checkout of {tool.COMMIT}" in capsys.readouterr().out
    before = tool.digest_of(tmp_path)
    (tmp_path / "examples" / "one.ipynb").write_text("[]")
    assert tool.digest_of(tmp_path) != before
