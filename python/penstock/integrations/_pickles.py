"""Models of which an engine finds no safetensors files: what is there, and how to make some of it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from .._errors import PenstockError, UnsupportedError
from .._pickles import SUFFIXES, is_state

_FOUND_NONE = "any model weights"
"""The message of both engines if a model has no weights that they read."""


def _pickles_in(place: str) -> list[str]:
    """The names of the pickles in a folder of this machine that has no safetensors files."""
    folder = Path(place)
    names = [path.name for path in folder.iterdir() if path.name[0] != "."] if folder.is_dir() else []
    if any(name.endswith(".safetensors") for name in names):
        return []
    return sorted(name for name in names if name.endswith(SUFFIXES) and not is_state(name))


@contextmanager
def naming_convert(place: str, engine: str) -> Iterator[None]:
    """Around an engine's search for safetensors files at ``place``: of pickles alone the error says what to do.

    Raises:
        UnsupportedError: there are none.
    """
    if names := _pickles_in(place):
        more = f" and {len(names) - 1} more" if len(names) > 1 else ""
        raise UnsupportedError(
            f"{place}: only {names[0]}{more}, which torch.save wrote: load format penstock reads safetensors files. "
            f"`penstock convert {place} FOLDER` writes them to a new folder (copy configuration and tokenizer there "
            f"too), or leave the format to {engine}: --load-format auto",
            path=place,
        )
    try:
        yield
    except PenstockError:
        raise
    except RuntimeError as error:
        if _FOUND_NONE not in str(error):
            raise
        raise UnsupportedError(
            f"{engine} finds no safetensors files of {place}, and load format penstock reads no others. If it has "
            "files that torch.save wrote, `penstock convert` writes them anew; --load-format auto leaves them to "
            f"{engine}",
            path=place,
        ) from error
