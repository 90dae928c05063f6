"""Arguments that are paths of mounted file systems, and where checkpoints are opened, also web addresses."""

from __future__ import annotations

import os
import re

from . import _core
from ._errors import ArgumentTypeError, InvalidError, SchemeError, UnsupportedError

# RFC 3986, section 3.1
_SCHEME = r"([A-Za-z][A-Za-z0-9+.-]*)://"
# What pathlib makes of one: it takes two slashes for one. Schemes of one letter would be drives
_COLLAPSED = r"([A-Za-z][A-Za-z0-9+.-]+):/"

# A name and a password before the host; the query or the fragment behind the path
_SECRET = re.compile(r"(?i)(https?:/{1,2})(?:[^/\s'\"@]*@[^\s'\"]*|([^\s'\"?#]*)[?#][^\s'\"]*)")

# A signature or a token behind an address of another scheme, where `?` may also be a letter of a key
_SIGNED = re.compile(r"(?i)([a-z][a-z0-9+.-]*:/{1,2}[^\s'\"?]*)\?[^\s'\"]*(?:signature|credential|token|sig)=[^\s'\"]*")

_OPENED = "web addresses are accepted only where a checkpoint is opened or loaded, as strings"
_ADVICE = {
    "file": "give the path without file://",
    "hf": "hf:// is accepted only where a checkpoint is opened, as one string",
}
_ELSE = "copy the files to a disk, or mount that storage, and give the path"
_WRITTEN = "it cannot be written to: give a path of this machine, and copy the files from there"
_TO_HUB = "`hf upload REPOSITORY FOLDER` writes to the Hub: save to a folder of this machine first"


def is_web(path: object) -> bool:
    """Whether this is the address of something on a web server or in an object store."""
    found = re.match(_SCHEME, path) if isinstance(path, str) else None
    return found is not None and _has_store(found[1])


def _has_store(scheme: str) -> bool:
    """Whether the core has a store for addresses of this scheme."""
    return scheme.lower() in _core.schemes()


def without_secrets(text: str) -> str:
    """``text`` as messages show it: addresses without what may be a password or a signature."""
    if ":/" not in text:
        return text
    text = _SECRET.sub(lambda found: found[1] + (found[2] or ""), text)
    return _SIGNED.sub(r"\1", text) if "?" in text else text


def source_path(path: str | os.PathLike[str], argument: str) -> str:
    """`local_path`, where something is opened: the core has a store for web addresses."""
    return str(path) if is_web(path) else local_path(path, argument)


def target_path(path: str | os.PathLike[str], argument: str) -> str:
    """`local_path`, where something is saved: the core has stores that take objects."""
    if not is_web(path):
        return local_path(path, argument, written=True)
    text = str(path)
    if text.lower().startswith(("http://", "https://")):
        # Before anything is read for it
        why = "web addresses cannot be written to: give a folder, or s3://, gs:// or az://"
        raise UnsupportedError(f"{argument}={without_secrets(text)!r}: {why}")
    if _SIGNED.search(text):
        why = "nothing can be written with a signature in the address: give credentials in storage="
        raise InvalidError(f"{argument}={without_secrets(text)!r}: {why}")
    return text


def target_folder(address: str | os.PathLike[str], argument: str) -> str:
    """The address that names are added to when objects are written, without a slash at its end.

    Raises:
        InvalidError: it is none, or names no bucket.
    """
    place = target_path(address, argument)
    if not is_web(place):
        raise InvalidError(f"{argument}={place!r}: this is no address: give s3://, gs:// or az://")
    scheme, _, key = place.partition("://")
    if not key.strip("/"):
        raise InvalidError(f"{argument}={place!r}: it names no bucket")
    return f"{scheme}://{key.removesuffix('/')}"


def local_path(path: str | os.PathLike[str], argument: str, *, written: bool = False) -> str:
    """``path`` as a string; ``argument`` is what the caller calls it. ``written``: something is to be written there.

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
    if not text.isascii():
        try:
            os.fsencode(text)
        except UnicodeEncodeError as error:
            raise InvalidError(f"{argument}={path!r}: no file has this name: {error}") from None
    if ":/" not in text:
        return text
    found = re.match(_SCHEME, text)
    if found is None and not isinstance(path, str):
        found = re.match(_COLLAPSED, text)
        if found is not None and os.path.lexists(f"{found[1]}:"):
            found = None  # such a folder is there, so it may well be meant
    if found is None:
        return text
    text = without_secrets(text)
    rest, advice = text[found.end() :].lstrip("/"), _ADVICE.get(found[1].lower(), _ELSE)
    if _has_store(found[1]):
        advice = _OPENED
    here = " here" if advice is _OPENED else ""
    if written and advice in (_OPENED, _ELSE):
        advice = _WRITTEN
    elif written and found[1].lower() == "hf":
        advice = _TO_HUB
    raise SchemeError(
        f"{argument}={text!r}: {found[1]}:// is not supported{here}; {advice}. "
        f"(If you mean a folder of this name, give './{found[1]}:/{rest}'.)",
        path=text,
    )
