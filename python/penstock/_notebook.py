"""The view of a checkpoint in a notebook."""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from html import escape

from . import _core
from ._report import size_text
from ._selection import info_of

_FILES, _TENSORS, _METADATA = 10, 20, 10
"""The most rows of each table."""


def _cell(text: object) -> str:
    """Text for a page. A file name need not be UTF-8, and a page has to be."""
    return escape(os.fsencode(str(text)).decode("utf-8", "replace"))


def _table(head: Sequence[str], rows: Iterable[Sequence[object]], more: int = 0, what: str = "") -> str:
    """A table, and below it how many rows are left out."""
    lines = [f"<tr>{''.join(f'<td>{_cell(cell)}</td>' for cell in row)}</tr>" for row in rows]
    if more > 0:
        lines.append(f'<tr><td colspan="{len(head)}">and {more} more {what}</td></tr>')
    titles = "".join(f"<th>{_cell(title)}</th>" for title in head)
    return f"<table><thead><tr>{titles}</tr></thead><tbody>{''.join(lines)}</tbody></table>"


def page(core: _core.Checkpoint) -> str:
    """Files, dtypes, metadata and the first tensors of a checkpoint, as HTML. Whatever a file says is escaped."""
    paths = core.files()
    sizes = []
    for number, path in enumerate(paths[:_FILES]):
        first, last = core.file_tensors(number)
        end = core.info(last - 1)[5] if last > first else core.data_start(number)
        sizes.append((path, last - first, size_text(end - core.data_start(number))))
    parts = [
        f"<p><b>penstock.Checkpoint</b>: {len(core)} tensors, {size_text(core.nbytes())} in {len(paths)} "
        f"file{'s' * (len(paths) != 1)}</p>",
        _table(("file", "tensors", "size"), sizes, len(paths) - _FILES, "files"),
    ]
    dtypes = []
    for dtype, numbers in sorted(core.by_dtype().items()):
        spans = (core.info(number)[4:] for number in numbers)
        dtypes.append((dtype, len(numbers), size_text(sum(end - begin for begin, end in spans))))
    parts.append(_table(("dtype", "tensors", "size"), dtypes))
    metadata = list((core.metadata() or {}).items())
    if metadata:
        parts.append(_table(("metadata", "value"), metadata[:_METADATA], len(metadata) - _METADATA, "entries"))
    infos = [info_of(core, number, paths) for number in range(min(len(core), _TENSORS))]
    rows = [(info.name, info.dtype, list(info.shape), size_text(info.nbytes)) for info in infos]
    parts.append(_table(("tensor", "dtype", "shape", "size"), rows, len(core) - _TENSORS, "tensors"))
    return "".join(parts)
