"""Facts of the driver, into tables, and that penstock sees the same."""

from __future__ import annotations

import os
import subprocess
import sys
from typing import Any

import pytest

import penstock

from .driver import Driver


@pytest.fixture
def cuda() -> None:
    if penstock._core.gpus()["vendor"] != "cuda":
        pytest.skip("the driver here is not CUDA's")


def of_its_own(*arguments: str, seconds: float) -> None:
    command = [sys.executable, "-m", "penstock.selftest.facts", *arguments]
    # In the folder of its files, which goes: cuFile writes a log into the working directory
    folder = os.environ.get("PENSTOCK_SELFTEST_FILES")
    done = subprocess.run(command, check=False, timeout=seconds, capture_output=True, text=True, cwd=folder)
    print(done.stdout)
    assert done.returncode == 0, done.stderr[-3000:]


@pytest.mark.usefixtures("cuda")
def test_facts_of_the_driver() -> None:
    of_its_own(seconds=50)


@pytest.mark.usefixtures("cuda")
def test_what_breaks_a_graph_capture() -> None:
    of_its_own("captures", seconds=50)


@pytest.mark.usefixtures("cuda")
def test_what_else_there_is() -> None:
    of_its_own("others", seconds=40)


@pytest.mark.usefixtures("cuda")
def test_penstock_sees_the_gpus_that_the_driver_shows() -> None:
    found = penstock._core.gpus()
    driver = Driver()
    driver("cuInit", 0)
    assert [gpu["name"] for gpu in found["gpus"]] == [driver.name(i) for i in range(len(found["gpus"]))]


def test_doctor_names_the_gpu(capsys: pytest.CaptureFixture[str]) -> None:
    from penstock import cli

    assert cli.main(["doctor"]) == 0
    assert penstock._core.gpus()["gpus"][0]["name"] in capsys.readouterr().out


def test_torch_and_penstock_count_the_same_gpus(gpu: Any) -> None:
    assert gpu.count == len(penstock._core.gpus()["gpus"])
