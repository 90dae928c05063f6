"""What the GPU kit asks of vLLM: its commands and methods are ones that this vLLM takes. On a GPU the kit runs them."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest
from penstock.selftest import daemon
from vllm.engine.arg_utils import EngineArgs
from vllm.utils.argparse_utils import FlexibleArgumentParser
from vllm_model import created, tensors

preload = pytest.importorskip("vllm.entrypoints.cli.preload", reason="this vLLM has no weight daemons")


def test_the_command_of_the_daemon_is_one_that_vllm_takes(checkpoint: Callable[[str], Path]) -> None:
    parser = FlexibleArgumentParser()
    command = preload.PreloadSubcommand()
    command.subparser_init(parser.add_subparsers(dest="command"))
    given = ["preload", "--model", str(checkpoint("llama")), "--load-format", "penstock", *daemon.options()]
    arguments = parser.parse_args([*given, "--weight-cache-socket-dir", "/tmp/p"])
    assert arguments.weight_cache_socket_dir == "/tmp/p"
    config = EngineArgs.from_cli_args(arguments).create_engine_config()
    assert config.load_config.load_format == "penstock"
    assert config.model_config.max_model_len == daemon.ARGUMENTS["max_model_len"]
    # The engine's arguments, by which it knows its daemon
    extra = {"socket_dir": "/tmp/p", "fallback": False}
    about = {"load_format": "ipc_cache", "model_loader_extra_config": extra}
    other = EngineArgs(model=str(checkpoint("llama")), **about, **daemon.ARGUMENTS).create_engine_config()
    assert other.model_config.dtype == config.model_config.dtype
    assert json.dumps(other.model_config.max_model_len) == json.dumps(config.model_config.max_model_len)


@pytest.mark.usefixtures("alone")
def test_digests_name_every_parameter_and_differ_where_a_byte_does(checkpoint: Callable[[str], Path]) -> None:
    from vllm_model import configured

    config = configured({"model": str(checkpoint("llama"))})
    _, model = created(config)
    worker = SimpleNamespace(model_runner=SimpleNamespace(get_model=lambda: model))
    found = daemon.Digests.penstock_digests(worker)
    assert set(found) == set(tensors(model))
    name, parameter = next(iter(model.named_parameters()))
    parameter.data.view(-1)[-1] = 1
    again = daemon.Digests.penstock_digests(worker)
    assert [one for one in found if found[one] != again[one]] == [name]
