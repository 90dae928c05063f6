"""Every fence between torch and the core is missed when it is taken out.

The fences within the core are taken out one by one in crates/core/tests/load_gpu.rs.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import fakegpu
import penstock
import pytest
from fakegpu import FakeTorch, fresh, torch_on
from penstock import _accelerator
from penstock.synthetic import synth
from penstock.synthetic.synth import Tensor

pytestmark = pytest.mark.skipif(not fakegpu.LIBRARY, reason=fakegpu.NO_LIBRARY)


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    tensors = [Tensor(f"layers.{i}.w", "F32", (3, 1 << 18)) for i in range(4)]
    tensors += [Tensor(f"layers.{i}.small", "F32", (77,)) for i in range(40)]
    return synth.write_file(tmp_path_factory.mktemp("gpu") / "x.safetensors", tensors)


def load(gpu: FakeTorch, file: Path) -> None:
    penstock.open(file).load("cuda:0")


def stream(gpu: FakeTorch, file: Path) -> None:
    for _ in penstock.open(file).stream("cuda:0", window="4MiB"):
        pass


def load_into(gpu: FakeTorch, file: Path) -> None:
    opened = penstock.open(file)
    opened.load_into({name: gpu.destination(tensor) for name, tensor in opened.load("cpu").items()})


WAYS = [load, stream, load_into]


def misuses(
    monkeypatch: pytest.MonkeyPatch, file: Path, way: Callable[[FakeTorch, Path], None], *, fenced: bool
) -> list[str]:
    monkeypatch.setenv("PENSTOCK_GPU_LIBRARY", f"cuda:{fakegpu.LIBRARY}")
    with fresh(checked=False) as fake:
        with torch_on(fake, monkeypatch) as gpu:
            gpu.fenced = fenced
            try:
                way(gpu, file)
            except penstock.DeviceError as error:
                return [*fake.misuses, str(error)]
            finally:
                gpu.close()
        return fake.misuses


@pytest.mark.parametrize("way", WAYS)
def test_without_the_event_memory_still_in_use_is_overwritten(
    monkeypatch: pytest.MonkeyPatch, file: Path, way: Callable[[FakeTorch, Path], None]
) -> None:
    assert misuses(monkeypatch, file, way, fenced=True) == []
    log = misuses(monkeypatch, file, way, fenced=False)
    assert any("unordered-access" in line and "kernel that writes" in line for line in log), log


@pytest.mark.parametrize("way", WAYS)
def test_an_event_that_nobody_keeps_is_gone_too_early(
    monkeypatch: pytest.MonkeyPatch, file: Path, way: Callable[[FakeTorch, Path], None]
) -> None:
    fence = _accelerator.Accelerator.fence
    monkeypatch.setattr(_accelerator.Accelerator, "fence", lambda self: (fence(self)[0], None))
    log = misuses(monkeypatch, file, way, fenced=True)
    assert any("dead-handle" in line for line in log), log


@pytest.mark.sampled(1)
@pytest.mark.parametrize("unfenced", [True, False])  # the second one shows that the first one fails for its reason
def test_the_suite_of_loads_fails_without_that_fence(unfenced: bool) -> None:
    here = Path(__file__).parent
    chosen = "byte_for_byte and (gpt2 or misaligned) or load_into_waits or begin_with_an_empty"
    # Plain assertions: pytest would spend minutes on the difference between two wrong tensors of megabytes.
    plain = ["-q", "-p", "no:cacheprovider", "--assert=plain", "--tb=line"]
    command = [sys.executable, "-m", "pytest", *plain, here / "test_gpu_loads.py", "-k", chosen]
    more: dict[str, Any] = {fakegpu.UNFENCED: "1"} if unfenced else {}
    run = subprocess.run(
        command, capture_output=True, text=True, cwd=here.parent, env={**os.environ, **more}, check=False, timeout=300
    )
    summary = run.stdout.splitlines()[-1]
    if unfenced:
        assert run.returncode == 1 and "4 error" in summary, run.stdout
    else:
        assert run.returncode == 0 and "4 passed" in summary, run.stdout
