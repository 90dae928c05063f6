"""The textfile of metrics, as Prometheus' own parser reads it; folders that cannot be written to; files of others."""

from __future__ import annotations

import os
import re
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import penstock
import pytest
from event_schema import PAGE
from penstock import _metrics
from penstock.synthetic import synth
from penstock.synthetic.synth import Tensor
from test_web import Web

parser = pytest.importorskip("prometheus_client.parser")


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    made = tmp_path / "metrics"
    made.mkdir()
    monkeypatch.setenv("PENSTOCK_METRICS", str(made))
    monkeypatch.setattr(_metrics, "_registry", None)
    monkeypatch.setattr(_metrics, "_refused", set())
    monkeypatch.setattr("penstock._event_words._warned", set())
    yield made
    _metrics._registry = None


def read(folder: Path) -> dict[str, Any]:
    """The families of all files, by name, as one scrape has them: no series comes twice."""
    found: dict[str, Any] = {}
    series = set()
    for path in sorted(folder.glob("*.prom")):
        for family in parser.text_string_to_metric_families(path.read_text()):
            for sample in family.samples:
                key = (sample.name, tuple(sorted(sample.labels.items())))
                assert key not in series
                series.add(key)
            if family.name in found:
                assert (found[family.name].type, found[family.name].documentation) == (
                    family.type,
                    family.documentation,
                )
                found[family.name].samples.extend(family.samples)
            else:
                found[family.name] = family
    return found


def value(families: dict[str, Any], name: str, **labels: str) -> float:
    """The sum of the samples with these labels."""
    family = families[re.sub("_(total|sum|count|bucket)$", "", name)]
    chosen = [s.value for s in family.samples if s.name == name and labels.items() <= s.labels.items()]
    assert chosen, (name, labels)
    return float(sum(chosen))


def load(path: object, **more: Any) -> None:
    penstock.open(path).load(framework="np", **more)  # type: ignore[arg-type]


def test_prometheus_reads_what_loads_have_done(folder: Path, shard: Path) -> None:
    checkpoint = penstock.open(shard)
    for _ in range(3):
        checkpoint.load(framework="np")
    with pytest.raises(penstock.UnknownTensorError):
        checkpoint.load(names=["nonsense"])
    found = read(folder)
    of = {"verb": "load", "model": str(shard), "engine": "", "rank": "0"}
    assert value(found, "penstock_loads_total", outcome="ok", **of) == 3
    assert value(found, "penstock_loads_total", outcome="failed", **of) == 1
    assert value(found, "penstock_failures_total", error="UnknownTensorError", **of) == 1
    assert value(found, "penstock_bytes_total", **of) == 3 * checkpoint.nbytes
    assert value(found, "penstock_source_bytes_total", **of) >= 3 * checkpoint.nbytes
    assert value(found, "penstock_duration_seconds_count", verb="load") == 3
    assert value(found, "penstock_duration_seconds_bucket", verb="load", le="+Inf") == 3
    assert 0 < value(found, "penstock_duration_seconds_sum", verb="load") < 60
    assert time.time() - 60 < value(found, "penstock_last_end_timestamp_seconds", **of) <= time.time() + 1
    assert value(found, "penstock_build_info", version=penstock.__version__) == 1
    assert {family.type for family in found.values()} == {"counter", "gauge", "histogram"}
    assert all(family.documentation for family in found.values())


def test_requests_of_a_server_are_counted(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "served").mkdir()
    synth.write_file(tmp_path / "served" / "model.safetensors", [Tensor("a", "U8", (1 << 20,))])
    web = Web(tmp_path / "served")
    try:
        load(web("model.safetensors"))
    finally:
        web.close()
    found = read(folder)
    assert value(found, "penstock_requests_total", model=web("model.safetensors")) >= 1
    assert value(found, "penstock_source_bytes_total", source="network") >= 1 << 20


def test_the_page_lists_the_metrics_with_their_types(folder: Path) -> None:
    table = PAGE.read_text().partition("\n## Metrics")[2].partition("\n## ")[0]
    rows = [line.split("|")[1:3] for line in table.splitlines() if line.startswith("| `penstock_")]
    listed = {name: kind.strip() for names, kind in rows for name in re.findall(r"`(\w+)`", names)}
    assert listed == {name: kind for name, (kind, _) in _metrics.FAMILIES.items()}


def test_names_of_models_are_escaped(folder: Path, write: Any, tmp_path: Path) -> None:
    odd = tmp_path / 'a"b\\c'
    odd.mkdir()
    path = odd / "model.safetensors"
    write(Tensor("a", "U8", (10,))).rename(path)
    load(path)
    assert value(read(folder), "penstock_loads_total", model=str(path)) == 1


def test_many_models_do_not_make_a_file_of_many_series(folder: Path, write: Any, tmp_path: Path) -> None:
    path = write(Tensor("a", "U8", (10,)))
    for number in range(_metrics.MODELS + 5):
        link = tmp_path / f"{number}.safetensors"
        link.symlink_to(path)
        load(link)
    found = read(folder)
    assert len({s.labels["model"] for s in found["penstock_loads"].samples}) == _metrics.MODELS + 1
    assert value(found, "penstock_loads_total", model="other") == 5


RANKS = """
import os, sys, penstock
for rank in range(3):
    if not os.fork():
        os.environ["RANK"] = str(rank)
        penstock.open(sys.argv[1]).load(framework="dlpack")
        os._exit(0)
for _ in range(3):
    os.wait()
penstock.open(sys.argv[1]).load(framework="dlpack")
"""


def test_processes_do_not_overwrite_each_other(folder: Path, python: Any, shard: Path) -> None:
    for _ in range(2):
        done = python(RANKS, shard)
        assert done.returncode == 0, done.stderr
    assert len(list(folder.iterdir())) == 8
    found = read(folder)
    assert value(found, "penstock_loads_total") == 8
    assert value(found, "penstock_loads_total", rank="2") == 2


def test_a_forked_child_counts_from_zero(folder: Path, shard: Path) -> None:
    load(shard)
    child = os.fork()
    if not child:
        try:
            load(shard)
        finally:
            os._exit(0)
    os.waitpid(child, 0)
    found = read(folder)
    assert len(list(folder.iterdir())) == 2
    assert value(found, "penstock_loads_total") == 2


def test_files_of_ended_processes_go_after_some_scrapes(folder: Path, shard: Path, python: Any) -> None:
    python(RANKS, shard)
    ended = sorted(folder.iterdir())
    foreign = folder / "penstock-elsewhere-4026531836-1-5.prom"
    recent = folder / "penstock-elsewhere-4026531836-2-5.prom"
    other = folder / "other.prom"
    partial = folder / ended[0].name.replace("penstock-", ".penstock-").replace(".prom", ".tmp")
    for path in (foreign, recent, other, partial):
        path.write_text("")
    old = time.time() - _metrics.LEFT - 10
    for path in (*ended[1:], recent, partial):
        os.utime(path, (old, old))
    os.utime(foreign, (old, time.time() - _metrics.FORGOTTEN - 10))
    os.utime(other, (0, 0))
    load(shard)
    left = set(folder.iterdir())
    mine = folder / f"penstock-{_metrics.Identity().text}.prom"
    assert left == {mine, ended[0], recent, other}


def test_the_file_of_a_process_that_lives_stays_however_old(folder: Path, shard: Path) -> None:
    mine = _metrics.Identity()
    load(shard)
    parent = f"penstock-{mine.host}-{mine.namespace}-{os.getppid()}-{_metrics._started(os.getppid())}.prom"
    reused = f"penstock-{mine.host}-{mine.namespace}-{os.getppid()}-1.prom"
    for name in (parent, reused):
        (folder / name).write_text("")
        os.utime(folder / name, (0, 0))
    _metrics._registry = None
    load(shard)
    assert (folder / parent).exists()
    assert not (folder / reused).exists()


@pytest.mark.parametrize("what", ["missing", "a file", "full"])
def test_a_folder_that_cannot_be_written_to_is_one_warning_and_no_error(
    what: str, folder: Path, shard: Path, python: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    if what == "full":
        code = """
import resource, signal, sys, penstock
path = sys.argv[1]
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (100, 100))
for _ in range(3):
    print(len(penstock.open(path).load(framework="dlpack")))
"""
        done = python(code, shard)
        assert done.returncode == 0, done.stderr
        assert done.stdout.count("\n") == 3
        assert done.stderr.count("metrics cannot be written: File too large") == 1
        assert list(folder.iterdir()) == []
        return
    place = folder / "none"
    if what == "a file":
        place.write_text("")
    monkeypatch.setenv("PENSTOCK_METRICS", str(place))
    why = "No such file" if what == "missing" else "Not a directory"
    with pytest.warns(RuntimeWarning, match=f"PENSTOCK_METRICS=.*none': metrics cannot be written: {why}") as said:
        load(shard)
        load(shard)
    assert len(said) == 1
    if what == "missing":  # the next event tries again
        place.mkdir()
        load(shard)
        assert value(read(place), "penstock_loads_total") == 3


def test_a_folder_that_hangs_is_left_alone(folder: Path, shard: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import threading

    over, tried = threading.Event(), []
    monkeypatch.setattr(_metrics, "PATIENCE", 0.2)
    monkeypatch.setattr(_metrics.Registry, "write", lambda self, place: (tried.append(place), over.wait(60)))
    try:
        with pytest.warns(RuntimeWarning, match="the folder does not answer: no metrics are written any more"):
            load(shard)
            load(shard)
    finally:
        over.set()
    assert tried == [str(folder)]


def test_a_reader_never_sees_half_a_file(folder: Path, shard: Path) -> None:
    import threading

    over, seen = threading.Event(), []

    def look() -> None:
        while not over.is_set():
            for path in folder.glob("*.prom"):
                text = path.read_text()
                assert text.endswith("\n")
                seen.append(list(parser.text_string_to_metric_families(text)))

    thread = threading.Thread(target=look)
    thread.start()
    try:
        for _ in range(30):
            load(shard)
    finally:
        over.set()
        thread.join()
    assert seen
    assert value(read(folder), "penstock_loads_total") == 30
