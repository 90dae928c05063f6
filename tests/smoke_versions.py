"""What every supported Python must do with the one abi3 wheel; needs numpy and safetensors. `make versions` runs it."""

import importlib.util
import multiprocessing
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np
import penstock
from safetensors.numpy import load_file, save_file


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "a.safetensors"
        save_file(
            {
                "matrix": np.random.default_rng(0).random((300, 5000), dtype="f4"),
                "row": np.arange(5),
                "scalar": np.array(3, dtype="f2"),
                "empty": np.zeros((0, 4), dtype="i1"),
            },
            path,
        )
        expected = load_file(path)
        for io in ("auto", "mapped", "buffered", "uring_buffered", "direct", "uring", "threads"):
            state = penstock.open(path).load(framework="np", options={"io": io})
            assert state.keys() == expected.keys()
            for name, array in expected.items():
                assert state[name].dtype == array.dtype and np.array_equal(state[name], array), (io, name)
                state[name][...] = 0  # writable, and the file stays as it is
        streamed = dict(penstock.open(path).stream(framework="np"))
        assert all(np.array_equal(streamed[name], array) for name, array in expected.items())
        into = {name: np.empty_like(array) for name, array in expected.items()}
        penstock.open(path).load_into(into)
        assert all(np.array_equal(into[name], array) for name, array in expected.items())
        with penstock.safe_open(path, framework="np") as f:
            assert np.array_equal(f.get_slice("matrix")[3:7], expected["matrix"][3:7])
        with multiprocessing.get_context("fork").Pool(1) as pool:
            assert pool.apply(total, (path,)) == expected["row"].sum()
        try:
            penstock.open(Path(folder) / "missing.safetensors")
        except FileNotFoundError as error:
            assert "missing.safetensors" in str(error)
        else:
            raise AssertionError("a missing file opened")
        reads_the_variable = importlib.util.find_spec("_penstock_patch") is not None
        for value in ("0", "1"):
            patched = str(reads_the_variable and value == "1")
            assert unedited(path, value) == [patched, str(expected["row"].sum())], value
        assert started_by_run(path) == ["True", str(expected["row"].sum())]
    print(f"Python {sys.version.split()[0]}: 1 passed, 0 failed")


def total(path: Path) -> int:
    return int(penstock.open(path).load(framework="np")["row"].sum())


UNEDITED = """
import sys
from safetensors.numpy import load_file, safe_open
print(safe_open.__module__.startswith("penstock."), load_file(sys.argv[1])["row"].sum())
"""


def unedited(path: Path, value: str) -> list[str]:
    """What a program that knows nothing of penstock does with PENSTOCK_PATCH: penstock-patch brings what reads that."""
    environment = {**os.environ, "PENSTOCK_PATCH": value}
    return subprocess.check_output([sys.executable, "-c", UNEDITED, path], env=environment, text=True).split()


def started_by_run(path: Path) -> list[str]:
    """What such a program does when penstock.run starts it."""
    script = path.parent / "unedited.py"
    script.write_text(UNEDITED)
    return subprocess.check_output([sys.executable, "-m", "penstock.run", script, path], text=True).split()


if __name__ == "__main__":
    main()
