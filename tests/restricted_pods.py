"""Pods as `tools/pod` makes them, for the tests that `make pod` runs: they need root, libseccomp and the profile.

PENSTOCK_TEST_PODS names the seccomp profile that containerd gives a pod with RuntimeDefault.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import ordeal
import penstock
import pytest

ROOT = Path(__file__).parent.parent
INSIDE = Path(__file__).with_name("pods") / "inside.py"
PROFILE = Path(os.environ.get("PENSTOCK_TEST_PODS", "")).resolve()
#: Seconds until a pod is given up: it hangs.
PATIENCE = 300.0


@dataclass
class Ended:
    """What a pod's process said, and what came of its limits."""

    said: str
    errors: str
    facts: dict[str, Any]

    @property
    def result(self) -> dict[str, Any]:
        found: dict[str, Any] = json.loads(self.said.splitlines()[-1])
        return found

    @property
    def fallbacks(self) -> list[tuple[str, str]]:
        return [(one["from"], one["to"]) for one in self.result["fallbacks"]]


@dataclass
class Pods:
    """Makes pods. ``folder`` is for what is between them and the tests."""

    folder: Path
    options: list[str] = field(default_factory=list)

    def command(self, command: list[str], *options: str, **variables: str) -> list[str]:
        python = Path(penstock.__file__).parent.parent
        variables = {"PYTHONPATH": os.pathsep.join(map(str, (python, ROOT / "tests"))), **variables}
        return [
            sys.executable, str(ROOT / "tools/pod"), "--profile", str(PROFILE), "--image", str(ROOT),
            "--image", str(python), *options,
            *(f"--env={name}={value}" for name, value in variables.items()), "--", *command,
        ]  # fmt: skip

    def run(self, command: list[str], *options: str, status: int = 0, **variables: str) -> Ended:
        """What a command says in a pod, which must end with this status, and not be killed for its memory."""
        facts = self.folder / "facts.json"
        facts.unlink(missing_ok=True)
        line = self.command(command, "--facts", str(facts), *options, **variables)
        child = subprocess.Popen(
            line, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )
        try:
            code, said, errors = ordeal.finish(child, PATIENCE)
        finally:
            child.kill()
        found = json.loads(facts.read_text()) if facts.exists() else {}
        if code != status:
            raise ordeal.Died(f"status {code}\n{said}\n{errors}\n{found}")
        assert found.get("oom_kill", 0) == 0, found
        return Ended(said, errors, found)

    def python(self, specification: dict[str, Any], *options: str, **variables: str) -> Ended:
        """`inside.py` with this specification."""
        return self.run([sys.executable, str(INSIDE), json.dumps(specification)], *options, **variables)

    def penstock(self, *arguments: str, options: tuple[str, ...] = (), status: int = 0, **variables: str) -> Ended:
        """The command line."""
        return self.run([sys.executable, "-m", "penstock.cli", *arguments], *options, status=status, **variables)


@pytest.fixture
def pods(tmp_path: Path) -> Pods:
    if not PROFILE.is_file():
        pytest.fail(f"there is no seccomp profile {PROFILE}: `make pod` writes it")
    return Pods(tmp_path)


def digests(*files: Path) -> dict[str, str]:
    """By tensor, of the files' bytes: read here, without penstock, and a tensor at a time."""
    found = {}
    for path in files:
        start, header = ordeal.entries(path)
        with path.open("rb") as file:
            for name, entry in header.items():
                begin, end = entry["data_offsets"]
                file.seek(start + begin)
                found[name] = hashlib.md5(file.read(end - begin), usedforsecurity=False).hexdigest()
    return found


@dataclass
class Model:
    """A checkpoint, and what its tensors are."""

    folder: Path
    digests: dict[str, str]
    nbytes: int

    @property
    def files(self) -> list[Path]:
        return sorted(self.folder.glob("*.safetensors"))

    @property
    def volume(self) -> str:
        """An option of `tools/pod`."""
        return f"--volume={self.folder}:/models"

    def evict(self) -> None:
        for file in self.files:
            ordeal.evict(file)


def made(folder: Path, shards: int, tensors: int, nbytes: int) -> Iterator[Model]:
    """A checkpoint of random bytes that belongs to root and that all may read; it is removed afterwards."""
    folder.mkdir(exist_ok=True)
    try:
        for i in range(shards):
            name = f"model-{i + 1:05}-of-{shards:05}.safetensors" if shards > 1 else "model.safetensors"
            path = ordeal.write(folder / name, tensors, nbytes, seed=i)
            path.chmod(0o644)
        folder.chmod(0o755)
        files = sorted(folder.glob("*.safetensors"))
        yield Model(folder, digests(*files), shards * tensors * nbytes)
    finally:
        shutil.rmtree(folder)


@pytest.fixture(scope="session")
def mounted_model(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Model]:
    """56 MB in one file, with tensors at odd places."""
    yield from made(tmp_path_factory.mktemp("model") / "models", 1, 8, 7_000_001)


@pytest.fixture(scope="session")
def large_model(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Model]:
    """2 GB in four files."""
    yield from made(tmp_path_factory.mktemp("large") / "models", 4, 16, 32_000_001)


@pytest.fixture(scope="session")
def middling_model(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Model]:
    """400 MB in two files: a quarter of it is less than loads and saves take as staging memory elsewhere."""
    yield from made(tmp_path_factory.mktemp("middling") / "models", 2, 10, 20_000_001)


@pytest.fixture
def empty_dir(tmp_path: Path) -> Path:
    """A folder of the node's disk that everybody may write to, as the kubelet makes an emptyDir."""
    folder = tmp_path / "empty-dir"
    folder.mkdir()
    folder.chmod(0o777)
    return folder
