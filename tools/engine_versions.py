"""Runs chosen tests of tests/engines with each release of an engine, and keeps what it passed.

    .engines/venv/bin/python tools/engine_versions.py [RELEASE...] [--keep FILE] [--folder FOLDER] [--table]

A release is `vllm-0.32.0` or `sglang-0.5.22`. One that passes is to be named in `penstock.integrations._known`; without
RELEASE, it is all that are named there. Each has an environment of its own in FOLDER, with the engine alone in it:
torch and all else come from the environment that runs this script, which is that of `make engines`. `--table` prints
the table of docs/engines.md from FILE, and runs nothing.

Status 1: a test failed.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import os
import re
import subprocess
import sys
import sysconfig
import tempfile
import xml.etree.ElementTree as ElementTree
from pathlib import Path
from typing import Any

TOP = Path(__file__).resolve().parent.parent
KEPT = TOP / "tests" / "engines" / "versions.json"
ENVIRONMENTS = TOP / ".engines"
#: The chosen tests. Those whose ranks are forks of the tests' process come first: the others make groups in it.
CHOSEN = {
    "vllm": [
        "test_vllm.py",
        "test_vllm_preload.py",
        "test_vllm_drift.py",
        "test_vllm_failures.py::test_a_truncated_shard",
        "test_vllm_failures.py::test_of_a_tensor_in_two_shards_the_index_says_which",
        "test_vllm_failures.py::test_only_pickles_are_an_error_that_names_convert",
        "test_vllm_failures.py::test_a_tensor_of_another_shape",
        "test_vllm_failures.py::test_a_dtype_that_torch_lacks",
        "test_vllm_failures.py::test_a_shard_that_shrinks_meanwhile",
        "test_vllm_failures.py::test_what_cannot_be_deferred_is_an_error_that_says_how_to_accept_vllms_own_way",
        "test_vllm_failures.py::test_what_cannot_be_deferred_is_loaded_as_vllm_does_if_the_user_accepts_that",
        "test_vllm_failures.py::test_a_vllm_that_does_not_call_what_it_used_to_is_an_error",
        "test_vllm_failures.py::test_a_reload_that_does_not_call_what_it_used_to_is_an_error",
        "test_vllm_reload.py::test_twenty_reloads",
        "test_vllm_mapped.py::test_a_program_that_opens_a_file_in_the_middle_of_a_load",
        "test_vllm_mapped.py::test_a_file_without_a_lease_is_recorded",
        "test_vllm_mapped.py::test_reloads_out_of_mapped_files",
    ],
    "sglang": ["test_sglang.py"],
}
CHOSEN_BY = {"PENSTOCK_TEST_ENGINES": "1", "PENSTOCK_TEST_ENGINES_CHOSEN": "1"}
#: The rows of the table: what a test shows, by `file::name`. The first that matches counts.
GROUPS = {
    "version drift": r"test_vllm_drift::|test_vllm_failures::\w*does_not_call|test_sglang::\w*(other_names|release)",
    "out of mapped files": r"test_vllm_mapped::|test_vllm::\w*mapped_files",
    "reloads, updates": r"test_vllm_reload::|test_sglang::test_twenty_updates",
    "weight daemons": r"test_vllm_preload::",
    "parameters bit-equal": r"test_vllm::|test_sglang::test_(one_rank_gets|each_of_two)",
    "failures, options": r"",
}
#: Packages whose version a result names.
NAMED = ("torch", "transformers")


def environment(release: str, folder: Path) -> Path:
    """The interpreter of an environment with this release, which is made where it is not there."""
    engine, _, version = release.partition("-")
    try:
        if importlib.metadata.version(engine) == version:
            return Path(sys.executable)
    except importlib.metadata.PackageNotFoundError:
        pass
    made = folder / release
    command = [sys.executable, TOP / "tools" / "environment.py", made, "--torch", "--bare", f"{engine}=={version}"]
    # What that environment shows is behind what the new one has itself
    command += ["--path", TOP / "python", "--path", sysconfig.get_path("purelib")]
    subprocess.run(command, check=True)
    return made / "bin" / "python"


def ran(release: str, python: Path) -> dict[str, Any]:
    """What the tests say, and with what they ran."""
    engine, _, version = release.partition("-")
    query = f"import importlib.metadata as m, json; print(json.dumps([m.version(n) for n in {[engine, *NAMED]!r}]))"
    said = subprocess.run([python, "-c", query], check=True, capture_output=True, text=True, cwd=TOP).stdout
    has, *others = json.loads(said)
    if has != version:
        raise SystemExit(f"{python} has {engine} {has}, not {version}: remove that environment")
    with tempfile.TemporaryDirectory() as place:
        report = Path(place, "report.xml")
        tests = [str(Path("tests", "engines", name)) for name in CHOSEN[engine]]
        command = [str(python), "-m", "pytest", *tests, f"--junitxml={report}", "--durations=5"]
        command += ["-o", "timeout=3000"]  # the first test of a world waits for all of it
        subprocess.run(command, check=False, cwd=TOP, env={**os.environ, **CHOSEN_BY})
        if not report.exists():
            raise SystemExit(f"{release}: pytest has written no report")
        found = read(report)
    return {**dict(zip(NAMED, others, strict=True)), "python": sys.version.split()[0], **found}


def read(report: Path) -> dict[str, Any]:
    """The counts of a report of pytest by group, and what did not pass, with the reason."""
    groups: dict[str, dict[str, int]] = {}
    failed, skipped = [], set()
    for case in ElementTree.parse(report).iter("testcase"):
        name = f"{case.get('classname', '').rpartition('.')[2]}::{case.get('name', '')}"
        group = next(title for title, pattern in GROUPS.items() if re.match(pattern, name))
        outcome = "passed"
        if case.find("failure") is not None or case.find("error") is not None:
            outcome = "failed"
            failed.append(name)
        elif (skip := case.find("skipped")) is not None:
            outcome = "skipped"
            skipped.add(re.sub(r"/\S*/", "", skip.get("message", "")))
        counts = groups.setdefault(group, {"passed": 0, "skipped": 0, "failed": 0})
        counts[outcome] += 1
    return {"groups": groups, "failed": failed, "skipped": sorted(skipped)}


def in_order(kept: dict[str, Any]) -> list[str]:
    """Releases, vLLM first, the newest first."""

    def key(release: str) -> tuple[bool, list[int]]:
        engine, _, version = release.partition("-")
        return engine != "vllm", [-int(number) for number in re.findall(r"\d+", version)]

    return sorted(kept, key=key)


def table(kept: dict[str, Any]) -> list[str]:
    """The lines of the table of docs/engines.md."""
    names = {"vllm": "vLLM", "sglang": "SGLang"}
    releases = in_order(kept)
    heads = [f"{names[one.partition('-')[0]]} {one.partition('-')[2]}" for one in releases]
    lines = [f"| tests passed | {' | '.join(heads)} |", "|---" * (len(heads) + 1) + "|"]
    for group in sorted(GROUPS, key=list(GROUPS).index, reverse=True):
        lines.append(f"| {group} | {' | '.join(cell(kept[one]['groups'].get(group)) for one in releases)} |")
    return lines


def cell(counts: dict[str, int] | None) -> str:
    """What stands in the table of one group of tests."""
    if counts is None or not counts["passed"] + counts["failed"]:
        return "not there"
    said = [str(counts["passed"])]
    said += [f"{counts[key]} {key}" for key in ("failed", "skipped") if counts[key]]
    return ", ".join(said)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("releases", nargs="*", metavar="RELEASE")
    parser.add_argument("--keep", type=Path, default=KEPT, metavar="FILE", help="where results are kept")
    parser.add_argument("--folder", type=Path, default=ENVIRONMENTS, help="where environments are made")
    parser.add_argument("--table", action="store_true", help="print the table, run nothing")
    arguments = parser.parse_args()
    kept = json.loads(arguments.keep.read_text()) if arguments.keep.exists() else {}
    if not arguments.table:
        releases = arguments.releases or tested()
        for release in releases:
            if release.partition("-")[0] not in CHOSEN:
                parser.error(f"{release}: give vllm-VERSION or sglang-VERSION")
        for release in releases:
            kept[release] = ran(release, environment(release, arguments.folder))
            ordered = {one: kept[one] for one in in_order(kept)}
            arguments.keep.write_text(json.dumps(ordered, indent=2) + "\n")
        failed = [f"{release}: {name}" for release in releases for name in kept[release]["failed"]]
        print("\n".join(["", *table(kept), *failed]))
        sys.exit(1 if failed else 0)
    print("\n".join(table(kept)))


def tested() -> list[str]:
    from penstock.integrations._known import SGLANG, VLLM

    return [f"{engine.module}-{version}" for engine in (VLLM, SGLANG) for version in reversed(engine.tested)]


if __name__ == "__main__":
    main()
