"""A model in a bucket that is replaced while an engine starts, or before a reload: all ranks have one version, or none.

The other version has equal headers and sizes, in a real S3 server. The process of the test does what vLLM's own first
process does: it makes the configuration, and so fetches the small files. The ranks get its arguments.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import penstock
import pytest
from penstock.integrations import _fetched
from test_buckets import CREDENTIALS, asked, pytestmark
from test_vllm_group import group
from versitygw import Server
from vllm_model import configured

__all__ = ["pytestmark"]

MODEL = "long-llama"


@pytest.fixture
def server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Server]:
    for name, value in CREDENTIALS.items():
        monkeypatch.setenv(name, value)
    (tmp_path / "versitygw").mkdir()
    found = Server(tmp_path / "versitygw")
    try:
        yield found
    finally:
        found.close()
        _fetched.remove_all()


@pytest.fixture
def folders(checkpoint: Callable[[str], Path]) -> list[Path]:
    """Both versions."""
    old = checkpoint(MODEL)
    return [old, old.with_suffix(".inverse")]


@pytest.fixture
def put(server: Server, folders: list[Path]) -> Callable[[int], None]:
    """Puts a version of the model."""

    def put(version: int) -> None:
        for path in sorted(folders[version].iterdir()):
            server.put(f"m/{path.name}", path.read_bytes())

    put(0)
    return put


def fetched(server: Server, exchange: str, **storage: Any) -> tuple[dict[str, Any], dict[str, Any]]:
    """What vLLM's first process gives the ranks: the model, and what the user has given for the loader."""
    extra = {**asked(server.port), "exchange": exchange}
    extra["storage"] |= storage
    config = configured({"model": "s3://models/m/", "model_loader_extra_config": extra}, "penstock")
    given = {"model": config.model_config.model}
    return given, dict(config.load_config.model_loader_extra_config)


def start(place: Path, server: Server, folders: list[Path], exchange: str, point: str, **storage: Any) -> Any:
    args, options = fetched(server, exchange, **storage)
    given = {"args": args, "options": options, "folders": list(map(str, folders)), "point": point}
    return group(place, 2, "one_version", **given)


@pytest.mark.parametrize("exchange", ["off", "on"])
@pytest.mark.parametrize("point", ["before", "opens", "middle", "reload"])
def test_all_ranks_have_one_version_or_none(
    point: str, exchange: str, server: Server, folders: list[Path], put: Callable[[int], None], tmp_path: Path
) -> None:
    slowly = {"bandwidth": "8MB"} if point == "middle" else {}
    with start(tmp_path / "first", server, folders, exchange, point, **slowly) as ranks:
        if point == "middle":
            ranks.come("running")
            time.sleep(1.0)
            put(1)
        elif point == "opens":
            ranks.come("opened", [0])
            put(1)
            (ranks.folder / "opens.go").write_text("")
        else:
            ranks.come(point)
            put(1)
            (ranks.folder / f"{point}.go").write_text("")
        found = ranks.said()
    if point == "reload":
        assert [(one["differ"], one["version"], one["reloaded"]) for one in found] == [(True, [0], [1])] * 2
        return
    if any("error" in one for one in found):
        for one in found:
            assert "m/model.safetensors" in one.get("text", ""), found
    else:
        assert [one["version"] for one in found] == [[0], [0]], found
    # The next start
    with start(tmp_path / "next", server, folders, exchange, "none") as ranks:
        assert [one.get("version", one) for one in ranks.said()] == [[1], [1]]


def test_a_model_that_is_replaced_while_its_small_files_are_fetched_is_an_error_that_names_the_object(
    server: Server, put: Callable[[int], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    small = _fetched.small_files

    def replaced(*args: Any) -> Any:
        found = small(*args)
        put(1)
        return found

    monkeypatch.setattr(_fetched, "small_files", replaced)
    with pytest.raises(penstock.ChangedError, match=r"m/model\.safetensors"):
        fetched(server, "off")
