"""Warnings of servers whose certificates are not checked (``storage={"tls_verify": False}``)."""

from __future__ import annotations

import warnings
from collections.abc import Iterable

from . import _core

_warned: set[str] = set()


def warn_of_unchecked(hosts: Iterable[str] = ()) -> None:
    """Warns of these hosts, and of those that the core has connected to: of each once in a process."""
    for host in (*_core.unchecked_hosts(), *hosts):
        if host not in _warned:
            _warned.add(host)
            warnings.warn(
                f"the certificate of {host} is not checked (tls_verify=False): others on the network can read "
                "and change the data",
                RuntimeWarning,
                stacklevel=4,
            )
