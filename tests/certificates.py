"""An authority of the tests' own."""

from __future__ import annotations

from pathlib import Path

import pytest

from penstock.bench.served import NotServed, certify


def made(folder: Path) -> tuple[Path, Path, Path]:
    """The certificate of an authority, the certificate that it gave localhost, and the key of that."""
    try:
        return certify(folder)
    except NotServed as error:
        pytest.skip(str(error))
