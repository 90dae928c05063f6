"""Each thread of the core has a guard: a panic reaches those who wait. `crates/core/tests/threads.rs` trips most."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

CORE = Path(__file__).parents[1] / "crates/core"

#: By the name of the thread: the file that starts it.
THREADS = {
    "penstock-ahead": "store/ahead/crew.rs",
    "penstock-ask": "detached.rs",
    "penstock-copy": "device/cpu.rs",
    "penstock-dns": "store/remote/http/names.rs",
    "penstock-cache": "store/disk_cache/crew.rs",
    "penstock-cache-look": "store/disk_cache/look.rs",
    "penstock-engine": "load/start.rs",
    "penstock-fill": "store/fill_after.rs",
    "penstock-gpu": "device/gpu/mod.rs",
    "penstock-gpupin": "device/gpu/pinning.rs",
    "penstock-gpuwait": "device/gpu/queue.rs",
    "penstock-hub": "store/disk_cache/publish.rs",
    "penstock-keys": "store/remote/auth/credentials.rs",
    "penstock-lease": "load/leased.rs",
    "penstock-lookout": "peers/lookout.rs",
    "penstock-net": "store/remote/source.rs",
    "penstock-peers": "peers/exchange.rs",
    "penstock-pull": "pull.rs",
    "penstock-pulse": "peers/pulse.rs",
    "penstock-read": "source/threads.rs",
    "penstock-save": "save/crew.rs",
}

#: Threads that end before the call that starts them does: a panic there is one of the caller, whose thread has a guard.
SCOPED = {
    *("ceiling/files.rs", "format/join.rs", "save/side_by_side.rs"),
    *("store/cache.rs", "store/read_cost.rs", "store/sampled.rs"),
}

#: Where the guard of a thread is, if not in the file that starts it.
GUARDS = {
    "penstock-engine": "load/drive.rs",
    "penstock-gpu": "device/gpu/queue.rs",
    "penstock-gpuwait": "device/gpu/waiter.rs",
}

#: Where a panic is put to the test, if not in `tests/threads.rs`: threads that nobody outside the crate can start.
TRIPPED = {"penstock-ahead": "src/store/ahead/tests.rs"}


def sources() -> dict[str, str]:
    """The code of the core by file, without its unit tests."""
    found = {}
    for path in (CORE / "src").rglob("*.rs"):
        name = str(path.relative_to(CORE / "src"))
        if not name.endswith(("tests.rs", "virtual_time.rs")) and not {"simulator", "tests"} & set(Path(name).parts):
            found[name] = re.split(r"#\[cfg\((?:all\()?test", path.read_text())[0]
    return found


def test_every_thread_is_known_here():
    spawns, scoped = {}, set()
    for name, text in sources().items():
        count = len(re.findall(r"\bspawn\(", text)) - len(re.findall(r"\bfn spawn\(|[^.]\bspawn\(driver\)", text))
        if count:
            spawns[name] = count
        if "spawn_scoped(" in text:
            scoped.add(name)
    assert scoped == SCOPED
    expected: dict[str, int] = {}
    for file in THREADS.values():
        expected[file] = expected.get(file, 0) + 1
    assert spawns == expected


@pytest.mark.parametrize("name", THREADS)
def test_a_thread_has_a_guard_and_a_test_that_trips_it(name: str):
    text = sources()[GUARDS.get(name, THREADS[name])]
    assert f'guarded("{name}"' in text
    assert f'"{name}"' in (CORE / TRIPPED.get(name, "tests/threads.rs")).read_text()


def test_no_thread_catches_a_panic_without_saying_what_it_was():
    """`guarded` keeps the text of the panic."""
    allowed = {"threads.rs", "load/drive.rs", "device/gpu/queue.rs"}  # a drop, and copies that may be under way
    assert {name for name, text in sources().items() if "catch_unwind(" in text} <= allowed
