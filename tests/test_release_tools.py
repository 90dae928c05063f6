"""What a release is made of: the commit of a build, symbols of glibc, licences, bill of materials, containers."""

from __future__ import annotations

import importlib
import json
import os
import re
import shutil
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path
from types import ModuleType
from typing import Any

import penstock
import pytest
from penstock import _built, _core

ROOT = Path(__file__).parent.parent
EXTENSION = Path(_core.__file__)


def tool(name: str) -> ModuleType:
    """A module of tools/."""
    sys.path.insert(0, str(ROOT / "tools"))
    try:
        return importlib.import_module(name)
    finally:
        sys.path.remove(str(ROOT / "tools"))


# --- penstock --version ---------------------------------------------------------------------------------------------


def test_the_version_says_commit_features_and_platform(cli):
    first, commit, features, platform = cli("--version").stdout.splitlines()
    assert first == f"penstock {penstock.__version__}"
    assert re.fullmatch(r"commit (unknown|[0-9a-f]{40}(-dirty)?)", commit)
    assert {"abi3", "remote"} <= set(re.split(r"[ ,;]+", features.removeprefix("features ")))
    assert os.uname().machine in platform and f"Python {sys.version.split()[0]}" in platform


def test_doctor_says_the_same_as_version(cli, small):
    found = json.loads(cli("doctor", small, "--json", "--no-measure").stdout)
    assert found["build"] == {**_built.build(), "python": found["build"]["python"]}


def test_a_build_that_was_told_no_commit_says_unknown():
    script = (ROOT / "crates" / "python" / "build.rs").read_text()
    # git would be right at the time of the build only, and cargo would not run this again after a commit
    assert "PENSTOCK_COMMIT" in script and "unknown" in script and "Command" not in script


# --- PENSTOCK_PATCH -------------------------------------------------------------------------------------------------


def test_the_package_itself_reads_no_variable_in_every_interpreter():
    assert not list((ROOT / "python").rglob("*.pth"))
    assert [path.name for path in (ROOT / "patch").glob("*.pth")] == ["penstock_patch.pth"]
    assert ".pth" not in (ROOT / "pyproject.toml").read_text()


@pytest.mark.parametrize(("value", "said"), [("1", True), ("yes", True), ("0", False), ("", False)])
def test_doctor_says_that_nobody_reads_the_variable(python, small, value, said):
    code = """
import sys
sys.modules.pop("_penstock_patch", None)
import importlib.util
real = importlib.util.find_spec
importlib.util.find_spec = lambda name, *more: None if name == "_penstock_patch" else real(name, *more)
from penstock import _doctor
print("\\n".join(_doctor.examine(sys.argv[1], measure=False)["therefore"]))
"""
    run = python(code, small, PENSTOCK_PATCH=value)
    assert run.returncode == 0, run.stderr
    assert ("has no effect: the package that reads it" in run.stdout) is said
    assert ("penstock[patch]" in run.stdout) is said


def test_the_extra_and_its_package_have_one_version():
    assert 'patch = ["penstock-patch"]' in (ROOT / "pyproject.toml").read_text()
    assert tool("crates").version() == penstock.__version__


def test_the_package_that_reads_the_variable_asks_for_penstock_of_its_version(tmp_path):
    pytest.importorskip("hatchling")
    command = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(tmp_path)]
    subprocess.run(command, cwd=ROOT / "patch", check=True, capture_output=True)
    [wheel] = tmp_path.glob("*.whl")
    with zipfile.ZipFile(wheel) as packed:
        names = set(packed.namelist())
        info = f"penstock_patch-{penstock.__version__}.dist-info"
        said = packed.read(f"{info}/METADATA").decode()
    assert {name for name in names if "dist-info" not in name} == {"penstock_patch.pth", "_penstock_patch.py"}
    assert f"{info}/licenses/LICENSE" in names
    assert f"Requires-Dist: penstock=={penstock.__version__}\n" in said


# --- glibc ----------------------------------------------------------------------------------------------------------


def test_symbols_of_glibc_are_those_that_binutils_find():
    if (readelf := shutil.which("readelf")) is None:
        pytest.skip("binutils are not installed")
    said = subprocess.run([readelf, "-VW", EXTENSION], check=True, capture_output=True, text=True).stdout
    needed = said.partition(".gnu.version_r")[2]
    assert tool("glibc").glibc(EXTENSION.read_bytes()) == sorted(
        set(re.findall(r"Name: GLIBC_([0-9.]+)", needed)), key=tool("glibc").number
    )


def test_a_newer_glibc_than_allowed_is_a_failure(tmp_path):
    glibc = tool("glibc")
    newest = glibc.glibc(EXTENSION.read_bytes())[-1]
    wheel = tmp_path / "penstock-0-any.whl"
    with zipfile.ZipFile(wheel, "w") as packed:
        packed.write(EXTENSION, "penstock/_core.abi3.so")
        packed.writestr("penstock/__init__.py", "")
    for most, status in ((newest, 0), ("2.2", 1)):
        for path in (wheel, EXTENSION):
            command = [sys.executable, ROOT / "tools" / "glibc.py", "--most", most, path]
            done = subprocess.run(command, capture_output=True, text=True, check=False)
            assert done.returncode == status, done
            assert done.stdout.startswith("FAIL" if status else "pass") and f"GLIBC_ {newest}" in done.stdout


def test_a_wheel_without_a_shared_object_is_a_failure(tmp_path):
    wheel = tmp_path / "penstock-0-any.whl"
    zipfile.ZipFile(wheel, "w").close()
    command = [sys.executable, ROOT / "tools" / "glibc.py", wheel]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 1 and "no shared object" in done.stdout


# --- licences and the bill of materials -----------------------------------------------------------------------------


@pytest.fixture(scope="module")
def crates() -> Any:
    if shutil.which("cargo") is None:
        pytest.skip("cargo is not installed")
    try:
        return tool("crates").crates()
    except subprocess.CalledProcessError as error:
        pytest.skip(f"cargo metadata has failed, perhaps for lack of a network: {error}")


def test_the_licences_in_the_tree_are_those_of_the_crates_that_are_linked(crates):
    licences = tool("licences")
    head = licences.PAGE.read_text().partition(licences.RULE)[0]
    missing = [row for row in licences.rows(crates) if row not in head]
    assert not missing, f"run `make licences`: {missing}"
    linked = {crate.name for crate in crates if crate.linked}
    assert {"ring", "rustls", "pyo3", "io-uring", "penstock-core"} <= linked
    assert not {"pyo3-macros", "cc", "proptest", "windows-sys", "tempfile"} & linked


def test_the_bill_of_materials_is_the_same_each_time_and_names_no_machine(crates):
    sbom = tool("sbom")
    first, second = (json.dumps(sbom.bill("c" * 40, 1_700_000_000)) for _ in range(2))
    assert first == second
    assert str(ROOT) not in first and str(Path.home()) not in first
    found = json.loads(first)
    assert found["metadata"]["timestamp"] == "2023-11-14T22:13:20Z"
    listed = {component["bom-ref"]: component for component in found["components"]}
    for crate in crates:
        component = listed[f"pkg:cargo/{crate.key}"]
        assert component["scope"] == ("required" if crate.linked else "excluded")
        assert component.get("hashes", [{"content": None}])[0]["content"] == crate.checksum
    assert {"pkg:pypi/maturin", "pkg:pypi/plotly", f"pkg:pypi/penstock-patch@{penstock.__version__}"} <= set(listed)
    known = {*listed, found["metadata"]["component"]["bom-ref"]}
    for edge in found["dependencies"]:
        assert {edge["ref"], *edge["dependsOn"]} <= known


def test_the_bill_of_materials_passes_the_validator_of_cyclonedx(crates, tmp_path):
    pytest.importorskip("cyclonedx.validation.json")
    pytest.importorskip("jsonschema")
    bill = tmp_path / "penstock.cdx.json"
    bill.write_text(json.dumps(tool("sbom").bill("c" * 40, 1_700_000_000)))
    assert tool("release").validate(bill) is None
    broken = json.loads(bill.read_text())
    broken["components"][0]["type"] = "crate"
    bill.write_text(json.dumps(broken))
    assert tool("release").validate(bill) is not None


# --- workflow and containers ----------------------------------------------------------------------------------------


def test_two_sdists_of_one_commit_have_the_same_bytes_and_nothing_that_a_build_leaves(tmp_path):
    release = tool("release")
    packed = []
    for place, mask in (("a", 0o022), ("another/place", 0o077)):
        folder, wheel, path = (
            tmp_path / place / name for name in ("penstock-1", "penstock-1.whl", "penstock-1.tar.gz")
        )
        (folder / "patch").mkdir(parents=True)
        before = os.umask(mask)
        try:
            for name in ("Cargo.toml", "patch/hook.py"):
                (folder / name).write_text(name)
        finally:
            os.umask(before)
        with zipfile.ZipFile(wheel, "w") as made:
            made.writestr("penstock-1.dist-info/METADATA", "Name: penstock\n")
        cached = folder / "patch" / "__pycache__" / "hook.cpython-311.pyc"
        cached.parent.mkdir()
        cached.write_text(place)
        release.sdist(folder, wheel, path, release.Commit("0" * 40, 1_700_000_000))
        packed.append(path.read_bytes())
        with tarfile.open(path) as tar:
            assert tar.getnames() == [f"penstock-1/{name}" for name in ("Cargo.toml", "PKG-INFO", "patch/hook.py")]
    assert packed[0] == packed[1]


def test_the_workflow_publishes_what_was_built_twice_without_a_stored_token():
    yaml = pytest.importorskip("yaml")
    text = (ROOT / ".github/workflows/release.yml").read_text()
    jobs = yaml.safe_load(text)["jobs"]
    assert jobs["publish"]["needs"] == "same" and jobs["same"]["needs"] == "build"
    assert jobs["publish"]["permissions"]["id-token"] == "write"
    assert "secrets." not in text and "password" not in text
    for step in (step for job in jobs.values() for step in job["steps"]):
        if "uses" in step:
            assert re.fullmatch(r"[\w-]+/[\w-]+@[0-9a-f]{40}", step["uses"]), step["uses"]
    assert any(step.get("run") == "make release" for step in jobs["build"]["steps"])


def test_every_file_that_a_container_copies_is_one_of_a_release():
    for path in sorted((ROOT / "containers").glob("*.Containerfile")):
        lines = path.read_text().replace("\\\n", " ").splitlines()
        first = [line.split()[0] for line in lines if line and line[0] != "#"]
        known = {"ARG", "FROM", "LABEL", "RUN", "COPY", "ENV", "USER", "WORKDIR", "ENTRYPOINT", "CMD"}
        assert {"FROM", "RUN", "COPY"} <= {word for word in first if word.isupper()} <= known, path
        for line in lines:
            if line.startswith("COPY") and "--from" not in line:
                assert line.split()[1:-1] == ["dist/*.whl", "dist/SHA256SUMS"], path
            if line.startswith("FROM") and "${" not in line:
                assert ":" in line, f"{path}: an image without a tag"


def test_the_vllm_container_has_the_version_that_is_tested():
    tested = re.search(r"vllm==([0-9.]+)", (ROOT / "Makefile").read_text())
    assert tested is not None
    assert f"ARG VLLM=v{tested[1]}\n" in (ROOT / "containers" / "vllm.Containerfile").read_text()
