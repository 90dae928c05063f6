"""Ranks of SGLang: do tasks with its real loader, each in a process of its own, and write down what came of them.

    python sglang_rank.py SPEC.json

The specification has a log for each rank, the tasks in order, each with a port to meet at, and where the results go.
Importing SGLang takes 30 s of a processor, so that is done once: ranks and tasks are forks of the process that has.
"""

from __future__ import annotations

import functools
import gc
import hashlib
import json
import logging
import os
import signal
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import FunctionType
from typing import Any

# SGLang makes communicators of NCCL for every group of more than one rank, if it finds the library: torch brings it
os.environ["SGLANG_NCCL_SO_PATH"] = "/there/is/none"

import torch
from sglang.srt.arg_groups import choices, resolution_hooks
from sglang.srt.configs import load_config as config_module
from sglang.srt.configs.device_config import DeviceConfig
from sglang.srt.configs.load_config import LoadConfig, LoadFormat
from sglang.srt.configs.model_config import ModelConfig
from sglang.srt.distributed import parallel_state
from sglang.srt.model_executor.model_runner_components.weight_updater import WeightUpdater
from sglang.srt.model_loader import loader as loader_module
from sglang.srt.model_loader.loader import DefaultModelLoader, get_model_loader
from sglang.srt.models import registry  # noqa: F401 - imports every model, which takes seconds
from sglang.srt.plugins import load_plugins
from sglang.srt.runtime_context import SpawnRanks, get_model, get_parallel, get_serving, publish, reset_context
from sglang.srt.server_args import ServerArgs, prepare_server_args

#: What memory holds before a load: another byte for each of the two that are compared.
POISONS = {"safetensors": 0x5A, "penstock": 0xA7}


class Lines(logging.Handler):
    """Keeps what is logged."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.records: list[logging.LogRecord] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.records.append(record)

    def of_penstock(self) -> list[str]:
        return [one.getMessage() for one in self.records if one.name == "penstock"]

    def errors(self) -> list[str]:
        return [one.getMessage() for one in self.records if one.levelno >= logging.ERROR]


class Rank:
    """What a task has: its place among the ranks, and the model of this rank."""

    def __init__(self, size: int, rank: int, port: int) -> None:
        self.size, self.rank, self.port = size, rank, port
        self.lines = Lines()
        logging.getLogger().addHandler(self.lines)
        logging.getLogger("penstock").addHandler(self.lines)
        logging.getLogger("penstock").propagate = False

    def join(self, folder: str, **more: Any) -> ModelConfig:
        """Makes SGLang's groups and publishes the configuration, as its scheduler does."""
        fixed = {"device": "cpu", "dtype": "bfloat16", "tp_size": self.size, "skip_tokenizer_init": True}
        args = ServerArgs(model_path=folder, **{**fixed, **more})
        if not torch.distributed.is_initialized():
            parallel_state.init_distributed_environment(
                self.size, self.rank, f"tcp://127.0.0.1:{self.port}", self.rank, "gloo", timeout=60
            )
        else:
            parallel_state.destroy_model_parallel()
        reset_context()
        publish(args, role="scheduler", ranks=SpawnRanks(world_rank=self.rank))
        get_parallel().override_permanently(world_group=parallel_state._WORLD)
        parallel_state.initialize_model_parallel(backend="gloo")
        return ModelConfig.from_server_args(args)

    def load(self, config: ModelConfig, load_format: str, **more: Any) -> torch.nn.Module:
        """SGLang's own `load_model`, with parameters that are poisoned between their making and their loading."""
        loader = get_model_loader(LoadConfig(load_format=load_format, **more), config)
        with poisoned(POISONS[load_format]):
            model: torch.nn.Module = loader.load_model(model_config=config, device_config=DeviceConfig("cpu"))
        return model


@contextmanager
def poisoned(byte: int) -> Iterator[None]:
    make = loader_module._initialize_model

    def made(*args: Any, **kwargs: Any) -> Any:
        model = make(*args, **kwargs)
        for parameter in model.parameters():
            parameter.untyped_storage().fill_(byte)
        return model

    loader_module._initialize_model = made
    try:
        yield
    finally:
        loader_module._initialize_model = make


def digest(tensor: torch.Tensor) -> str:
    flat = tensor.detach().contiguous().reshape(-1).view(torch.uint8)
    return f"{hashlib.sha256(bytes(flat.numpy())).hexdigest()} {tuple(tensor.shape)} {tensor.dtype}"


def digests(model: torch.nn.Module) -> dict[str, str]:
    return {name: digest(one) for name, one in (*model.named_parameters(), *model.named_buffers())}


def different(one: dict[str, str], other: dict[str, str]) -> list[str]:
    return sorted(name for name in one.keys() | other.keys() if one.get(name) != other.get(name))


def addresses(model: torch.nn.Module) -> dict[str, int]:
    return {name: one.data_ptr() for name, one in (*model.named_parameters(), *model.named_buffers())}


def reports() -> list[dict[str, Any]]:
    from penstock.integrations import _sglang_loader

    keys = ("nbytes", "loads", "copies", "materialised", "materialised_bytes", "copied_through", "fallbacks")
    return [{key: one[key] for key in keys} for one in _sglang_loader.last_reports]


def left(model: torch.nn.Module) -> list[str]:
    """Names of parameters and buffers that are not ordinary tensors."""
    from penstock.integrations._deferred import Deferred

    return [name for name, one in (*model.named_parameters(), *model.named_buffers()) if isinstance(one.data, Deferred)]


def resident() -> int:
    """Bytes of this process that are in memory."""
    gc.collect()
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


# The tasks


def compare(rank: Rank, folder: str, args: dict[str, Any] | None = None, draft: bool = False) -> Any:
    """Loads a model both ways."""
    load_plugins()
    config = rank.join(folder, **(args or {}))
    if draft:
        config = ModelConfig.from_server_args(ServerArgs(model_path=folder, device="cpu"), is_draft_model=True)
    theirs = rank.load(config, "safetensors")
    untouched = "penstock.integrations._sglang_loader" not in sys.modules
    expected = digests(theirs)
    del theirs
    mine = rank.load(config, "penstock")
    without = kept(mine, POISONS["penstock"])
    elements = {name: one.numel() for name, one in mine.named_parameters() if name not in without}
    return {
        "model": type(mine).__name__,
        "untouched": untouched,
        "different": different(expected, digests(mine)),
        "left": left(mine),
        "parameters": len(list(mine.parameters())),
        "kept": without,
        "elements": sum(elements.values()) - padding(mine, without),
        "reports": reports(),
        "said": rank.lines.of_penstock(),
    }


def kept(model: torch.nn.Module, byte: int) -> list[str]:
    """Names of the parameters that nothing has been loaded into."""
    return sorted(
        name
        for name, one in model.named_parameters()
        if bool((one.detach().contiguous().view(-1).view(torch.uint8) == byte).all())
    )


def padding(model: torch.nn.Module, without: list[str]) -> int:
    """Elements of the rows that vocabularies are padded with on this rank."""
    from sglang.srt.layers.vocab_parallel_embedding import VocabParallelEmbedding

    return sum(
        (module.weight.shape[0] - module.shard_indices.num_org_elements) * module.weight.shape[1]
        for name, module in model.named_modules()
        if isinstance(module, VocabParallelEmbedding) and f"{name}.weight" not in without
    )


OWN_WAY = json.dumps({"strict": False})


def fallback(rank: Rank, folder: str, strict: bool = False) -> Any:
    """A load of what the recorder refuses. ``strict``: the user has not accepted SGLang's own way."""
    load_plugins()
    config = rank.join(folder)
    expected = digests(rank.load(config, "safetensors"))
    from penstock import UnsupportedError
    from penstock.integrations import _engine, _sglang_loader

    def refuse(*args: Any, **kwargs: Any) -> Any:
        raise UnsupportedError("no such luck")

    _engine.Recorder = refuse
    if strict:
        return {"refused": _caught(rank.load, config, "penstock")}
    mine = rank.load(config, "penstock", model_loader_extra_config=OWN_WAY)
    [report] = _sglang_loader.last_reports
    return {"different": different(expected, digests(mine)), "report": report, "said": rank.lines.of_penstock()}


def outside(rank: Rank, folder: str) -> Any:
    """Tensors that something other than a load of weights asks the loader for, as SGLang's expert backups do."""
    load_plugins()
    config = rank.join(folder)
    loader = get_model_loader(LoadConfig(load_format="penstock"), config)
    source = DefaultModelLoader.Source.init_new(config, None)
    return {name: [type(one).__name__, digest(one)] for name, one in loader._get_weights_iterator(source)}


def adapter(rank: Rank, folder: str, weights: str) -> Any:
    """An adapter, by SGLang's own class for it, while ``weights`` has the weights of the model that is served.

    And tensors that Penstock refuses: of an engine whose own way was not accepted, and of one where it was.
    """
    from safetensors.torch import save_file
    from sglang.srt.lora.lora import LoRAAdapter
    from sglang.srt.lora.lora_config import LoRAConfig

    load_plugins()
    config = rank.join(folder)
    given = {"weights": weights}
    made = LoadConfig(load_format="penstock", model_loader_extra_config=json.dumps(given))
    of_model = dict(get_model_loader(made)._get_weights_iterator(DefaultModelLoader.Source.init_new(config, None)))
    about = {"peft_type": "LORA", "target_modules": ["o_proj"], "r": 4, "lora_alpha": 8}
    with tempfile.TemporaryDirectory() as place:
        hidden = config.hf_config.hidden_size
        name = "base_model.model.model.layers.{}.self_attn.o_proj.lora_{}.weight"
        tensors = {name.format(layer, "A"): torch.full((4, hidden), layer + 1.0) for layer in range(2)}
        tensors |= {name.format(layer, "B"): torch.full((hidden, 4), layer + 3.0) for layer in range(2)}
        save_file(tensors, Path(place, "adapter_model.safetensors"))
        Path(place, "adapter_config.json").write_text(json.dumps(about))

        def loaded(**more: Any) -> Any:
            extra = json.dumps({**given, **more})
            made = LoadConfig(load_format="penstock", model_loader_extra_config=extra)
            one = LoRAAdapter("one", LoRAConfig(place), config.hf_config, made, None)
            one.initialize_weights()
            return {name: digest(tensor) for layer in one.layers for name, tensor in layer.weights.items()}

        found = {
            "expected": {name: digest(one) for name, one in tensors.items()},
            "adapter": _caught(loaded),
            "model": {name: digest(one) for name, one in of_model.items()},
        }
        _refuse_to_open()
        found |= {"strict": _caught(loaded), "accepted": _caught(loaded, strict=False)}
    return found | {"said": rank.lines.of_penstock()}


def _refuse_to_open() -> None:
    from penstock import UnsupportedError
    from penstock.integrations import _engine

    def refuse(*args: Any, **kwargs: Any) -> Any:
        raise UnsupportedError("no such luck")

    _engine.open_checkpoint = refuse


def elsewhere(
    rank: Rank,
    folder: str,
    weights: str,
    extra: list[dict[str, Any]] | None = None,
    args: dict[str, Any] | None = None,
) -> Any:
    """Loads the weights of another place than the model's: what lies in ``weights``, by each rank's ``extra``."""
    load_plugins()
    expected = digests(rank.load(rank.join(weights, **(args or {})), "safetensors"))
    config = rank.join(folder, **(args or {}))
    given = {"weights": weights} if extra is None else extra[rank.rank]
    mine = rank.load(config, "penstock", model_loader_extra_config=json.dumps(given))
    from penstock.integrations import _sglang_loader

    return {
        "different": different(expected, digests(mine)),
        "digests": digests(mine),
        "parameters": len(list(mine.parameters())),
        "left": left(mine),
        "reports": reports(),
        "network": [
            {key: one[key] for key in ("gap_bytes", "network", "exchange")} for one in _sglang_loader.last_reports
        ],
        "ranks": [exchanged(one) for one in _sglang_loader.last_reports],
        "path": config.model_path,
    }


def exchanged(report: dict[str, Any]) -> dict[str, Any]:
    """What a load read for all ranks, and what it got of the others."""
    read = sum(way["bytes"] for lane, way in report["routes"].items() if lane not in ("rank", "neighbour"))
    return {"read": read, "slack_bytes": report["slack_bytes"], "exchange": report["exchange"]}


def address(rank: Rank, place: str, weights: str, extra: list[dict[str, Any]], temporary: str) -> Any:
    """Loads the model at an address, by each rank's ``extra``: the same as lies in ``weights``."""
    load_plugins()
    tempfile.tempdir = temporary
    expected = digests(rank.load(rank.join(weights), "safetensors"))
    config = rank.join(place, load_format="penstock", model_loader_extra_config=json.dumps(extra[rank.rank]))
    folder = Path(config.model_path)
    mine = rank.load(config, get_model().load_format, model_loader_extra_config=get_model().model_loader_extra_config)
    from penstock.integrations import _fetched, _sglang_loader

    names = {path.name: path.stat().st_size for path in folder.iterdir()}
    _fetched.remove_all()  # this process is a fork, and ends without what Python does at exit
    return {
        "different": different(expected, digests(mine)),
        "parameters": len(list(mine.parameters())),
        "left": left(mine),
        "reports": reports(),
        "network": [
            {key: one[key] for key in ("gap_bytes", "network", "exchange")} for one in _sglang_loader.last_reports
        ],
        "path": str(folder),
        "tokenizer": get_serving().tokenizer_path,
        "served": get_serving().served_model_name,
        "names": names,
        "kept": [path.name for path in [folder] if path.exists()],
    }


def logged(rank: Rank, folder: str, index: str, bandwidth: int, none: str, empty: str) -> Any:
    """A slow load, one from a disk, two updates that fail, a load that fails, and one more: what SGLang logs of them is
    what it is about."""
    import penstock
    from penstock import _events
    from sglang.srt.utils.common import configure_logger

    load_plugins()
    config = rank.join(folder)
    # As its scheduler does it
    configure_logger(ServerArgs(model_path=folder, device="cpu"), prefix=f" TP{rank.rank}")
    _events.EVERY = 0.3
    os.environ["PENSTOCK_LOG"] = "json"

    def load(**extra: Any) -> torch.nn.Module:
        return rank.load(config, "penstock", model_loader_extra_config=json.dumps(extra))

    load(weights=index, storage={"bandwidth": bandwidth})
    model = load()
    said = [updater(model, config).update_weights_from_disk(place, "penstock") for place in (none, empty)]
    config = rank.join(folder)
    try:
        load(weights=none)
    except penstock.NotFoundError as error:
        said.append((False, str(error)))
    del os.environ["PENSTOCK_LOG"]
    load()
    return {"said": said}


def one_version(
    rank: Rank, folder: str, extra: dict[str, Any], folders: list[str], point: str, meeting: str, place: str
) -> Any:
    """A load of a model that is replaced at a point of it. Which of two versions the rank has then: 0, 1, or none.

    There a file is written into the folder ``meeting``, and a rank that is to wait goes on when there is another.
    """
    import penstock
    from penstock.integrations import _remote
    from penstock.integrations._recorder import Recorder

    load_plugins()
    expected = [digests(rank.load(rank.join(one), "safetensors")) for one in folders]

    def at(name: str) -> None:
        Path(meeting, f"{name}.at.{rank.rank}").write_text("")

    def hold(name: str) -> None:
        at(name)
        _until(Path(meeting, f"{name}.go").exists)

    if point == "next":
        hold("next")  # until its small files are there
    config = rank.join(folder)
    opens, run = _remote.open_checkpoint, Recorder.run

    def opened(*args: Any, **kwargs: Any) -> Any:
        if point == "opens" and rank.rank == 1:
            _until(Path(meeting, "opens.go").exists)
        found = opens(*args, **kwargs)
        if point == "opens" and rank.rank == 0:
            at("opens")
        return found

    def running(self: Recorder, *args: Any) -> Any:
        at("middle")
        return run(self, *args)

    _remote.open_checkpoint, Recorder.run = opened, running
    if point == "before":
        hold("before")

    def version(model: torch.nn.Module) -> list[int]:
        return [number for number, one in enumerate(expected) if not different(one, digests(model))]

    try:
        model = rank.load(config, "penstock", model_loader_extra_config=json.dumps(extra))
    except penstock.PenstockError as error:
        return {"failed": type(error).__name__, "text": str(error)}
    found = {"differ": expected[0] != expected[1], "version": version(model)}
    if point == "reload":
        hold("reload")
        found["update"] = updater(model, config).update_weights_from_disk(place, "penstock")
        found["reloaded"] = version(model)
    return found


def _until(there: Callable[[], bool]) -> None:
    limit = time.monotonic() + 60
    while not there():
        if time.monotonic() > limit:
            raise TimeoutError("it did not come")
        time.sleep(0.005)


def updater(model: torch.nn.Module, config: ModelConfig) -> WeightUpdater:
    """SGLang's own, without the runner that it is part of."""
    return WeightUpdater(
        tp_rank=get_parallel().tp_rank,
        device="cpu",
        gpu_id=0,
        model_config=config,
        custom_weight_loaders={},
        get_model=lambda: model,
        update_model_fields=lambda *args, **kwargs: None,
        recapture_cuda_graph=lambda: None,
        get_model_runner=lambda: None,
    )


def updates(rank: Rank, folders: list[str], times: int) -> Any:
    """`update_weights_from_disk`, again and again."""
    load_plugins()
    config = rank.join(folders[0])
    expected = [digests(rank.load(rank.join(folder), "safetensors")) for folder in folders]
    config = rank.join(folders[0])
    model = rank.load(config, "penstock")
    at, update = addresses(model), updater(model, config)
    found: dict[str, Any] = {"said": [], "different": [], "moved": [], "resident": [], "reports": []}
    for number in range(1, times + 1):
        good, text = update.update_weights_from_disk(folders[number % 2], "penstock")
        found["said"].append([good, text])
        found["different"] += different(expected[number % 2], digests(model))
        found["moved"] += [name for name, where in addresses(model).items() if at[name] != where]
        found["reports"] += reports()
        found["resident"].append(resident())
    before = resident()
    ballast = torch.ones(1 << 24)
    found["with 64 MiB more"] = resident() - before
    found["ballast"] = ballast.nbytes
    found["checkpoints differ in"] = len(different(*expected))
    found["parameters"] = len(list(model.parameters()))
    return found


def _caught(call: Callable[..., Any], *args: Any, **kwargs: Any) -> dict[str, Any]:
    try:
        return {"returned": call(*args, **kwargs)}
    except Exception as error:
        return {
            "type": type(error).__name__,
            "bases": [one.__name__ for one in type(error).__mro__],
            "text": str(error),
            "touched": getattr(error, "touched", None),
        }


#: Parts of a layer that SGLang fuses, by the name of what they become.
_FUSED = {"q_proj": "qkv_proj", "k_proj": "qkv_proj", "v_proj": "qkv_proj", "gate_proj": "gate_up_proj"}
_FUSED["up_proj"] = "gate_up_proj"


def _parameter_of(name: str) -> str:
    return ".".join(_FUSED.get(part, part) for part in name.split("."))


def failures(rank: Rank, folder: str, broken: dict[str, str], torn: str, shard: str) -> Any:
    """Updates and start-ups from checkpoints that are broken; one breaks between the recording and the load."""
    load_plugins()
    config = rank.join(folder)
    model = rank.load(config, "penstock")
    before, at = digests(model), addresses(model)
    found: dict[str, Any] = {}
    for name, path in broken.items():
        found[f"update {name}"] = _caught(updater(model, config).update_weights_from_disk, path, "penstock")
        found[f"update {name}"] |= {"different": different(before, digests(model)), "moved": at != addresses(model)}
        found[f"start {name}"] = _caught(rank.load, rank.join(path), "penstock")
        config = rank.join(folder)
    found["torn"] = _torn(rank, model, torn, shard)
    return found


def _torn(rank: Rank, model: torch.nn.Module, folder: str, shard: str) -> dict[str, Any]:
    """A load whose file is cut short when the first bytes have arrived. Again, if it came too late."""
    before, at, whole = digests(model), addresses(model), Path(shard).read_bytes()
    options = {"io": "threads", "extent": 4096, "depth": 1, "threads": 1}
    found: dict[str, Any] = {"attempts": 0, "touched": []}
    while not found["touched"] and found["attempts"] < 20:
        kept = {name: one.detach().clone() for name, one in model.named_parameters()}

        over = threading.Event()

        def tear(kept: dict[str, torch.Tensor] = kept, over: threading.Event = over) -> None:
            while not over.is_set():
                if not all(torch.equal(one[..., -1:], kept[name][..., -1:]) for name, one in model.named_parameters()):
                    os.truncate(shard, 4096)
                    return

        config = rank.join(folder)
        loader = get_model_loader(LoadConfig(load_format="penstock", model_loader_extra_config=options), config)
        weights = loader._get_weights_iterator(DefaultModelLoader.Source.init_new(config, model))
        thread = threading.Thread(target=tear)
        thread.start()
        caught = _caught(loader.load_weights_only, model, weights, torch.device("cpu"))
        over.set()
        thread.join()
        found |= caught | {
            "attempts": found["attempts"] + 1,
            "changed": different(before, digests(model)),
            "of touched": sorted({_parameter_of(name) for name in caught.get("touched") or ()}),
            "moved": at != addresses(model),
        }
        Path(shard).write_bytes(whole)
        for name, one in model.named_parameters():
            one.data.copy_(kept[name])
    return found


def parses(rank: Rank, folder: str) -> Any:
    """SGLang's argument parser before and after its plugins; and its configuration."""
    argv = ["--model-path", folder, "--device", "cpu", "--load-format", "penstock"]
    argv += ["--model-loader-extra-config", '{"threads": 2, "weights": "/elsewhere"}']

    def parsed() -> Any:
        try:
            return prepare_server_args(argv).load_format
        except SystemExit as error:
            return f"exit {error.code}"

    found: dict[str, Any] = {"before": parsed()}
    load_plugins()
    from penstock.integrations.sglang import register

    for _ in range(3):
        register()
    methods = [vars(DefaultModelLoader)[name] for name in ("_prepare_weights", "_get_weights_iterator")]
    methods.append(DefaultModelLoader.load_weights_only)
    plain = LoadConfig(load_format="safetensors", model_loader_extra_config={"num_threads": 2})
    found["plain"] = [plain.load_format.value, plain.model_loader_extra_config, hasattr(plain, "penstock")]
    found["wrapped before"] = [hasattr(one, "__wrapped__") for one in methods]
    found["loaded before"] = "penstock.integrations._sglang_loader" in sys.modules
    found["after"], found["choices"] = parsed(), choices.LOAD_FORMAT_CHOICES.count("penstock")
    extra = '{"threads": 2, "weights": "/elsewhere"}'
    mine = LoadConfig(load_format="Penstock", model_loader_extra_config=extra)
    found["mine"] = [mine.load_format is LoadFormat.SAFETENSORS, mine.model_loader_extra_config, mine.penstock[1]]
    found["loader"] = type(get_model_loader(mine)).__name__
    found["unknown"] = _caught(LoadConfig, load_format="penstock", model_loader_extra_config={"bogus": 1})
    found["not an object"] = _caught(LoadConfig, load_format="penstock", model_loader_extra_config="[1]")
    found["still unknown"] = _caught(LoadConfig, load_format="rocket")
    found["said"] = rank.lines.of_penstock()
    return found


def _rename(owner: Any, name: str, users: list[FunctionType], kept: bool = False) -> None:
    """Gives something of SGLang another name, everywhere that SGLang uses it. ``kept``: the old name is there too."""
    other = f"{name}_renamed"
    setattr(owner, other, vars(owner)[name])
    if not kept:
        delattr(owner, name)
    for user in users:
        names = tuple(other if one == name else one for one in user.__code__.co_names)
        assert names != user.__code__.co_names, f"{user.__qualname__} does not use {name}"
        user.__code__ = user.__code__.replace(co_names=names)


def _other_arguments() -> None:
    load = DefaultModelLoader.load_weights_only

    def load_weights_only(model: Any, weights: Any, target_device: Any, extra: Any = None) -> Any:
        return load(model, weights, target_device)

    DefaultModelLoader.load_weights_only = staticmethod(load_weights_only)


def _other_iterators() -> None:
    for name in ("safetensors_weights_iterator", "buffered_multi_thread_safetensors_weights_iterator"):
        _rename(loader_module, name, [DefaultModelLoader._get_weights_iterator], kept=True)


def _files_chosen_later() -> None:
    choose = DefaultModelLoader._get_weights_iterator

    @functools.wraps(choose)  # its form is as it was
    def _get_weights_iterator(self: Any, *args: Any, **kwargs: Any) -> Any:
        yield from choose(self, *args, **kwargs)

    DefaultModelLoader._get_weights_iterator = _get_weights_iterator


def _another_loader() -> None:
    load = DefaultModelLoader.load_model

    @functools.wraps(load)  # its form is as it was
    def load_model(self: Any, **kwargs: Any) -> Any:
        return load(DefaultModelLoader(LoadConfig(load_format="safetensors")), **kwargs)

    DefaultModelLoader.load_model = load_model


DRIFTS: dict[str, Callable[[], None]] = {
    "renamed": _other_iterators,
    "later": _files_chosen_later,
    "model": _another_loader,
    "choices": lambda: _rename(choices, "add_load_format_choices", []),
    "steps": lambda: _rename(resolution_hooks, "register_resolution_hook", []),
    "verify": lambda: _rename(LoadConfig, "_verify_load_format", [LoadConfig.__post_init__]),
    "class": lambda: _rename(config_module, "LoadConfig", []),
    "prepare": lambda: _rename(
        DefaultModelLoader,
        "_prepare_weights",
        [DefaultModelLoader._get_weights_iterator, DefaultModelLoader.resolve_model_weights],
    ),
    "iterator": lambda: _rename(DefaultModelLoader, "_get_weights_iterator", [DefaultModelLoader._get_all_weights]),
    "function": lambda: _rename(
        loader_module, "safetensors_weights_iterator", [DefaultModelLoader._get_weights_iterator]
    ),
    "threads": lambda: _rename(
        loader_module,
        "buffered_multi_thread_safetensors_weights_iterator",
        [DefaultModelLoader._get_weights_iterator],
    ),
    "load": lambda: _rename(DefaultModelLoader, "load_weights_only", [DefaultModelLoader.load_weights_and_postprocess]),
    "arguments": _other_arguments,
}


def drift(rank: Rank, folder: str, kind: str) -> Any:
    """A load with an SGLang in which something has another name."""
    DRIFTS[kind]()
    load_plugins()
    known = "penstock" in choices.LOAD_FORMAT_CHOICES
    config = rank.join(folder)
    expected = digests(rank.load(config, "safetensors"))
    found = {"known": known, "different": None}
    if known:
        found["strict"] = _caught(rank.load, config, "penstock")
        for _ in range(2):
            mine = rank.load(config, "penstock", model_loader_extra_config=OWN_WAY)
            found["different"] = different(expected, digests(mine))
    if kind == "steps":
        args = ServerArgs(model_path="s3://bucket/model", load_format="penstock", device="cpu")
        found["address"] = _caught(args.resolve_once)
    return found | {"said": list(dict.fromkeys(rank.lines.of_penstock())), "errors": rank.lines.errors()}


def untried(rank: Rank, folder: str) -> Any:
    """Loads with an SGLang of a release that nobody has tried, in which nothing else is different."""
    import sglang
    from penstock.integrations import _drift
    from penstock.integrations._known import SGLANG

    load_plugins()
    config = rank.join(folder)
    expected = digests(rank.load(config, "safetensors"))
    found: dict[str, Any] = {"tested": _drift.is_tested(SGLANG, sglang.__version__), "loads": []}
    rank.load(config, "penstock")
    found["before"] = rank.lines.of_penstock()
    sglang.__version__ = "0.9.0"
    for _ in range(2):
        mine = rank.load(config, "penstock")
        found["loads"] += [one["loads"] for one in reports()]
    return found | {"different": different(expected, digests(mine)), "said": rank.lines.of_penstock()}


TASKS: dict[str, Callable[..., Any]] = {
    one.__name__: one
    for one in [
        *(compare, fallback, outside, adapter, elsewhere, address),
        *(logged, one_version, updates, failures, parses, drift, untried),
    ]
}


def main(functions: dict[str, Callable[..., Any]]) -> None:
    torch.set_num_threads(1)  # threads of OpenMP do not survive a fork
    spec = json.loads(Path(sys.argv[1]).read_text())
    ranks = []
    for number, log in enumerate(spec["logs"]):
        ranks.append(os.fork())
        if ranks[-1] == 0:
            with Path(log).open("wb") as output:
                os.dup2(output.fileno(), 1)
                os.dup2(output.fileno(), 2)
            do(spec, number, functions)
            os._exit(0)
    sys.exit(max(os.waitstatus_to_exitcode(os.waitpid(rank, 0)[1]) for rank in ranks))


def do(spec: dict[str, Any], number: int, functions: dict[str, Callable[..., Any]]) -> None:
    """The tasks of one rank."""
    for task in spec["tasks"]:
        out = Path(f"{spec['out']}.{task['name']}.{number}.json")
        child = os.fork()
        if child == 0:
            signal.alarm(task.get("limit", 600))  # ends a process that hangs
            try:
                found = functions[task["do"]](Rank(spec["size"], number, task["port"]), **task.get("with", {}))
            except BaseException:
                found = {"error": traceback.format_exc()}
            out.write_text(json.dumps(found))
            # The first rank has the rendezvous store, which others may still read: an engine does not end after a load
            with suppress(Exception):
                if torch.distributed.is_initialized() and "error" not in found:
                    torch.distributed.barrier()
            os._exit(0)
        status = os.waitpid(child, 0)[1]
        if not out.exists():
            out.write_text(json.dumps({"error": f"the process ended with status {status}"}))


if __name__ == "__main__":
    main(TASKS)
