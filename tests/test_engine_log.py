"""What the log says of an engine's load that read more than its rank wanted."""

from __future__ import annotations

import json
import logging
import shutil
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pagecache
import penstock
import pytest
from penstock import _events, _unwanted
from penstock._unwanted import read_besides
from penstock.synthetic.synth import Tensor

torch = pytest.importorskip("torch")
MB = 10**6


OFF = 8, "asked for"
FLAG = '\'{"exchange": "on"}\', or PENSTOCK_EXCHANGE=on'


@pytest.fixture(autouse=True)
def nothing_logged(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_unwanted, "_logged", set())


def logged(
    caplog: Any,
    monkeypatch: pytest.MonkeyPatch,
    wanted: int,
    read: int,
    apart: tuple[int, str] | None,
    engine: str | None = "vllm",
) -> str:
    """The line of a load with such a plan, in a group if it is one of several ranks."""
    caplog.clear()
    selection = SimpleNamespace(core=SimpleNamespace(fingerprint=lambda: wanted))
    request: Any = SimpleNamespace(group=apart, selection=selection)
    monkeypatch.setattr(_events, "_engine", engine)
    with caplog.at_level(logging.WARNING, "penstock"):
        _unwanted.say_planned(cast(Any, SimpleNamespace(planned=lambda: (wanted, read - wanted))), request, apart)
    return "".join(caplog.messages)


@pytest.mark.parametrize(
    ("wanted", "read", "apart", "said"),
    [
        (100 * MB, 100 * MB, OFF, False),
        (100 * MB, 124 * MB, OFF, False),
        (10 * MB, 20 * MB, OFF, False),  # too few bytes to speak of
        (100 * MB, 300 * MB, None, False),  # one rank alone: nobody could read for it
        (100 * MB, 300 * MB, OFF, True),
        (100 * MB, 300 * MB, (8, _unwanted.ON_GPU), True),
    ],
)
def test_a_load_that_reads_much_more_than_it_wants_says_so_and_what_helps(
    caplog, monkeypatch, wanted, read, apart, said
):
    found = logged(caplog, monkeypatch, wanted, read, apart)
    assert bool(found) == said
    if said:
        assert "300.00 MB will be read for 100.00 MB that this rank wants, 3.0 times as many" in found
        assert "row-parallel" in found and "(200.00 MB)" in found and FLAG in found


def test_the_line_comes_once_and_names_what_the_caller_can_give(caplog, monkeypatch):
    assert 'Each rank reads for itself: exchange="off". ' in logged(caplog, monkeypatch, 100 * MB, 300 * MB, OFF)
    assert logged(caplog, monkeypatch, 100 * MB, 300 * MB, OFF) == ""
    assert 'once: exchange="on", or PENSTOCK_EXCHANGE=on' in logged(caplog, monkeypatch, 100 * MB, 300 * MB, OFF, None)
    assert logged(caplog, monkeypatch, 101 * MB, 300 * MB, (2, "rank 1 is reached at 127.0.0.1 only")).endswith(
        "127.0.0.1 only"
    )
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: False)
    monkeypatch.setenv("WORLD_SIZE", "8")
    assert logged(caplog, monkeypatch, 100 * MB, 300 * MB, None, None).endswith(
        'give all ranks\' loads a group= and exchange="on"'
    )


def test_what_ranks_have_found_out_is_told_and_not_advised_against():
    def besides(**exchange: str) -> str | None:
        lanes = {"buffered": {"bytes": 300 * MB, "extents": 1}}
        return read_besides(penstock.Report(nbytes=100 * MB, routes=lanes, exchange=exchange))

    tried = "tried: 100 MB/s where each rank reads what it wants, 50 MB/s where one reads it for all"
    found = besides(choice="off", reason=tried)
    assert found is not None and "300.00 MB were read for 100.00 MB" in found
    assert "tried: 100 MB/s" in found and '"exchange"' not in found
    assert besides(choice="on", reason=tried) is None
    assert besides(choice="off", reason="asked for") is None, "that was said before the first read"


def columns(path: Path, rank: int, exchange: str, size: int = 4) -> Any:
    """The load of such a rank, which has begun, or None: a quarter of the columns of a row-parallel weight."""
    checkpoint = penstock.open(path)
    part = (slice(None), slice(1024 * rank, 1024 * (rank + 1)))
    options = {"exchange": exchange, "io": "buffered", "cache": "keep"}
    return checkpoint.start(slices={"down_proj.weight": part}, group=(STORES[path], rank, size), options=options)


STORES: dict[Path, Any] = {}


@pytest.mark.parametrize(("exchange", "lines"), [("off", 1), ("on", 0)])
def test_a_quarter_of_the_columns_is_such_a_load(write, monkeypatch, caplog, exchange, lines):
    """As a rank of four wants it: rows of 2 KiB, and 6 KiB between them. The line is there when the load has begun."""
    monkeypatch.setattr(_unwanted, "_LEAST", 1 << 20)
    path = write(Tensor("down_proj.weight", "BF16", (512, 4096)))
    STORES[path] = torch.distributed.HashStore()
    with caplog.at_level(logging.WARNING, "penstock"), ThreadPoolExecutor(4) as pool:
        jobs = list(pool.map(lambda rank: columns(path, rank, exchange), range(4)))
        assert len(caplog.messages) == lines
        for rank, job in enumerate(jobs):
            assert job.result()["down_proj.weight"].shape == (512, 1024), rank
            assert job.report.gap_bytes == (lines and 3 * job.report.nbytes - 6144)
    assert len(caplog.messages) == lines
    if lines:
        assert "4.19 MB will be read for 1.05 MB that this rank wants, 4.0 times as many" in caplog.text


def test_rows_and_replicas_are_no_such_loads(write, monkeypatch, caplog):
    monkeypatch.setattr(_unwanted, "_LEAST", 1)
    monkeypatch.setattr(_unwanted, "_SHARE", 1.0)
    path = write(Tensor("up_proj.weight", "BF16", (512, 4096)))
    store = torch.distributed.HashStore()

    def load(rank: int, cut: Any) -> None:
        options = {"exchange": "off", "io": "buffered"}
        penstock.open(path).load(slices=cut, group=(store, rank, 2), options=options, progress=False)

    with caplog.at_level(logging.WARNING, "penstock"), ThreadPoolExecutor(2) as pool:
        list(pool.map(lambda rank: load(rank, {"up_proj.weight": slice(256 * rank, 256 * (rank + 1))}), range(2)))
        list(pool.map(lambda rank: load(rank, None), range(2)))
    assert caplog.messages == []


@pytest.mark.parametrize(("copy", "lines"), [(True, 1), (None, 0)])
def test_a_load_that_only_maps_resident_pages_reads_nothing(write, monkeypatch, caplog, copy, lines):
    """Every other tensor, with short gaps between them: of a rank whose load has no group."""
    monkeypatch.setattr(_unwanted, "_LEAST", 1 << 20)
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: False)
    monkeypatch.setenv("WORLD_SIZE", "4")
    path = write(*(Tensor(f"{number:03}", "BF16", (4096,)) for number in range(512)), align=4096)
    pagecache.put([path], "warm")
    with caplog.at_level(logging.WARNING, "penstock"):
        opened = penstock.open(path)
        opened.load(names=opened.keys()[::2], options={"copy": copy}, progress=False)
    assert len(caplog.messages) == lines
    assert opened.last_report is not None and opened.last_report.gap_bytes == 255 * 8192


def test_a_tensor_of_the_index_that_no_shard_has_is_told(small: Path, tmp_path: Path, caplog: Any) -> None:
    from penstock.integrations._engine import Chosen

    folder = shutil.copytree(small, tmp_path / "model")
    (index,) = folder.glob("*.index.json")
    shards = sorted(map(str, folder.glob("*.safetensors")))

    def said(files: list[str]) -> list[str]:
        caplog.clear()
        Chosen(files).opened(None)
        return [text for text in caplog.messages if "in no shard file" in text]

    assert said(shards) == []
    found = json.loads(index.read_text())
    last = Path(shards[-1]).name
    found["weight_map"] |= {"gone": last, "lost": last}
    index.write_text(json.dumps(found))
    (text,) = said(shards)
    lacking = f"2 tensors of the index are in no shard file, so this checkpoint lacks them: 'gone' ({last}), 'lost'"
    assert text.startswith(f"penstock: {index}: {lacking}")
    assert said(shards[:2]) == [], "an engine may choose some of the files"
    index.write_text("[]")
    assert said(shards) == []
