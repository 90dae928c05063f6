"""`vllm preload --load-format penstock`: vLLM's weight daemon on this GPU, and an engine that maps its weights.

It needs vLLM with weight daemons (0.33) in the environment of this suite. `make engines` has the same on a CPU, with
CUDA IPC replaced.
"""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import pytest

from . import daemon, results
from .gpus import FAKE

#: Seconds for one start of vLLM.
START = 140


def program(*arguments: str) -> str:
    command = [sys.executable, "-m", "penstock.selftest.daemon", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=START, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


def engine(model: Path, load_format: str, extra: dict[str, Any]) -> tuple[dict[str, Any], float]:
    """The tensors of an engine, and the seconds from the start of its process to its end."""
    begun = time.monotonic()
    said = program("start", str(model), load_format, json.dumps(extra))
    found: dict[str, Any] = json.loads(said.strip().splitlines()[-1])
    return found, time.monotonic() - begun


def test_an_engine_that_maps_a_daemons_weights_has_what_safetensors_gives(tmp_path: Path) -> None:
    """Without the `gpu` fixture: this process does not touch the GPU."""
    if FAKE:
        pytest.skip("vLLM runs on no fake GPU")
    if importlib.util.find_spec("vllm") is None:
        pytest.skip("vLLM is not installed in this environment")
    if importlib.util.find_spec("vllm.model_executor.model_loader.weight_cache") is None:
        pytest.skip("this vLLM has no weight daemons")
    model = tmp_path / "model"
    program("make", str(model))
    expected, of_files = engine(model, "safetensors", {})
    assert expected["digests"] and expected["tokens"]
    # The kernel takes 107 bytes of a socket's path, and vLLM's name has 87
    with tempfile.TemporaryDirectory(prefix="p", dir="/tmp") as sockets, (tmp_path / "log").open("w+") as log:
        command = [sys.executable, "-m", "vllm.entrypoints.cli.main", "preload", "--model", str(model)]
        command += ["--load-format", "penstock", "--weight-cache-socket-dir", sockets, *daemon.options()]
        serving = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT)
        try:
            limit = time.monotonic() + START
            while not list(Path(sockets).glob("*.sock")):
                log.seek(0)
                assert serving.poll() is None, log.read()[-3000:]
                assert time.monotonic() < limit, f"the daemon does not serve: {log.read()[-3000:]}"
                time.sleep(0.1)
            found, of_daemon = engine(model, "ipc_cache", {"socket_dir": sockets, "fallback": False})
        finally:
            serving.terminate()
            try:
                serving.wait(20)
            except subprocess.TimeoutExpired:
                serving.kill()
                serving.wait()
    assert found == expected
    results.row("a weight daemon", start="from files", seconds=of_files)
    results.row("a weight daemon", start="mapped", seconds=of_daemon)
