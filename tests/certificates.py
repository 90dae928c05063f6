"""An authority of the tests' own, and certificates as people make them."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest
from penstock.bench.served import NotServed, certify


def made(folder: Path) -> tuple[Path, Path, Path]:
    """The certificate of an authority, the certificate that it gave localhost, and the key of that."""
    try:
        return certify(folder)
    except NotServed as error:
        pytest.skip(str(error))


KINDS_OF_KEY = {
    "rsa": ("rsa:2048",),
    "p256": ("ec", "-pkeyopt", "ec_paramgen_curve:prime256v1"),
    "p384": ("ec", "-pkeyopt", "ec_paramgen_curve:secp384r1"),
    "p521": ("ec", "-pkeyopt", "ec_paramgen_curve:secp521r1"),
}


def own(
    folder: Path, *, subject: str = "/CN=localhost", key: str = "p256", extensions: str = "", dates: str = "now",
    version: int = 3,
) -> tuple[Path, Path]:  # fmt: skip
    """A certificate that has signed itself, and its key.

    Args:
        folder: Where both are written.
        subject: As `openssl req -subj` takes it.
        key: One of `KINDS_OF_KEY`.
        extensions: Lines of a section; "": those of `openssl req -x509`, which makes it an authority.
        dates: "now", "past" or "future".
        version: 1 has no extensions.
    """
    certificate, secret, asked = folder / "own.pem", folder / "own.key", folder / "own.csr"

    def openssl(*arguments: str | Path) -> None:
        try:
            subprocess.run(["openssl", *map(str, arguments)], check=True, capture_output=True, cwd=folder)
        except FileNotFoundError:
            pytest.skip("there is no openssl here")

    new = ("-newkey", *KINDS_OF_KEY[key], "-nodes", "-keyout", secret, "-subj", subject)
    if not extensions and dates == "now" and version == 3:
        openssl("req", "-x509", *new, "-days", "30", "-out", certificate)
        return certificate, secret
    openssl("req", *new, "-out", asked)
    usual = "basicConstraints=critical,CA:TRUE\nsubjectKeyIdentifier=hash\n"
    (folder / "extensions").write_text(extensions or usual)
    if dates == "future":
        (folder / "index").write_text("")
        (folder / "serial").write_text("01")
        (folder / "ca.cnf").write_text(
            "[ca]\ndefault_ca=own\n[own]\ndatabase=index\nserial=serial\nnew_certs_dir=.\ndefault_md=sha256\n"
            "policy=any\nunique_subject=no\n[any]\ncommonName=supplied\n"
        )
        openssl(
            "ca", "-batch", "-selfsign", "-config", "ca.cnf", "-keyfile", secret, "-in", asked, "-out", certificate,
            "-startdate", "20950101000000Z", "-enddate", "20960101000000Z", "-extfile", "extensions", "-notext",
        )  # fmt: skip
        return certificate, secret
    more = ("-extfile", "extensions") if version == 3 else ()
    days = "-1" if dates == "past" else "30"
    openssl("x509", "-req", "-in", asked, "-signkey", secret, "-days", days, *more, "-out", certificate)
    return certificate, secret


def signed(folder: Path, authority: Path, key: Path, subject: str, extensions: str) -> tuple[Path, Path]:
    """A certificate that an authority has signed, and its key."""
    own(folder, subject=subject)
    (folder / "extensions").write_text(extensions)
    subprocess.run(
        ["openssl", "req", "-new", "-key", "own.key", "-subj", subject, "-out", "own.csr"],
        check=True, capture_output=True, cwd=folder,
    )  # fmt: skip
    subprocess.run(
        ["openssl", "x509", "-req", "-in", "own.csr", "-CA", authority, "-CAkey", key, "-CAcreateserial", "-days", "30",
         "-extfile", "extensions", "-out", "own.pem"],
        check=True, capture_output=True, cwd=folder,
    )  # fmt: skip
    return folder / "own.pem", folder / "own.key"
