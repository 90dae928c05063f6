"""Starts of SGLang one after the other, each of processes of their own: as `sglang_rank.py`, with what is here besides.

python sglang_starts.py SPEC.json
"""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from typing import Any

import cached_starts
import sglang_rank
from penstock.integrations import _fetched
from sglang.srt.plugins import load_plugins
from sglang.srt.runtime_context import get_model
from sglang_rank import Rank, different, digests


def model(rank: Rank, place: str, folder: str, options: dict[str, Any], port: int, temporary: str) -> Any:
    """A start from an address, beside a load of the same model from a disk."""
    load_plugins()
    tempfile.tempdir = temporary
    expected = digests(rank.load(rank.join(folder), "safetensors"))

    def begins() -> dict[str, Any]:
        config = rank.join(place, load_format="penstock", model_loader_extra_config=json.dumps(options))
        extra = get_model().model_loader_extra_config
        mine = rank.load(config, get_model().load_format, model_loader_extra_config=extra)
        from penstock.integrations import _sglang_loader

        (report,) = _sglang_loader.last_reports
        return {
            "parameters": len(list(mine.parameters())),
            "different": different(expected, digests(mine)),
            "digests": digests(mine),
            "report": cached_starts.told(report),
            "files": cached_starts.contents(Path(config.model_path)),
        }

    try:
        return cached_starts.start(begins, options["storage"], port)
    finally:
        _fetched.remove_all()  # this process is a fork, and ends without what Python does at exit


if __name__ == "__main__":
    sglang_rank.main({"model": model})
