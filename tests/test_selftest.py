"""`penstock selftest --gpu`: that its own code works, tried on the fake driver; what a run leaves; and its kit."""

from __future__ import annotations

import base64
import hashlib
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import zipfile
from pathlib import Path
from typing import Any

import fakegpu
import ordeal
import penstock
import pytest

ROOT = Path(__file__).parents[1]
PACKAGE = Path(penstock.__file__).parent
SUITE = PACKAGE / "selftest"
NO_GPU = 77

wants_fake = pytest.mark.skipif(not fakegpu.LIBRARY, reason=fakegpu.NO_LIBRARY)
#: Nothing of the surrounding run: neither its driver nor its plugins.
ENVIRONMENT = {
    name: value
    for name, value in os.environ.items()
    if name not in ("PENSTOCK_GPU_LIBRARY", "PENSTOCK_TEST_WHOLE") and not name.startswith("PYTEST_")
}


#: `make test` tries the first two, `make test-whole` all: each takes a process of its own and 6 to 18 s.
PARTS = ["bytes", "fences", "facts", "processes", "sweep", "peers", "ranks"]


def has_gpu() -> bool:
    return any(Path("/dev").glob("nvidia[0-9]*")) or Path("/dev/kfd").exists()


def in_its_environment(packages: Path, environment: dict[str, str]) -> dict[str, str]:
    """With the package in `packages`, and what the fake driver needs."""
    path = os.pathsep.join([str(packages), str(ROOT / "tests")])
    return {**ENVIRONMENT, "PYTHONPATH": path, **environment}


def run(packages: Path, out: Path, *arguments: str, **environment: str) -> tuple[int, dict[str, Any]]:
    """The status of a run of the suite in the package that lies in `packages`, and its results.json."""
    command = [sys.executable, "-m", "penstock.selftest.run", "--out", out, "--quick", *arguments]
    done = subprocess.run(
        command,
        env=in_its_environment(packages, environment),
        capture_output=True,
        text=True,
        check=False,
        timeout=600 * ordeal.load_factor(),
    )
    print(done.stdout[-8000:], done.stderr[-3000:])
    return done.returncode, json.loads((out / "results.json").read_text())


def pretended() -> dict[str, str]:
    # `make test-whole` runs the suite with all its parameters
    whole = {"PENSTOCK_TEST_WHOLE": os.environ.get("PENSTOCK_TEST_WHOLE", "")}
    return {"PENSTOCK_SELFTEST_FAKE": "1", "PENSTOCK_GPU_LIBRARY": f"cuda:{fakegpu.LIBRARY}", **whole}


@wants_fake
@pytest.mark.parametrize("part", PARTS if os.environ.get("PENSTOCK_TEST_WHOLE") else PARTS[:1])
def test_every_test_of_the_suite_runs_on_the_fake_driver(tmp_path: Path, part: str) -> None:
    status, found = run(PACKAGE.parent, tmp_path / "out", "--parts", part, "--budget", "590", **pretended())
    outcomes = {name: test for name, test in found["tests"].items() if test["outcome"] not in ("passed", "skipped")}
    assert outcomes == {} and status == 0
    assert [p["ended"] for p in found["parts"]] == ["to its end"]
    passed = [name for name, test in found["tests"].items() if test["outcome"] == "passed"]
    assert len(passed) > len(found["tests"]) // 2 or part == "ranks"  # which wants one GPU for two processes
    assert "On the fake driver" in (tmp_path / "out" / "results.md").read_text()
    tables = {
        "facts": {"facts of the driver", "beside a graph capture"},
        "fences": {"loads one after the other", "device memory"},
        "sweep": {"first loads of GPT-2, warm", "options, GPT-2, warm", "tensors of one size", "columns"},
    }
    assert tables.get(part, set()) <= found["tables"].keys()
    if part == "peers":
        assert len(found["tables"]) == 2
        for rows in found["tables"].values():
            assert {"ceiling: copy", "ceiling: direct"} & {row["contestant"] for row in rows}
            assert [row["GB/s"] for row in rows if row["contestant"] in ("penstock", "safetensors")]


@wants_fake
def test_a_part_that_needs_an_engine_is_skipped_with_the_reason_where_there_is_none(tmp_path: Path) -> None:
    status, found = run(PACKAGE.parent, tmp_path / "out", "--parts", "daemon", **pretended())
    assert status == 0 and found["tests"] == {}
    assert [part["ended"] for part in found["parts"]] == ["skipped: vllm is not installed in this environment"]
    assert "skipped: vllm is not installed" in (tmp_path / "out" / "results.md").read_text()


def test_without_a_gpu_the_run_says_so_and_ends_with_a_status_of_its_own(tmp_path: Path) -> None:
    if has_gpu():
        pytest.skip("there is a GPU here")
    status, found = run(PACKAGE.parent, tmp_path)
    assert status == NO_GPU
    assert found["machine"]["no GPU"] and found["tests"] == {} and found["tables"] == {}
    assert "There is no GPU here" in (tmp_path / "results.md").read_text()


@wants_fake
def test_the_fake_driver_is_no_gpu(tmp_path: Path) -> None:
    status, found = run(PACKAGE.parent, tmp_path, PENSTOCK_GPU_LIBRARY=f"cuda:{fakegpu.LIBRARY}")
    assert status == NO_GPU
    assert "fake driver" in found["machine"]["no GPU"]


LOSING = """
import os, signal, time

def test_one() -> None:
    pass

def test_two() -> None:
    os.kill(os.getpid(), signal.SIGSEGV)

def test_three() -> None:
    assert 1 == 2

def test_four() -> None:
    {four}
"""


def stand_in(folder: Path) -> Path:
    """A folder with a torch that has nothing: for runs that load nothing. The real one takes seconds to import."""
    torch = folder / "stand_in" / "torch"
    torch.mkdir(parents=True)
    (torch / "__init__.py").write_text("")
    return torch.parent


def changed(folder: Path, four: str) -> Path:
    """A folder with the package, other tests in the first part of its suite, and a stand-in for torch."""
    package = folder / "packages" / "penstock"
    package.mkdir(parents=True)
    for entry in PACKAGE.iterdir():
        if entry.name not in ("__pycache__", "selftest"):
            (package / entry.name).symlink_to(entry)
    shutil.copytree(SUITE, package / "selftest", ignore=shutil.ignore_patterns("__pycache__"))
    (package / "selftest" / "test_facts.py").write_text(LOSING.format(four=four))
    (package.parent / "torch").symlink_to(stand_in(folder) / "torch")
    return package.parent


@wants_fake
def test_a_test_that_ends_its_process_is_lost_and_the_others_are_not(tmp_path: Path) -> None:
    packages = changed(tmp_path, "pass")
    status, found = run(packages, tmp_path / "out", "--parts", "facts", **pretended())
    outcomes = [test["outcome"] for test in found["tests"].values()]
    assert (status, outcomes) == (1, ["passed", "lost", "failed", "passed"])
    page = (tmp_path / "out" / "results.md").read_text()
    assert "2 passed, 1 failed, 1 lost, 0 skipped" in page


@wants_fake
@pytest.mark.skipif(not os.environ.get("PENSTOCK_TEST_WHOLE"), reason="half a minute: make test-whole runs it")
def test_what_is_cut_off_keeps_what_it_had(tmp_path: Path) -> None:
    packages = changed(tmp_path, "time.sleep(600)")
    budget = str(30 * ordeal.load_factor())  # of which the part gets no more than its own limit
    status, found = run(packages, tmp_path / "out", "--parts", "facts", "--budget", budget, **pretended())
    outcomes = [test["outcome"] for test in found["tests"].values()]
    assert (status, outcomes) == (1, ["passed", "lost", "failed", "lost"])
    assert [part["ended"] for part in found["parts"]] == ["cut off"]


ENDLESS = """
import subprocess, sys, time

def test_one() -> None:
    pass

def test_two() -> None:
    subprocess.run([sys.executable, "-c", "import time; time.sleep(600)", "{mark}"])
"""


def still_there(mark: str) -> list[str]:
    """Command lines of the processes that have `mark` in theirs, or in their environment."""
    found = []
    for process in Path("/proc").iterdir():
        try:
            line, environment = (process / "cmdline").read_bytes(), (process / "environ").read_bytes()
        except OSError:  # no process, or one that is gone
            continue
        if mark.encode() in line + environment and int(process.name) != os.getpid():
            found.append(line.replace(b"\0", b" ").decode())
    return found


@wants_fake
@pytest.mark.parametrize("how", [signal.SIGTERM, signal.SIGINT, signal.SIGKILL])
def test_a_run_that_is_ended_in_the_middle_leaves_what_it_found_and_no_process(
    tmp_path: Path, how: signal.Signals
) -> None:
    """Killed outright it writes no more, and its journal has what there was."""
    packages, out = changed(tmp_path, "pass"), tmp_path / "out"
    (packages / "penstock" / "selftest" / "test_facts.py").write_text(ENDLESS.format(mark=tmp_path))
    command = [sys.executable, "-m", "penstock.selftest.run", "--out", out, "--quick", "--parts", "facts"]
    process = subprocess.Popen(command, env=in_its_environment(packages, pretended()), stdout=subprocess.DEVNULL)
    try:
        journal = out / "journal.jsonl"
        ordeal.soon(lambda: journal.exists() and "test_two" in journal.read_text(), 100)
        ordeal.soon(lambda: any("time.sleep(600)" in line for line in still_there(str(tmp_path))), 30)
        process.send_signal(how)
        status = process.wait(30 * ordeal.load_factor())
    finally:
        process.kill()
    assert status == (-how if how == signal.SIGKILL else 130)
    ordeal.soon(lambda: not still_there(str(tmp_path)), 20)
    assert '"test_facts.py::test_one", "outcome": "passed"' in journal.read_text()
    if how != signal.SIGKILL:
        found = json.loads((out / "results.json").read_text())
        assert [test["outcome"] for test in found["tests"].values()] == ["passed", "lost"]
        assert found["parts"][-1]["ended"] in ("terminated", "interrupted")
        assert "1 passed, 0 failed, 1 lost" in (out / "results.md").read_text()


SECRET = """
import getpass, os, socket, sys
from pathlib import Path
from . import results

def test_one() -> None:
    results.row("a table", path=str(Path.home() / "secret"), name=f"{getpass.getuser()}@{socket.gethostname()}")
    assert False, f"in {os.environ['PENSTOCK_SELFTEST_FILES']}/x and {sys.prefix}/y on {socket.gethostname()}"
"""


@wants_fake
def test_a_report_names_no_user_host_or_folder(tmp_path: Path) -> None:
    packages, home = changed(tmp_path, "pass"), tmp_path / "home" / "jane"
    (packages / "penstock" / "selftest" / "test_facts.py").write_text(SECRET)
    who = {"HOME": str(home), "LOGNAME": "jane.doe", "USER": "jane.doe"}
    status, found = run(packages, tmp_path / "out", "--parts", "facts", **pretended(), **who)
    assert status == 1 and len(found["tests"]) == 1
    texts = [(tmp_path / "out" / name).read_text() for name in ("results.json", "results.md")]
    for text in texts:
        assert "~/secret" in text and "USER@" in text and "FILES/x and PYTHON/y" in text
        for private in ("jane", str(tmp_path), sys.prefix):
            assert private not in text, private
        host = socket.gethostname()
        assert host == "localhost" or f"@{host}" not in text


# --- the kit --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("script", ["gpu_kit.sh", "gpu_run.sh", "lab.sh"])
def test_the_shell_scripts_are_well_formed(script: str) -> None:
    path = ROOT / "tools" / script
    subprocess.run(["bash", "-n", path], check=True)
    if shellcheck := shutil.which("shellcheck"):
        subprocess.run([shellcheck, path], check=True)
    assert os.access(path, os.X_OK)


def wheel(folder: Path, changed: dict[str, str] | None = None) -> Path:
    """This package as a wheel, as it lies in the tree, except for the text of some files."""
    package = Path(penstock.__file__).parent
    name = f"penstock-{penstock.__version__}"
    path = folder / f"{name}-cp310-abi3-linux_{os.uname().machine}.whl"
    contents = {f"penstock/{file.relative_to(package)}": file for file in package.rglob("*") if file.is_file()}
    files = {to: file.read_bytes() for to, file in contents.items() if "__pycache__" not in to}
    files |= {to: text.encode() for to, text in (changed or {}).items()}
    meta = {
        "METADATA": f"Metadata-Version: 2.1\nName: penstock\nVersion: {penstock.__version__}\n",
        "WHEEL": "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: false\n"
        f"Tag: cp310-abi3-linux_{os.uname().machine}\n",
    }
    record = []
    with zipfile.ZipFile(path, "w") as packed:
        for to, data in files.items():
            packed.writestr(to, data)
            record.append((to, data))
        for to, text in meta.items():
            packed.writestr(f"{name}.dist-info/{to}", text)
            record.append((f"{name}.dist-info/{to}", text.encode()))
        lines = [
            f"{to},sha256={base64.urlsafe_b64encode(hashlib.sha256(data).digest()).rstrip(b'=').decode()},{len(data)}"
            for to, data in record
        ]
        packed.writestr(f"{name}.dist-info/RECORD", "\n".join([*lines, f"{name}.dist-info/RECORD,,"]) + "\n")
    return path


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A kit as `make gpu-kit` makes it, without the peers, which would have to be fetched. Not to be written to."""
    project = tmp_path_factory.mktemp("made") / "project"
    for folder in ("tools", "dist", ".gpu/testing", ".gpu/wheels"):
        (project / folder).mkdir(parents=True)
    for tool in ("gpu_kit.sh", "gpu_run.sh"):
        shutil.copy(ROOT / "tools" / tool, project / "tools")
    wheel(project / "dist")
    # In place of a pip that can fetch nothing, which takes a second to say so of each wheel
    nothing = project / "python"
    nothing.write_text("#!/bin/sh\nexit 1\n")
    nothing.chmod(0o755)
    offline = {**ENVIRONMENT, "PYTHON": str(nothing)}
    done = subprocess.run(
        [project / "tools" / "gpu_kit.sh"], env=offline, capture_output=True, text=True, check=False, timeout=300
    )
    assert done.returncode == 0, done.stderr
    assert "fastsafetensors cannot be had" in done.stdout
    return project / ".gpu"


@pytest.fixture
def kit(made: Path, tmp_path: Path) -> Path:
    """A kit of the test's own."""
    return Path(shutil.copytree(made, tmp_path / "project" / ".gpu", symlinks=True))


def start(kit: Path, out: Path) -> subprocess.CompletedProcess[str]:
    # Penstock is the one of the wheel, not that of the tree
    clean = {name: value for name, value in ENVIRONMENT.items() if name != "PYTHONPATH"}
    return subprocess.run(
        ["bash", kit / "gpu_run.sh"],
        env={**clean, "OUT": str(out), "PYTHON": sys.executable},
        cwd=kit.parent,
        capture_output=True,
        text=True,
        check=False,
        timeout=300 * ordeal.load_factor(),
    )


def test_a_kit_on_a_machine_without_a_gpu_ends_soon_and_says_so(kit: Path, tmp_path: Path) -> None:
    if has_gpu():
        pytest.skip("there is a GPU here")
    done = start(kit, tmp_path / "out")
    assert done.returncode == NO_GPU, done.stdout + done.stderr
    assert "There is no GPU here" in done.stdout
    assert "There is no GPU here" in (tmp_path / "out" / "results.md").read_text()
    assert {path.name for path in (tmp_path / "out").iterdir()} == {
        "journal.jsonl", "log.txt", "results.json", "results.md"
    }  # fmt: skip


def test_a_kit_whose_wheel_does_not_fit_says_so(kit: Path, tmp_path: Path) -> None:
    [ours] = (kit / "wheels").glob("penstock-*.whl")
    ours.write_bytes(b"no wheel")
    done = start(kit, tmp_path / "out")
    assert done.returncode == 2
    assert "Penstock's wheel cannot be installed" in (tmp_path / "out" / "results.md").read_text()


@pytest.mark.sampled(1)
@wants_fake
@pytest.mark.parametrize("how", [signal.SIGTERM, signal.SIGKILL])
def test_a_kit_that_is_killed_leaves_what_it_found_and_no_process(
    kit: Path, tmp_path: Path, how: signal.Signals
) -> None:
    """Of the shell alone: the suite ends because the shell is gone, and writes its report."""
    out, endless = tmp_path / "out", ENDLESS.format(mark=tmp_path)
    wheel(kit / "wheels", {"penstock/selftest/test_facts.py": endless})
    clean = {name: value for name, value in ENVIRONMENT.items() if name != "PYTHONPATH"}
    environment = {**clean, **pretended(), "OUT": str(out), "PYTHON": sys.executable, "TMPDIR": str(tmp_path)}
    environment["PYTHONPATH"] = os.pathsep.join([str(ROOT / "tests"), str(stand_in(tmp_path))])
    command = ["bash", kit / "gpu_run.sh", "--parts", "facts", "--quick"]
    process = subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        journal = out / "journal.jsonl"
        ordeal.soon(lambda: journal.exists() and "test_two" in journal.read_text(), 150)
        ordeal.soon(lambda: any("time.sleep(600)" in line for line in still_there(str(tmp_path))), 30)
        process.send_signal(how)
        process.wait(30)
    finally:
        process.kill()
    ordeal.soon(lambda: not still_there(str(tmp_path)), 30)
    assert '"test_facts.py::test_one", "outcome": "passed"' in journal.read_text()
    assert "1 passed, 0 failed, 1 lost" in (out / "results.md").read_text()
