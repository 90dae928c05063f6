"""Which files of a folder the engines' loaders take with ``"files"``: Mistral's own, or those of transformers."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import penstock
import pytest
from on_cpu import ENVIRONMENT

#: Prints the names of the files that a loader prepares, and those of their tensors.
VLLM = """
import json, sys, torch
from pathlib import Path
from types import SimpleNamespace
from penstock.integrations import vllm as plugin
plugin.register()
from vllm.config import LoadConfig
from penstock.integrations._vllm_loader import PenstockModelLoader
loader = PenstockModelLoader(LoadConfig(load_format="penstock", model_loader_extra_config=json.loads(sys.argv[2])))
files = loader._prepare_weights(sys.argv[1], None, None, False, None)[1]
source = loader.Source(sys.argv[1], revision=None)
tensors = sorted(name for name, _ in loader._get_weights_iterator(source))
# vLLM has no ranks here: it asks for all weights of a model that it has not begun to serve
config = SimpleNamespace(model=sys.argv[1], revision=None)
assert sorted(name for name, _ in loader.get_all_weights(config, torch.nn.Linear(1, 1))) == tensors
print(json.dumps([sorted(Path(file).name for file in files), tensors]))
"""
SGLANG = """
import json, sys
from pathlib import Path
from penstock.integrations.sglang import _claim
from sglang.srt.configs.load_config import LoadConfig
from sglang.srt.model_loader import loader as sglang_loader
sglang_loader.get_server_args = lambda: None
config = LoadConfig(load_format="auto")
config.load_format, config.model_loader_extra_config = "penstock", json.loads(sys.argv[2])
_claim(config)
config.__post_init__()
loader = sglang_loader.DefaultModelLoader(config)
files = loader._prepare_weights(sys.argv[1], None, False)[1]
print(json.dumps([sorted(Path(file).name for file in files), None]))
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    import numpy as np

    folder = tmp_path_factory.mktemp("mistral")
    penstock.save_file({"theirs": np.ones(3, "f4")}, folder / "model.safetensors")
    penstock.save_file({"own": np.ones(3, "f4")}, folder / "consolidated.safetensors")
    (folder / "params.json").write_text("{}")
    return folder


@pytest.mark.parametrize("program", [VLLM, SGLANG], ids=["vllm", "sglang"])
def test_mistrals_own_files(folder, program):
    environment = {**os.environ, **ENVIRONMENT}

    def said(given: dict[str, str]) -> list[list[str] | None]:
        command = [sys.executable, "-c", program, str(folder), json.dumps(given)]
        done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=600, check=False)
        assert done.returncode == 0, done.stderr
        found: list[list[str] | None] = json.loads(done.stdout.splitlines()[-1])
        return found

    files, tensors = said({"files": "consolidated"})
    assert files == ["consolidated.safetensors"] and tensors in (["own"], None)
    if program == VLLM:
        command = [sys.executable, "-c", program, str(folder), '{"files": "other"}']
        failed = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=600, check=False)
        assert 'files=\'other\': give "model" or "consolidated"' in failed.stderr
