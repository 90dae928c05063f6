"""The job of a contestant: which checkpoint it loads, to where."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

State = dict[str, Any]
Pairs = Iterator[tuple[str, Any]]
Tensors = Mapping[str, Any] | Pairs


@dataclass(frozen=True)
class Job:
    """A load to make. `files` are the shards; `folder` holds them all, or is `None` if they are spread."""

    files: list[Path]
    folder: Path | None
    device: str
    #: Filled by those that load into tensors that exist.
    parameters: State = field(default_factory=dict)
    #: Name of the dtype that floating-point tensors are wanted in, as in a header; `None`: as they are.
    dtype: str | None = None
    #: Further facts of the contestant about its load, for the JSON: penstock's report and its seconds for opening.
    noted: dict[str, Any] = field(default_factory=dict)
    #: File for penstock's trace of the load.
    trace: str | None = None
    #: Where a web server has the files, if one does; the folder with the programs that fetch them.
    urls: list[str] = field(default_factory=list)
    tools: Path | None = None
    #: Penstock's `storage` for a bucket that takes the parameters, if the scenario has one.
    bucket: dict[str, Any] | None = None
    #: A folder on the checkpoint's disk that a first start leaves to a second one, if the scenario has two.
    kept: Path | None = None
    #: Waits for what the loader still does in the background after the load, and tells of it.
    background: list[Callable[[], dict[str, Any]]] = field(default_factory=list)

    @property
    def paths(self) -> list[str]:
        return [str(path) for path in self.files]

    @property
    def source(self) -> Path | list[Path]:
        return self.files if self.folder is None else self.folder
