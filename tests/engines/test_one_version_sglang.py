"""A model in a bucket that is replaced while SGLang starts, or before an update: all ranks have one version, or none.

As test_one_version.py does for vLLM. The process of the test does what SGLang's own first process does: it fetches the
small files. Each case has a model of its own, so that one pair of ranks, which imports SGLang once, does them all.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from penstock.integrations import _fetched
from test_buckets import CREDENTIALS, asked, pytestmark
from test_sglang import Run
from versitygw import Server

__all__ = ["pytestmark"]

MODEL = "long-llama"
RANKS = 2
CASES = [(point, exchange) for point in ("before", "opens", "middle", "reload") for exchange in ("off", "on")]


class Replaced:
    """A model, its two versions, and the ranks that meet in a folder of their own."""

    def __init__(self, point: str, exchange: str, server: Server, folders: list[Path], meeting: Path) -> None:
        self.name, self.point, self.meeting = f"{point}-{exchange}", point, meeting / f"{point}-{exchange}"
        self.place = f"s3://models/{self.name}/"
        self._server, self._folders = server, folders
        self._asked = {**asked(server.port), "exchange": exchange}
        if point == "middle":
            self._asked["storage"] |= {"bandwidth": "8MB"}
        self.meeting.mkdir()
        self.put(0)
        self.extra, self.folder = self._fetched()

    def put(self, version: int) -> None:
        for path in sorted(self._folders[version].iterdir()):
            self._server.put(f"{self.name}/{path.name}", path.read_bytes())

    def _fetched(self) -> tuple[dict[str, Any], str]:
        found = _fetched.fetch(self.place, self._asked["storage"])
        return _fetched.with_weights(self._asked, [found]), found.folder

    def task(self, point: str) -> dict[str, Any]:
        more = {"folder": self.folder, "extra": self.extra, "point": point, "place": self.place}
        folders = {"folders": list(map(str, self._folders)), "meeting": str(self.meeting)}
        return {"name": f"{self.name} {point}", "do": "one_version", "with": {**more, **folders}}

    def attend(self, point: str, over: threading.Event) -> None:
        """Puts the other version when the ranks have come to this point."""
        ranks = [0] if point == "opens" else range(RANKS)
        while not all((self.meeting / f"{point}.at.{rank}").exists() for rank in ranks):
            if over.wait(0.005):
                return
        if point == "middle":
            time.sleep(1.0)
        if point == "next":
            assert self._fetched() == (self.extra, self.folder)
        else:
            self.put(1)
        (self.meeting / f"{point}.go").write_text("")


@pytest.fixture(scope="module")
def run(checkpoint: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Run]:
    """All cases, and then a next start of each that is no update."""
    old, over = checkpoint(MODEL), threading.Event()
    folders = [old, old.with_suffix(".inverse")]
    with pytest.MonkeyPatch.context() as patch:
        for name, value in CREDENTIALS.items():
            patch.setenv(name, value)
        server = Server(tmp_path_factory.mktemp("versitygw"))
        patch.setenv("AWS_ENDPOINT_URL", f"http://127.0.0.1:{server.port}")  # an update is given nothing but an address
        try:
            meeting = tmp_path_factory.mktemp("meeting")
            cases = [Replaced(*case, server, folders, meeting) for case in CASES]
            points = [(case, case.point) for case in cases]
            points += [(case, "next") for case in cases if case.point != "reload"]
            threads = [threading.Thread(target=case.attend, args=(point, over)) for case, point in points]
            for thread in threads:
                thread.start()
            yield Run(RANKS, [case.task(point) for case, point in points], tmp_path_factory.mktemp("ranks"))
        finally:
            over.set()
            server.close()
            _fetched.remove_all()


@pytest.mark.parametrize(("point", "exchange"), CASES)
def test_all_ranks_of_sglang_have_one_version_or_none(point: str, exchange: str, run: Run) -> None:
    name = f"{point}-{exchange}"
    found = run.of(f"{name} {point}")
    if point == "reload":
        assert [(one["differ"], one["version"]) for one in found] == [(True, [0])] * RANKS
        assert [(one["update"][0], one["reloaded"]) for one in found] == [(True, [1])] * RANKS, found
        return
    if any("failed" in one for one in found):
        for one in found:
            assert f"{name}/model.safetensors" in one.get("text", ""), found
    else:
        assert [one["version"] for one in found] == [[0]] * RANKS, found
    assert [one.get("version", one) for one in run.of(f"{name} next")] == [[1]] * RANKS
