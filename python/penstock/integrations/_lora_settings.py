"""Where an engine's LoRA adapters are, and what they may be: environment variables, each of which stands here once."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

from .._errors import InvalidError, NotFoundError
from .._paths import is_web, without_secrets
from .._save import size_of

PREFIX = "PENSTOCK_LORA_PREFIX"
"""The place of all adapters: a folder, or an address. Without it there is no resolver."""
BASES = "PENSTOCK_LORA_BASES"
"""Names of base models, separated by commas, that adapters may name, besides the one that is served. ``*``: any."""
MOST_BYTES = "PENSTOCK_LORA_MOST_BYTES"
"""The most bytes of one adapter's tensors."""
MOST_ADAPTERS = "PENSTOCK_LORA_MOST_ADAPTERS"
"""The most adapters that one server resolves."""
KEPT_BYTES = "PENSTOCK_LORA_KEPT_BYTES"
"""The limit in bytes for the copies of adapters that each worker keeps in memory. 0: no copies."""

_DEFAULT_BYTES = "4GiB"
_DEFAULT_ADAPTERS = "1000"
_DEFAULT_KEPT = "1GiB"
_KNOWN = (PREFIX, BASES, MOST_BYTES, MOST_ADAPTERS, KEPT_BYTES)
_FAMILY = "PENSTOCK_LORA_"

#: The name of an adapter comes from a request of a stranger. No part can be "." or "..", be empty, or begin with a dot;
#: nothing in it means something in an address: no colon, no @, no %, no ?, no #, no backslash.
_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]*(?:/[A-Za-z0-9_][A-Za-z0-9._-]*){0,3}")
_LONGEST_NAME = 200


class LoraSettings(NamedTuple):
    """The settings in the environment."""

    prefix: str
    """Without a slash at its end."""
    bases: frozenset[str]
    any_base: bool
    most_bytes: int
    most_adapters: int
    kept_bytes: int

    @property
    def is_local(self) -> bool:
        """Whether the prefix is a folder of this machine."""
        return "://" not in self.prefix

    def place_of(self, name: str) -> str | None:
        """Where the adapter of this name is; None if no adapter can be called so."""
        if len(name) > _LONGEST_NAME or _NAME.fullmatch(name) is None:
            return None
        return f"{self.prefix}/{name}"

    def contains(self, address: str) -> bool:
        """Whether an address is below the prefix. Of a repository of the Hub, at whatever commit."""
        above, below = self.prefix, address
        if above.startswith("hf://") and "/" in above.removeprefix("hf://"):
            from .._hub import parse

            repositories = [parse(each) for each in (above, below)]
            above, below = (f"{each.repository}/{each.within}".rstrip("/") if each else "" for each in repositories)
        return bool(above) and below.startswith(f"{above}/") and ".." not in below.split("/")


def lora_settings(environment: Mapping[str, str] | None = None) -> LoraSettings | None:
    """The settings of an environment (by default that of the process); None if it names no prefix.

    Raises:
        InvalidError: a variable has an impossible value, or is not known.
        NotFoundError: the prefix is a folder that does not exist.
    """
    given = os.environ if environment is None else environment
    unknown = sorted(name for name in given if name.startswith(_FAMILY) and name not in _KNOWN)
    if unknown:
        raise InvalidError(f"{', '.join(unknown)}: there is no such variable; known are {', '.join(_KNOWN)}")
    for name in _KNOWN:
        if name in given and not _is_text(given[name]):
            raise InvalidError(f"{name}={given[name]!r}: must be UTF-8")
    if not given.get(PREFIX):
        beside = [name for name in _KNOWN if given.get(name)]
        if beside:
            raise InvalidError(f"{beside[0]} is set, and {PREFIX} is not: it names the folder or address of adapters")
        return None
    prefix = _prefix(given[PREFIX])
    names = [name.strip() for name in given.get(BASES, "").split(",")]
    bases = frozenset(name for name in names if name)
    text = given.get(MOST_ADAPTERS) or _DEFAULT_ADAPTERS
    if not re.fullmatch(r"[1-9][0-9]{0,8}", text):
        raise InvalidError(f"{MOST_ADAPTERS}={text!r}: give a number from 1 on")
    most_bytes, kept_bytes = _size(given, MOST_BYTES, _DEFAULT_BYTES), _size(given, KEPT_BYTES, _DEFAULT_KEPT)
    return LoraSettings(prefix, bases - {"*"}, "*" in bases, most_bytes, int(text), kept_bytes)


def _size(given: Mapping[str, str], name: str, default: str) -> int:
    """The bytes that a variable gives."""
    text = given.get(name) or default
    try:
        found = size_of(text)
    except InvalidError:
        found = None
    if found is None:
        raise InvalidError(f'{name}={text!r}: give a size, such as "4GiB"')
    return found


def _is_text(value: str) -> bool:
    try:
        value.encode()
    except UnicodeEncodeError:
        return False
    return True


def _prefix(given: str) -> str:
    shown = f"{PREFIX}={without_secrets(given)!r}"
    prefix = given.rstrip("/")
    if "://" not in given:
        path = Path(given).expanduser()
        if not path.is_absolute():
            raise InvalidError(f"{shown}: give an absolute path, or an address")
        if not path.is_dir():
            raise NotFoundError(f"{shown}: there is no such folder", path=given)
        return os.path.realpath(path).rstrip("/")
    if not (is_web(given) or given.startswith("hf://")):
        raise InvalidError(f"{shown}: give a folder, or an address: s3://, gs://, az://, https:// or hf://")
    if "?" in given or "#" in given:
        raise InvalidError(f"{shown}: an address of adapters has no query; credentials come from the environment")
    place = prefix.partition("://")[2]
    if not place or any(part in ("", ".", "..") for part in place.split("/")):
        raise InvalidError(f"{shown}: name the bucket, the server or the organisation that the adapters are in")
    return prefix
