"""The table of tested releases in docs/engines.md is what `make engines-versions` kept, and what `_known` names."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from penstock.integrations._known import SGLANG, VLLM

TOP = Path(__file__).parents[1]
TOOL = TOP / "tools" / "engine_versions.py"


@pytest.fixture(scope="module")
def tool() -> ModuleType:
    specification = importlib.util.spec_from_file_location("engine_versions", TOOL)
    assert specification is not None and specification.loader is not None
    module = importlib.util.module_from_spec(specification)
    specification.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def kept(tool: ModuleType) -> dict[str, Any]:
    if not tool.KEPT.exists():
        pytest.skip("no release was run with `make engines-versions`: there is no tests/engines/versions.json")
    found: dict[str, Any] = json.loads(tool.KEPT.read_text())
    return found


@pytest.mark.usefixtures("kept")
def test_the_table_of_the_docs_is_what_was_kept() -> None:
    made = subprocess.run([sys.executable, TOOL, "--table"], check=True, capture_output=True, text=True).stdout
    assert made in (TOP / "docs" / "engines.md").read_text(), f"put this into docs/engines.md:\n{made}"


def test_a_release_is_called_tested_if_all_of_its_tests_passed(tool: ModuleType, kept: dict[str, Any]) -> None:
    assert [name for name, one in kept.items() if one["failed"]] == []
    assert list(kept) == tool.tested(), "what is kept is what `_known` names, in the order of the table"
    for name, one in kept.items():
        counted = {group: counts["passed"] for group, counts in one["groups"].items()}
        wanted = set(tool.GROUPS) - ({"weight daemons", "out of mapped files"} if name.startswith("sglang") else set())
        assert set(counted) == wanted, name
        assert all(counted.values()), f"{name}: {counted}"


@pytest.mark.usefixtures("kept")
def test_three_minor_releases_of_vllm_and_two_of_sglang_are_tested() -> None:
    assert len(VLLM.tested) >= 3
    assert len(SGLANG.tested) >= 2


REPORT = """<testsuites><testsuite>
<testcase classname="tests.engines.test_vllm" name="test_parameters_are_the_same[tp1-llama-0]" />
<testcase classname="tests.engines.test_vllm" name="test_what_vllm_copies_out_of_mapped_files[a]"><failure/></testcase>
<testcase classname="tests.engines.test_vllm_failures" name="test_a_vllm_that_does_not_call[a]" />
<testcase classname="tests.engines.test_vllm_failures" name="test_a_shard"><skipped message="at /a/b.py"/></testcase>
<testcase classname="tests.engines.test_sglang" name="test_twenty_updates[single]"><error/></testcase>
</testsuite></testsuites>"""


def test_a_report_of_pytest_is_counted_by_what_its_tests_show(tool: ModuleType, tmp_path: Path) -> None:
    (tmp_path / "report.xml").write_text(REPORT)
    found = tool.read(tmp_path / "report.xml")
    assert found["failed"] == [
        "test_vllm::test_what_vllm_copies_out_of_mapped_files[a]",
        "test_sglang::test_twenty_updates[single]",
    ]
    assert found["skipped"] == ["at b.py"]
    assert {group: tuple(counts.values()) for group, counts in found["groups"].items()} == {
        "parameters bit-equal": (1, 0, 0),
        "out of mapped files": (0, 0, 1),
        "version drift": (1, 0, 0),
        "failures, options": (0, 1, 0),
        "reloads, updates": (0, 0, 1),
    }
    assert [tool.cell(counts) for counts in found["groups"].values()] == [
        "1",
        "0, 1 failed",
        "1",
        "not there",
        "0, 1 failed",
    ]


def test_releases_are_in_order_of_engine_and_number(tool: ModuleType) -> None:
    given = ["sglang-0.5.9", "vllm-0.9.0", "vllm-0.31.0", "sglang-0.5.23"]
    assert tool.in_order(dict.fromkeys(given)) == ["vllm-0.31.0", "vllm-0.9.0", "sglang-0.5.23", "sglang-0.5.9"]
