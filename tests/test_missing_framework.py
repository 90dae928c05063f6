"""Without torch or numpy: every way in says what is missing, when it is called and not with the first tensor."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

#: Refuses to import the package `sys.argv[1]`, in the way `sys.argv[2]`.
REFUSED = """
import builtins, json, sys
missing, way, path, folder = sys.argv[1:]
if way == "none":
    sys.modules[missing] = None
elif way == "finder":
    class Hidden:
        def find_spec(self, name, path=None, target=None):
            if name.split(".")[0] == missing:
                raise ModuleNotFoundError(f"No module named {name!r}", name=name)
    sys.meta_path.insert(0, Hidden())
else:
    real = builtins.__import__
    def refusing(name, *args):
        if name.split(".")[0] == missing:
            raise ImportError(f"{name} is broken here", name=name)
        return real(name, *args)
    builtins.__import__ = refusing
    import importlib
    imports = importlib.import_module
    def importing(name, *args):
        if name.split(".")[0] == missing:
            raise ImportError(f"{name} is broken here", name=name)
        return imports(name, *args)
    importlib.import_module = importing
import penstock
from penstock._errors import MissingFrameworkError
"""

CALLS = """
framework, package = {"torch": ("pt", "torch"), "numpy": ("np", "numpy")}[missing]
checkpoint = penstock.open(folder)
calls = {
    "safe_open": lambda: penstock.safe_open(path, framework),
    "load_file": lambda: penstock.load_file(path, framework=framework),
    "load": lambda: checkpoint.load(framework=framework),
    "start": lambda: checkpoint.start(framework=framework),
    "stream": lambda: checkpoint.stream(framework=framework),
    "prefetch": lambda: penstock.safe_open(path, framework).prefetch(),
}
if missing == "torch":
    from penstock.compat import fastsafetensors, instanttensor
    group = fastsafetensors.SingleGroup()
    calls |= {
        "gpu": lambda: penstock.safe_open(path, "pt", "cuda:0"),
        "meta": lambda: checkpoint.load("meta", framework="pt"),
        "xpu": lambda: checkpoint.load("xpu", framework="pt"),
        "fastsafe_open": lambda: fastsafetensors.fastsafe_open(path, nogds=True, device="cpu"),
        "instanttensor": lambda: instanttensor.safe_open(path, "pt", "cpu"),
    }
if missing == "torch" and way != "import":  # these look for torch first and import it later
    calls |= {
        "instanttensor later": lambda: instanttensor.safe_open(path, "pt", "cpu", load_now=False),
        "fastsafetensors": lambda: fastsafetensors.SafeTensorsFileLoader(group, "cpu"),
        "ParallelLoader": lambda: fastsafetensors.ParallelLoader(group, [path], device="cpu"),
        "AutoLoader": lambda: fastsafetensors.AutoLoader(group, [path], device="cpu"),
        "ParallelSaver": lambda: fastsafetensors.ParallelSaver(),
    }
found = {}
for name, call in calls.items():
    try:
        call()
        found[name] = "nothing was raised"
    except MissingFrameworkError as error:
        found[name] = "right" if package in str(error) and f"framework={framework!r}" in str(error) else str(error)
    except BaseException as error:
        found[name] = f"{type(error).__name__}: {error}"
print(json.dumps(found))
"""


@pytest.mark.parametrize("way", ["none", "finder", "import"])
@pytest.mark.parametrize("missing", ["torch", "numpy"])
def test_a_framework_that_cannot_be_imported_is_told_at_once(small: Path, python: Callable[..., Any], missing, way):
    file = sorted(small.glob("*.safetensors"))[0]
    done = python(REFUSED + CALLS, missing, way, file, small)
    found = json.loads(done.stdout or "{}")
    assert found and set(found.values()) == {"right"}, (found, done.stderr)


def test_where_neither_is_there_the_default_says_so(small: Path, python: Callable[..., Any]):
    program = """
sys.modules["numpy"] = None
try:
    checkpoint = penstock.open(folder)
    print(len(checkpoint.load(framework="dlpack")))
    checkpoint.load()
except MissingFrameworkError as error:
    print("numpy" in str(error), isinstance(error, ImportError))
"""
    assert python(REFUSED + program, "torch", "none", "", small).stdout == "11\nTrue True\n"


@pytest.mark.parametrize("missing", ["torch", "numpy"])
def test_under_the_patch_safetensors_says_it_in_its_own_way(small: Path, python: Callable[..., Any], missing):
    pytest.importorskip("safetensors")
    program = """
import safetensors
framework = {"torch": "pt", "numpy": "np"}[missing]
def said():
    try:
        with safetensors.safe_open(path, framework) as file:
            file.get_tensor(file.keys()[0])
    except Exception as error:
        return type(error).__name__, str(error)
theirs = said()
with penstock.patch():
    print(said() == theirs, theirs)
"""
    file = sorted(small.glob("*.safetensors"))[0]
    done = python(REFUSED + program, missing, "none", file, small)
    assert done.stdout.startswith("True"), (done.stdout, done.stderr)


@pytest.mark.parametrize("missing", ["torch", "numpy"])
def test_load_into_needs_the_framework_of_its_destinations_alone(small: Path, python: Callable[..., Any], missing):
    program = """
if missing == "torch":
    import numpy
    name, into = "layers.0.attn.bias", numpy.zeros(40, "f4")
    name2, into2 = "layers.0.attn.weight", numpy.zeros((40, 48), "f4").T
else:
    import torch
    name, into = "layers.0.attn.bias", torch.zeros(40)
    name2, into2 = "layers.0.attn.weight", torch.zeros(40, 48).T
report = penstock.open(folder).load_into({name: into, name2: into2}, strict=False)
print(report.tensors)
"""
    done = python(REFUSED + program, missing, "finder", "", small)
    assert done.stdout == "2\n", done.stderr
