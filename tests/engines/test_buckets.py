"""Engines' loaders with weights in a real S3 server: the same parameters as from a disk, and each rank's own bytes.

`make engines` runs these tests where `make test-servers` has built the server. Each rank asks it through a port of its
own, which counts what is served.
"""

from __future__ import annotations

import dataclasses
import json
import logging
import os
import shutil
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

import certificates
import penstock
import pytest
from conftest import DRAFTS, HERE, WORLDS, World, ranks_of, run_world
from penstock.integrations._engine import Chosen
from penstock.integrations._recorder import Recorder
from penstock.integrations._remote import RemoteWeights
from penstock.integrations._start_report import report
from test_sglang import Run
from versitygw import KEY, REGION, SECRET, Server

pytestmark = pytest.mark.skipif(
    not os.environ.get("PENSTOCK_TEST_SERVERS"), reason="there is no server: `make test-servers` builds it"
)

MODELS = ("qwen3-moe", "long-llama")
#: What a model is called where the engine is given its address alone.
ALONE = "address of "
CREDENTIALS = {"AWS_ACCESS_KEY_ID": KEY, "AWS_SECRET_ACCESS_KEY": SECRET}


def models_of(world: str) -> list[str]:
    """vLLM refuses expert parallel ranks for a model without experts."""
    models = [model for model in MODELS if model == "qwen3-moe" or not WORLDS[world].get("enable_expert_parallel")]
    return [*models, *(f"{ALONE}{model}" for model in models if world.startswith("tp"))]


class Counted:
    """A port that leads to another one, and counts the bytes that come back."""

    def __init__(self, to: int) -> None:
        self.served = 0
        self._to, self._lock = to, threading.Lock()
        self._listener = socket.create_server(("127.0.0.1", 0), backlog=128)
        self.port: int = self._listener.getsockname()[1]
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        with suppress(OSError):
            while True:
                client, _ = self._listener.accept()
                server = socket.create_connection(("127.0.0.1", self._to))
                for pair in ((client, server, False), (server, client, True)):
                    threading.Thread(target=self._pump, args=pair, daemon=True).start()

    def _pump(self, source: socket.socket, sink: socket.socket, counts: bool) -> None:
        with suppress(OSError):
            while got := source.recv(1 << 18):
                if counts:
                    with self._lock:
                        self.served += len(got)
                sink.sendall(got)
        for one in (source, sink):
            with suppress(OSError):
                one.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        with suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()


@pytest.fixture(scope="module")
def server(checkpoint: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """With the models. The ranks' environment has credentials for it."""
    server = Server(tmp_path_factory.mktemp("versitygw"))
    try:
        for model in MODELS:
            for path in checkpoint(model).iterdir():
                server.put(f"{model}/{path.name}", path.read_bytes())
        with pytest.MonkeyPatch.context() as patch:
            for name, value in CREDENTIALS.items():
                patch.setenv(name, value)
            yield server
    finally:
        server.close()


@pytest.fixture(scope="module")
def without_weights(
    checkpoint: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory
) -> Callable[[str], Path]:
    """A folder with what a model's folder has besides the weights."""
    made: dict[str, Path] = {}

    def find(model: str) -> Path:
        if model not in made:
            made[model] = tmp_path_factory.mktemp(model) / "model"
            shutil.copytree(checkpoint(model), made[model], ignore=shutil.ignore_patterns("*.safetensors*"))
        return made[model]

    return find


def asked(port: int) -> dict[str, Any]:
    """What the user says of the server."""
    return {"storage": {"endpoint": f"http://127.0.0.1:{port}", "region": REGION}}


def extra(model: str, port: int) -> dict[str, Any]:
    """What the user says where the model is a folder."""
    return {"weights": f"s3://models/{model}/", **asked(port)}


@pytest.fixture(scope="module")
def loaded(
    server: Server,
    checkpoint: Callable[[str], Path],
    without_weights: Callable[[str], Path],
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[Callable[[str], tuple[World, dict[tuple[str, int], Counted]]]]:
    """What a world made of all models, and the port of each rank for each model. It runs once."""
    ran: dict[str, tuple[World, dict[tuple[str, int], Counted]]] = {}
    with ExitStack() as stack:

        def find(name: str) -> tuple[World, dict[tuple[str, int], Counted]]:
            if name not in ran:
                models, ranks = models_of(name), range(ranks_of(name))
                ports = {(model, rank): Counted(server.port) for model in models for rank in ranks}
                for port in ports.values():
                    stack.callback(port.close)

                def given(model: str, rank: int) -> dict[str, Any]:
                    name, port = model.removeprefix(ALONE), ports[model, rank].port
                    if name != model:
                        return {"model": f"s3://models/{name}/", "model_loader_extra_config": asked(port)}
                    folder = str(without_weights(name))
                    return {"model": folder, "model_loader_extra_config": extra(name, port)}

                more = {model: [given(model, rank) for rank in ranks] for model in models}
                folders = {model: checkpoint(model.removeprefix(ALONE)) for model in models}
                ran[name] = run_world(name, folders, tmp_path_factory.mktemp(name), more), ports
            return ran[name]

        yield find


def underway(network: dict[str, int]) -> int:
    """Bytes that may have been in sockets' buffers when requests were cut off."""
    return (network["moved_requests"] + network["retries"]) * (4 << 20)


CASES = [(world, model, rank) for world in WORLDS for model in models_of(world) for rank in range(ranks_of(world))]


@pytest.fixture(params=CASES, ids=lambda case: "-".join(map(str, case)))
def case(request: pytest.FixtureRequest) -> tuple[str, str, int]:
    found: tuple[str, str, int] = request.param
    return found


def test_parameters_are_those_from_a_disk(case: tuple[str, str, int], loaded: Any):
    world, model, rank = case
    result = loaded(world)[0].of(model, rank)
    assert result["loader"] == "penstock.integrations._vllm_loader"
    assert result["parameters"] > 0
    assert (result["different"], result["deferred"], result["moved"]) == ([], [], [])
    (report,) = result["reports"]
    assert (report["loads"], report["copied_through"], report["fallbacks"]) == (1, [], [])
    assert report["nbytes"] == result["from_files"]


def test_a_rank_receives_its_own_bytes_once_and_gaps_of_at_most_a_mebibyte(case: tuple[str, str, int], loaded: Any):
    world, model, rank = case
    found, ports = loaded(world)
    result = found.of(model, rank)
    (report,) = result["reports"]
    wanted, received = result["with_gaps"], report["network"]["received_bytes"]
    # What ranks share of such small models one of them receives, and sends to the others
    of_others = (report["exchange"] or {}).get("received_bytes", 0)
    assert report["nbytes"] - of_others + report["gap_bytes"] <= received <= wanted * 1.01
    if model.endswith("long-llama"):  # with what was read to open it, and with all that HTTP adds
        assert received < ports[model, rank].served <= wanted * 1.01 + underway(report["network"])


@pytest.mark.parametrize("alone", [False, True], ids=["folder", "address"])
@pytest.mark.parametrize("ranks", [1, 2])
def test_sglang(
    ranks: int,
    alone: bool,
    server: Server,
    checkpoint: Callable[[str], Path],
    without_weights: Callable[[str], Path],
    tmp_path: Path,
):
    ports = {(model, rank): Counted(server.port) for model in MODELS for rank in range(ranks)}

    def task(model: str) -> dict[str, Any]:
        told = [ports[model, rank].port for rank in range(ranks)]
        if alone:
            place, given = f"s3://models/{model}/", [asked(port) for port in told]
            more = {"place": place, "weights": str(checkpoint(model)), "extra": given, "temporary": str(tmp_path)}
            return {"name": model, "do": "address", "with": more}
        given = [extra(model, port) for port in told]
        folders = {"folder": str(without_weights(model)), "weights": str(checkpoint(model))}
        return {"name": model, "do": "elsewhere", "with": {**folders, "extra": given}}

    try:
        run = Run(ranks, [task(model) for model in MODELS], tmp_path)
        for model in MODELS:
            for rank, found in enumerate(run.of(model)):
                assert found["parameters"] > 0
                assert (found["different"], found["left"]) == ([], [])
                if alone:
                    folder = Path(found["path"])
                    assert (folder.parent, found["tokenizer"]) == (tmp_path, str(folder))
                    assert (found["served"], found["kept"]) == (f"s3://models/{model}/", [])
                    assert "config.json" in found["names"] and all(size < 100_000 for size in found["names"].values())
                (report,), (more,) = found["reports"], found["network"]
                assert (report["loads"], report["copied_through"], report["fallbacks"]) == (1, [], [])
                received = more["network"]["received_bytes"]
                of_others = (more["exchange"] or {}).get("received_bytes", 0)
                assert report["nbytes"] - of_others + more["gap_bytes"] <= received
                if model == "long-llama":
                    whole = sum(path.stat().st_size for path in checkpoint(model).glob("*.safetensors"))
                    served = ports[model, rank].served
                    most = (1.01 * report["nbytes"] if ranks == 1 else whole) + underway(more["network"])
                    assert received < served < most
    finally:
        for port in ports.values():
            port.close()


# One rank of vLLM, in this process


def created(folder: Path, **options: Any) -> tuple[Any, Any, Any]:
    """vLLM's loader, a model of poison, and its configuration."""
    import vllm_model

    config = vllm_model.configured({"model": str(folder), "model_loader_extra_config": options}, "penstock")
    return *vllm_model.created(config), config


def load(loader: Any, model: Any, config: Any) -> dict[str, str]:
    """What the parameters are then."""
    import vllm_model

    vllm_model.load(loader, model, config)
    digests: dict[str, str] = vllm_model.digests(model)
    return digests


@pytest.fixture
def expected(alone: None, checkpoint: Callable[[str], Path]) -> dict[str, str]:
    """What vLLM makes of the model on a disk."""
    return load(*created(checkpoint("qwen3-moe")))


# The address alone


def test_vllms_configuration_of_an_address(server: Server, alone: None, checkpoint: Any, temporary: Path):
    """As its command line and its Python interface make it, with a tokenizer that vLLM then takes from the folder."""
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from tokenizers.pre_tokenizers import Whitespace
    from vllm.engine.arg_utils import AsyncEngineArgs, EngineArgs
    from vllm.entrypoints.common.cli_args import make_arg_parser
    from vllm.tokenizers import get_tokenizer
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    for path in checkpoint("qwen3-moe").iterdir():
        server.put(f"whole/{path.name}", path.read_bytes())
    words = Tokenizer(WordLevel({"one": 0, "two": 1, "[UNK]": 2}, unk_token="[UNK]"))
    words.pre_tokenizer = Whitespace()
    server.put("whole/tokenizer.json", words.to_str().encode())
    server.put("whole/tokenizer_config.json", b'{"tokenizer_class": "PreTrainedTokenizerFast", "unk_token": "[UNK]"}')
    server.put("whole/chat_template.jinja", b"{{ messages[0].content }}")
    server.put("whole/modeling.py", b"raise SystemExit")
    place, more = "s3://models/whole", asked(server.port)
    parser = make_arg_parser(FlexibleArgumentParser())
    words_of_user = ["--load-format", "penstock", "--model-loader-extra-config", json.dumps(more), "--enforce-eager"]
    parsed = parser.parse_args([place, *words_of_user])
    parsed.model = parsed.model_tag  # as `vllm serve` does
    given = {"model": place, "load_format": "penstock", "model_loader_extra_config": more, "enforce_eager": True}
    paths = set()
    for arguments in (AsyncEngineArgs.from_cli_args(parsed), EngineArgs(**given)):
        config = arguments.create_engine_config()
        model, folder = config.model_config, Path(config.model_config.model)
        assert (model.served_model_name, model.tokenizer) == (place, str(folder))
        assert config.load_config.load_format == "penstock"
        assert config.load_config.model_loader_extra_config == {**more, "weights": {str(folder): place}}
        assert get_tokenizer(model.tokenizer).encode("two one", add_special_tokens=False) == [1, 0]
        assert model.hf_config.architectures == ["Qwen3MoeForCausalLM"]
        names = {path.name for path in folder.iterdir()}
        assert {"config.json", "tokenizer.json", "chat_template.jinja"} < names and "modeling.py" not in names
        paths.add(folder)
    assert paths == set(temporary.iterdir()) and len(paths) == 1
    hashes = {EngineArgs(**given).create_engine_config().model_config.compute_hash() for _ in range(2)}
    assert len(hashes) == 1, "what vLLM compiles is found again"


def test_what_an_engine_learns_of_the_headers_of_weights(
    server: Server, alone: None, checkpoint: Any, temporary: Path, monkeypatch: pytest.MonkeyPatch
):
    """With GPTQ vLLM takes from them which layers are quantised."""
    from vllm.transformers_utils.config import get_safetensors_params_metadata

    folder = checkpoint("llama.gptq")
    for path in folder.iterdir():
        server.put(f"gptq/{path.name}", path.read_bytes())
    expected = load(*created(folder))
    import vllm_model

    args = {"model": "s3://models/gptq/", "model_loader_extra_config": asked(server.port)}
    config = vllm_model.configured(args, "penstock")
    about = get_safetensors_params_metadata(config.model_config.model)
    assert about == get_safetensors_params_metadata(str(folder)) != {}
    assert load(*vllm_model.created(config), config) == expected


def test_a_draft_of_the_same_checkpoint(server: Server, alone: None, checkpoint: Any, temporary: Path):
    import vllm_model

    def loaded(model: str, load_format: str, **more: Any) -> dict[str, str]:
        config = vllm_model.configured({"model": model, **DRAFTS["deepseek-mtp"], **more}, load_format)
        return load(*vllm_model.created(config), config)

    folder = checkpoint("deepseek-mtp")
    for path in folder.iterdir():
        server.put(f"draft/{path.name}", path.read_bytes())
    expected = loaded(str(folder), "safetensors")
    assert loaded("s3://models/draft/", "penstock", model_loader_extra_config=asked(server.port)) == expected


@pytest.mark.parametrize("engine", ["vllm", "sglang"])
def test_the_report_of_a_start(server: Server, temporary: Path, monkeypatch: pytest.MonkeyPatch, engine: str):
    monkeypatch.setenv("TMPDIR", str(temporary))
    found = report("s3://models/qwen3-moe/", engine=engine, extra_config=asked(server.port), device="cpu")
    (rank,) = found["ranks"]
    assert rank["load"]["loads"] == 1 and rank["load"]["fallbacks"] == []


def test_a_vllm_whose_interface_differs_refuses_addresses(alone: None, monkeypatch: pytest.MonkeyPatch):
    from penstock.integrations._vllm_arguments import install
    from vllm.engine.arg_utils import EngineArgs

    class Other(EngineArgs):  # type: ignore[misc]
        create_engine_config = None

    # As vLLM's AsyncEngineArgs, which has an __init__ of its own
    served = dataclasses.dataclass(type("Served", (Other,), {}))
    install(Other)
    for made in (Other, served):
        given = made(model="s3://models/whole", load_format="penstock")
        with pytest.raises(penstock.UnsupportedError, match=r"lacks create_engine_config.*give a folder"):
            given.create_model_config()


def test_a_model_that_is_not_there(server: Server, alone: None, temporary: Path):
    import vllm_model

    args = {"model": "s3://models/none", "model_loader_extra_config": asked(server.port)}
    with pytest.raises(penstock.NotFoundError, match="no object whose key begins with this") as caught:
        vllm_model.configured(args, "penstock")
    assert caught.value.path == "s3://models/none/"
    assert list(temporary.iterdir()) == []


@contextmanager
def program(name: str, *args: Path) -> Iterator[list[int]]:
    """A server of tests/, and its ports."""
    command = [sys.executable, str(HERE.parent / name), *map(str, args)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            ports = [int(port) for port in process.stdout.readline().split()]
            # What it says from now on is not wanted
            threading.Thread(target=process.stdout.read, daemon=True).start()
            yield ports
        finally:
            process.kill()


def test_a_web_server(expected: dict[str, str], checkpoint: Any, without_weights: Any, temporary: Path, tmp_path: Path):
    authority, *certificate = certificates.made(tmp_path)
    with program("web_server.py", checkpoint("qwen3-moe"), *certificate) as (port,):
        weights = f"https://localhost:{port}/model.safetensors.index.json"
        given = created(without_weights("qwen3-moe"), weights=weights, storage={"ca": str(authority)})
        assert load(*given) == expected
    assert list(temporary.iterdir()) == []


def test_the_hub(
    expected: dict[str, str],
    checkpoint: Any,
    without_weights: Any,
    temporary: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
):
    import vllm_model

    hub, commit = tmp_path / "hub", "0123456789abcdef" * 2 + "01234567"
    shutil.copytree(checkpoint("qwen3-moe"), hub / "org/name" / commit)
    (hub / "state.json").write_text(json.dumps({"repositories": {"org/name": {"refs": {"main": commit}}}}))
    given = created(without_weights("qwen3-moe"), weights="hf://org/name")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)  # vLLM looks at this
    with program("hub_server.py", hub) as (port, _):
        monkeypatch.setenv("HF_HUB_OFFLINE", "0")
        monkeypatch.setenv("HF_HOME", str(tmp_path / "home"))
        monkeypatch.setenv("HF_ENDPOINT", f"http://127.0.0.1:{port}")
        assert load(*given) == expected
        config = vllm_model.configured({"model": "hf://org/name"}, "penstock")
        assert list(config.load_config.model_loader_extra_config["weights"].values()) == [f"hf://org/name@{commit}"]
        assert load(*vllm_model.created(config), config) == expected
    assert not (tmp_path / "home").exists(), "nothing is kept"


def test_a_model_that_the_bucket_lacks(server: Server, alone: None, without_weights: Any, temporary: Path):
    given = extra("qwen3-moe", server.port)
    loader, model, config = created(without_weights("qwen3-moe"), **{**given, "weights": "s3://models/none/"})
    with pytest.raises(penstock.NotFoundError, match="s3://models/none/"):
        load(loader, model, config)
    assert list(temporary.iterdir()) == []


def test_reloads(
    server: Server, alone: None, checkpoint: Any, without_weights: Any, temporary: Path, monkeypatch: pytest.MonkeyPatch
):
    """`weights=` is read again, or the address that the reload names."""
    import stubs
    from test_vllm_reload import reload, served
    from vllm_model import digests, poison

    stubs.process_weights(monkeypatch)
    expected = digests(served(checkpoint("qwen3-moe"), "safetensors")[0])
    model, config = served(without_weights("qwen3-moe"), "penstock", **extra("qwen3-moe", server.port))
    assert digests(model) == expected
    for address in (None, "s3://models/qwen3-moe/model.safetensors.index.json"):
        poison(model)
        reload(model, config, address)
        assert digests(model) == expected
    assert list(temporary.iterdir()) == []


def test_what_cannot_be_deferred_is_an_error(
    server: Server,
    expected: dict[str, str],
    without_weights: Any,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
):
    """vLLM's own loader cannot read the files: its way is not an alternative."""

    def refuses(*args: Any, **kwargs: Any) -> None:
        raise penstock.UnsupportedError("no such luck")

    loader, model, config = created(without_weights("qwen3-moe"), **extra("qwen3-moe", server.port))
    monkeypatch.setattr(Recorder, "__init__", refuses)
    with caplog.at_level(logging.WARNING, "penstock"), pytest.raises(penstock.UnsupportedError, match="no such luck"):
        load(loader, model, config)
    assert "as the engine does" not in caplog.text


def test_tensors_of_the_files_that_an_engine_has_chosen(server: Server, checkpoint: Callable[[str], Path]):
    given = extra("qwen3-moe", server.port)
    remote = RemoteWeights(given["weights"], given["storage"])
    files = sorted(map(str, Path(remote.folder).iterdir()))
    assert [Path(file).name for file in files] == sorted(
        path.name for path in checkpoint("qwen3-moe").glob("*.safetensors")
    )
    assert len(files) > 1 and all(Path(file).stat().st_size == 0 for file in files)
    everything, keep = Chosen(files, remote).opened(None)
    assert keep is None
    _, keep = Chosen(files[1:], remote).opened(lambda name: "experts" not in name)
    assert keep is not None
    chosen = {name for name in everything if keep(name)}
    first = set(penstock.open(checkpoint("qwen3-moe") / Path(files[0]).name))
    assert chosen == {name for name in everything if name not in first and "experts" not in name} != set()
    remote.close()
    assert not Path(remote.folder).exists()
