"""The second start of an engine from a bucket, with a disk cache: it receives nothing but version checks.

`make engines` runs these tests where `make test-servers` has built the server. Each start is of processes of its own,
which ask the server through a port that counts every byte of its answers.
"""

from __future__ import annotations

import hashlib
import json
import os
import signal
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import closing, suppress
from pathlib import Path
from typing import Any, NamedTuple

import disk_caches
import pytest
from conftest import started
from penstock.integrations._lora_settings import PREFIX
from quantised import tensor
from test_buckets import Counted, pytestmark
from test_sglang import Run
from test_vllm_group import Group
from tiny_models import Tensors, edited, read, save
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from versitygw import KEY, REGION, SECRET, Server

__all__ = ["pytestmark"]  # where they run

MIB = 1 << 20
ENGINES, RANKS = ("vllm", "sglang"), (1, 4)
#: The start that fills the cache, and the one that it is for.
FIRST, SECOND = range(2)
BASE, ADAPTER = "org/base", "team/summaries"


class Telling(Counted):
    """Says on a port of its own how many bytes it has let through."""

    def __init__(self, to: int) -> None:
        super().__init__(to)
        self._asked = socket.create_server(("127.0.0.1", 0), backlog=64)
        self.tells: int = self._asked.getsockname()[1]
        threading.Thread(target=self._tell, daemon=True).start()

    def _tell(self) -> None:
        with suppress(OSError):
            while True:
                with closing(self._asked.accept()[0]) as asking:
                    asking.sendall(str(self.served).encode())

    def close(self) -> None:
        super().close()
        with suppress(OSError):
            self._asked.shutdown(socket.SHUT_RDWR)
        self._asked.close()


class Bucket(NamedTuple):
    """A model and an adapter: in a folder, and in a bucket behind a port that counts."""

    model: Path
    adapter: Path
    port: Telling

    @property
    def weights(self) -> int:
        return sum(path.stat().st_size for path in self.model.glob("*.safetensors"))

    def storage(self, cache: Path) -> dict[str, Any]:
        """What the user says of the server and of the cache. The disks of tests are full."""
        endpoint = f"http://127.0.0.1:{self.port.port}"
        return {"endpoint": endpoint, "region": REGION, "disk_cache": str(cache), "disk_cache_free": 0}


def _with_tokenizer(folder: Path) -> None:
    """8 MB of words, as large as those of public models."""
    words = {f"word{number:08}": number for number in range(380_000)}
    text = Tokenizer(WordLevel(words, unk_token="word00000000")).to_str()
    assert len(text) >= 8e6
    (folder / "tokenizer.json").write_text(text)
    about = {"tokenizer_class": "PreTrainedTokenizerFast", "unk_token": "word00000000"}
    (folder / "tokenizer_config.json").write_text(json.dumps(about))


def _with_index(folder: Path) -> None:
    """Two shards of the one."""
    [whole] = folder.glob("*.safetensors")
    tensors = list(read(whole).items())
    whole.unlink()
    for number, part in enumerate((tensors[: len(tensors) // 2], tensors[len(tensors) // 2 :]), 1):
        save(folder / f"model-{number:05}-of-00002.safetensors", dict(part))
    (folder / "model.safetensors.index.json").write_text("{}")
    edited(folder, lambda found: found)  # writes the index anew


def _adapter(folder: Path) -> Path:
    """12 MiB of matrices."""
    tensors: Tensors = {}
    for layer in range(4):
        for module in ("q_proj", "o_proj", "down_proj"):
            name = f"base_model.model.model.layers.{layer}.{'mlp' if module == 'down_proj' else 'self_attn'}.{module}"
            tensors[f"{name}.lora_A.weight"] = tensor("BF16", 64, 4096)
            tensors[f"{name}.lora_B.weight"] = tensor("BF16", 4096, 64)
    folder.mkdir()
    save(folder / "adapter_model.safetensors", tensors)
    about = {"r": 64, "lora_alpha": 64, "target_modules": ["q_proj", "o_proj", "down_proj"], "peft_type": "LORA"}
    (folder / "adapter_config.json").write_text(json.dumps({**about, "base_model_name_or_path": BASE}))
    return folder


@pytest.fixture(scope="module")
def bucket(checkpoint: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Bucket]:
    folder = tmp_path_factory.mktemp("cached")
    model = folder / "model"
    model.mkdir()
    for path in checkpoint("long-llama").iterdir():
        (model / path.name).write_bytes(path.read_bytes())
    _with_tokenizer(model)
    _with_index(model)
    adapter = _adapter(folder / "adapter")
    server = Server(tmp_path_factory.mktemp("versitygw"))
    port = Telling(server.port)
    try:
        for place, name in ((model, "cached"), (adapter, f"adapters/{ADAPTER}")):
            for path in place.iterdir():
                server.put(f"{name}/{path.name}", path.read_bytes())
        found = Bucket(model, adapter, port)
        assert found.weights >= 90e6 and len(list(model.glob("*.safetensors"))) == 2
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("AWS_ACCESS_KEY_ID", KEY)
            patch.setenv("AWS_SECRET_ACCESS_KEY", SECRET)
            yield found
    finally:
        port.close()
        server.close()


#: Words of each rank of two starts, by engine and number of ranks. "adapter": those of an adapter.
Starts = dict[tuple[str, int], list[list[dict[str, Any]]]]


def _of_vllm(bucket: Bucket, folder: Path) -> Starts:
    """All starts of vLLM, by one program that imports it once."""
    specs = []

    def starts(named: str, ranks: int, do: str, **given: Any) -> list[Path]:
        places = [folder / f"{named}.{number}" for number in (FIRST, SECOND)]
        for place in places:
            place.mkdir()
            specs.append({"folder": str(place), "ranks": ranks, "do": do, "with": given})
        return places

    common = {"port": bucket.port.tells}
    places = {}
    for ranks in RANKS:
        options = {"storage": bucket.storage(folder / f"cache.{ranks}")}
        given = {"place": "s3://models/cached", "folder": str(bucket.model), "options": options, **common}
        places["vllm", ranks] = starts(f"model.{ranks}", ranks, "model", **given)
    storage = bucket.storage(folder / "cache.adapter")
    environment = {f"PENSTOCK_STORAGE_{name.upper()}": str(value) for name, value in storage.items()}
    environment[PREFIX] = "s3://models/adapters"
    given = {"name": ADAPTER, "base": BASE, "folder": str(bucket.adapter), "environment": environment}
    places["adapter", 1] = starts("adapter", 1, "adapter", storage=storage, **given, **common)
    spec = folder / "specification.json"
    spec.write_text(json.dumps(specs))
    with (folder / "log").open("wb") as log:
        process = started("vllm_starts", [str(spec)], log)
    found: Starts = {}
    try:
        for (what, ranks), both in places.items():
            for place in both:
                (place / "log").symlink_to(folder / "log")
            found[what, ranks] = [Group(place, ranks, process).said() for place in both]
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)  # its ranks too
        process.wait()
    return found


def _of_sglang(bucket: Bucket, ranks: int, folder: Path) -> Starts:
    options = {"storage": bucket.storage(folder / "cache")}
    given = {"place": "s3://models/cached", "folder": str(bucket.model), "options": options}
    given |= {"port": bucket.port.tells, "temporary": str(folder)}
    names = ("first", "second")
    run = Run(ranks, [{"name": name, "do": "model", "with": given} for name in names], folder, "sglang_starts.py")
    return {("sglang", ranks): [run.of(name) for name in names]}


@pytest.fixture(scope="module")
def starts(bucket: Bucket, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str, int], list[Any]]:
    """Two starts, and the folder of their cache. Each pair takes place once."""
    made: dict[tuple[str, int], Any] = {}

    def find(what: str, ranks: int) -> list[Any]:
        if (what, ranks) not in made:
            folder = tmp_path_factory.mktemp(f"{what}{ranks}")
            made.update(_of_sglang(bucket, ranks, folder) if what == "sglang" else _of_vllm(bucket, folder))
        return made[what, ranks]

    return find


def served(ranks: list[dict[str, Any]]) -> int:
    """The bytes that left the server for a start, until the cache had all of them."""
    return max(one["after"] for one in ranks) - min(one["before"] for one in ranks)


CASES = [(engine, ranks) for engine in ENGINES for ranks in RANKS]


@pytest.mark.parametrize(("engine", "ranks"), CASES)
def test_the_second_start_receives_versions_alone(engine: str, ranks: int, bucket: Bucket, starts: Any):
    first, second = starts(engine, ranks)
    assert len(first) == len(second) == ranks
    assert served(first) > bucket.weights + 8e6, "the first start came from the server"
    assert 0 < served(second) < MIB
    for one in second:
        assert one["report"]["network_bytes"] == 0 and one["report"]["reason"] == ""
        assert one["report"]["nbytes"] > 0


@pytest.mark.parametrize(("engine", "ranks"), CASES)
def test_both_starts_have_the_parameters_and_files_that_are_on_a_disk(
    engine: str, ranks: int, bucket: Bucket, starts: Any
):
    first, second = starts(engine, ranks)
    small = [path for path in bucket.model.iterdir() if path.suffix != ".safetensors"]
    files = {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in small}
    assert {"config.json", "tokenizer.json", "model.safetensors.index.json"} < files.keys()
    for before, after in zip(first, second, strict=True):
        assert before["parameters"] == after["parameters"] > 0
        assert before["different"] == after["different"] == []
        assert before["digests"] == after["digests"]
        for one in (before, after):
            assert one["report"]["fallbacks"] == []
            assert files.items() <= one["files"].items()
    if ranks > 1:
        assert first[0]["digests"] != first[1]["digests"], "each rank has a part"


@pytest.mark.parametrize(("engine", "ranks"), CASES)
def test_the_first_start_leaves_every_byte_on_the_disk(engine: str, ranks: int, bucket: Bucket, starts: Any):
    first, _ = starts(engine, ranks)
    sizes = {path.name: path.stat().st_size for path in bucket.model.iterdir()}
    for one in first:
        assert one["kept"] == sizes
    # By the cache's files, without Penstock's own reading of them
    cache = Path(first[0]["cache"])
    maps = disk_caches.files(cache, ".map")
    assert len(maps) == len(sizes) and all(set(disk_caches.states(path)) == {"synced"} for path in maps)
    # Ranks of one node receive weights once. Each rank here starts like an engine: small files may come to each at once
    received = sum(one["report"]["network_bytes"] for one in first)
    assert received <= 1.05 * bucket.weights
    assert served(first) < 1.05 * bucket.weights + ranks * (sum(sizes.values()) - bucket.weights + MIB)


def test_an_adapter_by_its_address_comes_through_the_cache(bucket: Bucket, starts: Any):
    first, second = starts("adapter", 1)
    size = sum(path.stat().st_size for path in bucket.adapter.iterdir())
    assert size > 12 * MIB
    assert size < served(first) < 1.05 * size + MIB
    assert 0 < served(second) < MIB / 4
    for [one] in (first, second):
        assert one["parameters"] == 2 * 4 * 3 and one["different"] == []
