"""Environment variables whose values are not UTF-8: each is refused by name, none is passed over."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import penstock
import pytest
from penstock import Options

NOT_UTF8 = b"\xff\xfe1"


@pytest.fixture
def variable(monkeypatch: pytest.MonkeyPatch) -> Any:
    return lambda name: monkeypatch.setenv(name, os.fsdecode(NOT_UTF8))


@pytest.mark.parametrize("option", Options.names())
def test_an_option_is_refused(variable: Any, option: str):
    variable(f"PENSTOCK_{option.upper()}")
    with pytest.raises(ValueError, match=rf"PENSTOCK_{option.upper()}=.*must be UTF-8"):
        Options()


def test_the_stall_timeout_of_opening_is_refused(variable: Any, small: Any):
    variable("PENSTOCK_STALL_TIMEOUT")
    for call in (lambda: penstock.open(small), lambda: penstock._core.stall_timeout()):
        with pytest.raises(ValueError, match=r"PENSTOCK_STALL_TIMEOUT=.*must be UTF-8"):
            call()
    assert len(penstock.open(small, stall_timeout=60)) == 11  # given by argument: it does not count


@pytest.mark.parametrize(
    ("name", "arguments", "status"),
    [("PENSTOCK_IO", ["load"], 2), ("PENSTOCK_STALL_TIMEOUT", ["inspect"], 2), ("PENSTOCK_TRACEBACK", ["inspect"], 2)],
)
def test_the_command_line_names_it(small: Any, name: str, arguments: list[str], status: int):
    run = subprocess.run(
        [sys.executable, "-m", "penstock.cli", *arguments, str(small)],
        capture_output=True,
        env={**os.environb, name.encode(): NOT_UTF8},
        check=False,
    )
    assert run.returncode != 0
    assert name.encode() in run.stderr, run.stderr
    assert b"must be UTF-8" in run.stderr, run.stderr


#: penstock-patch is a package of its own, which need not be installed here.
START = f"""
import sys; sys.path.append({str(Path(__file__).parent.parent / "patch")!r})
import _penstock_patch; _penstock_patch.start()
"""


def test_the_patch_variable_is_refused(small: Any):
    run = subprocess.run(
        [sys.executable, "-W", "always", "-c", START],
        capture_output=True,
        env={**os.environb, b"PENSTOCK_PATCH": NOT_UTF8},
        check=False,
    )
    assert b"PENSTOCK_PATCH=" in run.stderr, run.stderr
    assert b"give 1 or 0" in run.stderr, run.stderr


def test_the_value_of_a_stores_setting_is_not_shown(variable: Any):
    variable("PENSTOCK_STORAGE_SECRET_ACCESS_KEY")
    with pytest.raises(ValueError, match=r"^PENSTOCK_STORAGE_SECRET_ACCESS_KEY: must be UTF-8$"):
        penstock.open("s3://bucket/model.safetensors")
