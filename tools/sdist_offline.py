"""Builds a wheel from a release's sdist with the network cut, and loads a checkpoint with it.

    python tools/sdist_offline.py FOLDER

FOLDER has the release. `unshare --net` cuts the network. Where this user may make no network namespace, this fails and
says so. cargo has an empty home, so no crate can come from its cache. pip installs the wheel into an
environment of its own.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tarfile
import tempfile
import venv
from pathlib import Path

CUT = ["unshare", "--user", "--map-root-user", "--net"]
LOAD = """
import json, socket, struct, sys
from pathlib import Path
import penstock
head = json.dumps({"a": {"dtype": "I32", "shape": [3], "data_offsets": [0, 12]}}).encode()
Path("a.safetensors").write_bytes(struct.pack("<Q", len(head)) + head + struct.pack("<3i", 1, 2, 3))
[(name, tensor)] = penstock.load_file("a.safetensors", framework="dlpack").items()
print("loaded", name, penstock._core.built()[0])
"""


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("folder", type=Path)
    [packed] = parser.parse_args().folder.absolute().glob("penstock-*.tar.gz")
    with tempfile.TemporaryDirectory(prefix="penstock-sdist-") as made:
        folder = Path(made)
        rustup = os.environ.get("RUSTUP_HOME", str(Path.home() / ".rustup"))
        environment = {
            "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
            "HOME": str(folder),
            "RUSTUP_HOME": rustup,
            "CARGO_HOME": str(folder / "cargo"),
            "CARGO_TARGET_DIR": os.environ.get("SDIST_TARGET_DIR", str(folder / "target")),
            "PIP_DISABLE_PIP_VERSION_CHECK": "1",
        }
        reached = subprocess.run([*CUT, sys.executable, "-c", "import socket; print(*socket.if_nameindex())"],
                                 capture_output=True, text=True, check=False)  # fmt: skip
        if reached.returncode:
            print(f"FAIL the network cannot be cut here: {reached.stderr.strip()}")
            return 1
        print(f"the network is cut: interfaces {reached.stdout.strip()}, and lo is down")
        build = [
            *CUT,
            sys.executable,
            "-m",
            "pip",
            "wheel",
            "--quiet",
            "--no-deps",
            "--no-index",
            "--no-build-isolation",
        ]
        done = subprocess.run([*build, "--wheel-dir", folder / "wheels", packed], env=environment, check=False)
        wheels = list((folder / "wheels").glob("penstock-*.whl"))
        print(f"{'pass' if wheels else 'FAIL'} {packed.name} builds without a network")
        if done.returncode or not wheels:
            return 1
        with tarfile.open(packed) as tar:
            commit = next(tar.extractfile(name).read().decode().strip()  # type: ignore[union-attr]
                          for name in tar.getnames() if name.count("/") == 1 and name.endswith("/COMMIT"))  # fmt: skip
        venv.EnvBuilder(with_pip=True).create(folder / "venv")
        python = folder / "venv" / "bin" / "python"
        subprocess.run([python, "-m", "pip", "install", "--quiet", "--no-index", *wheels], env=environment, check=True)
        run = subprocess.run(
            [python, "-c", LOAD], cwd=folder, env=environment, capture_output=True, text=True, check=False
        )
        fine = run.stdout.split() == ["loaded", "a", commit]
        print(
            f"{'pass' if fine else 'FAIL'} that wheel loads, and says the commit of the sdist: {run.stdout}{run.stderr}"
        )
        return 0 if fine else 1


if __name__ == "__main__":
    sys.exit(main())
