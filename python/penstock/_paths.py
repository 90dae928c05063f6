"""Arguments that are paths: of file systems that this machine has mounted, and of nothing else."""

from __future__ import annotations

import os
import re

from ._errors import ArgumentTypeError, SchemeError

# RFC 3986, section 3.1
_SCHEME = r"([A-Za-z][A-Za-z0-9+.-]*)://"
# What pathlib makes of one: it takes two slashes for one. Schemes of one letter would be drives
_COLLAPSED = r"([A-Za-z][A-Za-z0-9+.-]+):/"

_ADVICE = {
    "file": "give the path without file://",
    "hf": "hf:// is understood only where a checkpoint is opened, as one string",
}
_ELSE = "copy the files to a disk, or mount that storage, and give the path"


def local_path(path: str | os.PathLike[str], argument: str) -> str:
    """``path`` as a string; ``argument`` is what the caller calls it.

    Raises:
        SchemeError: it begins with a scheme, such as "s3://bucket/x". As a path that would be in a folder "s3:" here.
        ArgumentTypeError: it is no path.
    """
    text: object
    try:
        text = os.fspath(path)
    except TypeError:
        text = None
    if not isinstance(text, str):
        raise ArgumentTypeError(f"{argument}={path!r}: give a path (str or PathLike)")
    if ":/" not in text:
        return text
    found = re.match(_SCHEME, text)
    if found is None and not isinstance(path, str):
        found = re.match(_COLLAPSED, text)
        if found is not None and os.path.lexists(f"{found[1]}:"):
            found = None  # such a folder is there, so it may well be meant
    if found is None:
        return text
    rest = text[found.end() :].lstrip("/")
    raise SchemeError(
        f"{argument}={text!r}: {found[1]}:// is not supported; {_ADVICE.get(found[1].lower(), _ELSE)}. "
        f"(If you mean a folder of this name, give './{found[1]}:/{rest}'.)",
        path=text,
    )
