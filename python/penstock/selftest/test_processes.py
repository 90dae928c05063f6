"""Processes that are interrupted, fork, end early or lose their context. Each has a process of its own."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

import penstock

from .gpus import FAKE

Sources = Callable[[str], Path]
Program = Callable[..., str]

INTERRUPTED = """
source = Path(sys.argv[1])
expected = checkpoints.content(source)
options = {"extent": "1MiB", "staging": "4MiB"}

def interrupt(after):
    time.sleep(after)
    os.kill(os.getpid(), signal.SIGINT)

def load():
    return penstock.open(source).load(device, options=options, progress=False)

def stream():
    return dict(penstock.open(source).stream(device, window="10MiB", options=options, progress=False))

seen = 0
for way in (load, stream):
    for after in (0.0, 0.002, 0.01, 0.05):
        thread = threading.Thread(target=interrupt, args=(after,))
        try:
            thread.start()
            tensors = way()
            thread.join()
            time.sleep(0.2)
        except KeyboardInterrupt:
            seen += 1
        try:
            thread.join()
        except KeyboardInterrupt:
            seen += 1
        tensors = None
        gc.collect()
        assert gpus.settle(lambda: not gpus.threads()), gpus.threads()
        checkpoints.same(gpu, penstock.open(source).load(device, progress=False), expected)
assert seen == 8, seen
gc.collect()
penstock.release_staging()
print("well", flush=True)
if gpu.fake:
    os._exit(0)  # a signal in the middle of its allocator spoils the stand-in's own accounts
gpu.close()
"""


def test_interrupted_by_ctrl_c(sources: Sources, program: Program) -> None:
    assert "well" in program(INTERRUPTED, sources("large"))


FORKED = """
opened = penstock.open(sys.argv[1])
expected = checkpoints.content(Path(sys.argv[1]))
kept = opened.load(device, progress=False)
running = opened.start(device, options={"extent": "1MiB", "staging": "4MiB"})
child = os.fork()
if child == 0:
    signal.alarm(40)
    status = 0
    for number, attempt in enumerate((lambda: opened.load(device, progress=False), lambda: running.result())):
        try:
            attempt()
        except penstock.ForkedError as error:
            assert "fork" in str(error)
        except BaseException as error:
            print(type(error), error, file=sys.stderr, flush=True)
            status |= 1 << number
        else:
            status |= 1 << number
    if len(opened.load("cpu", options={"copy": True}, progress=False)) != len(opened):
        status |= 8
    penstock.release_staging()
    os._exit(status)
_, status = os.waitpid(child, 0)
assert status == 0, status
checkpoints.same(gpu, running.result(), expected)
checkpoints.same(gpu, kept, expected)
checkpoints.same(gpu, opened.load(device, progress=False), expected)
del kept, running
gc.collect()
penstock.release_staging()
gpu.close()
print("well")
"""


def test_forked_after_a_load_and_during_one(sources: Sources, program: Program) -> None:
    assert "well" in program(FORKED, sources("large"))


SPAWNED = """
import subprocess
opened = penstock.open(sys.argv[1])
kept = opened.load(device, progress=False)
code = "import penstock, sys; opened = penstock.open(sys.argv[1]); "
code += "print(len(opened.load(sys.argv[2], framework='dlpack', progress=False)))"
done = subprocess.run([sys.executable, "-c", code, sys.argv[1], device], capture_output=True, text=True, timeout=60)
assert done.stdout.strip() == str(len(opened)), done.stderr
del kept
gc.collect()
penstock.release_staging()
gpu.close()
print("well")
"""


def test_another_process_loads_meanwhile(sources: Sources, program: Program) -> None:
    assert "well" in program(SPAWNED, sources("gpt2"))


LOST = """
source = Path(sys.argv[1])
opened = penstock.open(source)
kept = opened.load(device, framework="dlpack", progress=False)
options = {"extent": "1MiB", "staging": "4MiB"}
job = opened.start(device, framework="dlpack", options=options) if sys.argv[2] == "during" else None
gpu.lose_context()
for attempt in range(2):
    begun = time.monotonic()
    try:
        job.result() if job else opened.load(device, framework="dlpack", progress=False)
        if not job:
            raise SystemExit("a load after the context was lost has succeeded")
    except penstock.DeviceError as error:
        assert "this process has lost the device" in str(error), error
    assert time.monotonic() - begun < 30
    job = None
print("well", flush=True)
# What is left of the driver is not to be asked for anything on the way out either
if gpu.fake:
    os._exit(0)
"""


@pytest.mark.parametrize("when", ["before", "during"])
def test_a_lost_context(sources: Sources, program: Program, when: str) -> None:
    """A kernel with an illegal address. The process ends by itself, with the GPU as it is."""
    if penstock._core.gpus()["vendor"] != "cuda":
        pytest.skip("the driver here is not CUDA's")
    assert "well" in program(LOST, sources("large"), when)


ENDING = """
opened = penstock.open(sys.argv[1])
options = {"extent": "1MiB", "staging": "8MiB"}
how = sys.argv[2]
print("well", flush=True)
if how == "job":
    kept = opened.start(device, framework="dlpack")
elif how == "stream":
    kept = opened.stream(device, framework="dlpack", window="8MiB", options=options, progress=False)
    first = next(kept)
elif how == "tensors":
    kept = opened.load(device, framework="dlpack", progress=False)
elif how == "thread":
    threading.Thread(target=lambda: opened.load(device, framework="dlpack", progress=False), daemon=True).start()
    time.sleep(0.01)
"""


@pytest.mark.parametrize("how", ["job", "stream", "tensors", "thread"])
def test_a_process_that_ends_with_a_load_under_way(sources: Sources, program: Program, how: str) -> None:
    if FAKE and how == "thread":
        pytest.skip("the stand-in's own thread outlives it")
    assert "well" in program(ENDING, sources("large"), how)
