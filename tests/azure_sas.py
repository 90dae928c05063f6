"""Shared access signatures of Azure, made from the description of a service SAS (version 2020-12-06 and later)."""

from __future__ import annotations

import base64
import hmac
from datetime import datetime, timedelta, timezone
from urllib.parse import urlencode

VERSION = "2023-11-03"


def signature(account: str, key: str, container: str, query: dict[str, str]) -> str:
    """What ``sig`` has to be in a query that opens a container."""
    signed = [query.get(name, "") for name in ("sp", "st", "se")]
    signed += [f"/blob/{account}/{container}", *(query.get(name, "") for name in ("si", "sip", "spr", "sv", "sr"))]
    text = "\n".join([*signed, "", *(query.get(name, "") for name in ("ses", "rscc", "rscd", "rsce", "rscl", "rsct"))])
    return base64.b64encode(hmac.digest(base64.b64decode(key), text.encode(), "sha256")).decode()


def sas(account: str, key: str, container: str, permissions: str, minutes: float = 60) -> str:
    """A query that opens a container, for so many minutes."""
    until = datetime.now(timezone.utc) + timedelta(minutes=minutes)
    query = {"sv": VERSION, "sr": "c", "sp": permissions, "se": until.strftime("%Y-%m-%dT%H:%M:%SZ")}
    return urlencode({**query, "sig": signature(account, key, container, query)})
