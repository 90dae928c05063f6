"""The Hugging Face Hub over the network, for what the local cache lacks: which commit a revision is now, what the
commit holds, and the web addresses of its files. Nothing is written to a disk, unless a disk cache is named.

One request asks the Hub's API. The core then reads the files from ``<endpoint>/<repository>/resolve/<commit>/<path>``,
which redirects to wherever the Hub keeps them. The token goes to the Hub's own server, and to no other.
"""

from __future__ import annotations

import errno
import http.client
import json
import os
import re
import ssl
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from http.client import HTTPMessage
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, NamedTuple, cast
from urllib.parse import quote, unquote, urljoin, urlsplit

from . import _core
from ._choices import Storage
from ._errors import AccessError, InvalidError, NotFoundError, PenstockError, ReadError
from ._hub import (
    ADVICE,
    COMMIT,
    REPOSITORY,
    SCHEME,
    Expected,
    Reference,
    Snapshot,
    find,
    home,
    is_true,
    listed,
    open_snapshot,
    parse,
    partial_sets,
)
from ._hub_layout import digest_in, layout_of
from ._late_imports import importing
from ._paths import without_secrets
from ._patience import T, asking, patiently, pause
from ._tls import warn_of_unchecked

if TYPE_CHECKING:
    import logging

TRIES = 5
"""Most requests for one thing, as long as the Hub answers at all."""
TRIES_UNANSWERED = 3
_FIRST_PAUSE = 0.2
_LONGEST_PAUSE = 10.0
_TIMEOUT = 10.0
"""Seconds that one request waits for the next bytes."""
_MOST_BYTES = 256 << 20
_AGAIN = (408, 425, 429, 500, 502, 503, 504)


class Token(NamedTuple):
    """A token of the Hub. Its text is in no message."""

    text: str
    source: str
    """Where it was found: a variable or a file."""

    def __repr__(self) -> str:
        return f"Token(from {self.source})"


Digests = Callable[[Sequence[str]], dict[str, Expected]]
"""Asks what the files at these addresses must hash to."""


class Pinned(NamedTuple):
    """A commit of a repository on the Hub."""

    repository: str
    """Its name now: it may have been renamed."""
    commit: str
    names: list[str]
    """The paths of its files."""
    layout: _core.HubLayout | None = None
    """Where the local cache has them; None without a disk cache, whose files go there too."""


class Access(NamedTuple):
    """The token and the place for files of the Hub, as the core takes them."""

    bearer: tuple[str, str] | None = None
    """The Hub's server, and the token for it."""
    hub: _core.HubLayout | None = None


# The environment


def endpoint() -> str:
    """The address of the Hub, without a slash at its end."""
    found = os.environ.get("HF_ENDPOINT", "https://huggingface.co").strip().strip("\"'").strip().rstrip("/")
    sound = re.fullmatch(r"https?://[^\s/@?#]+(/[^\s?#]*)?", found) is not None
    try:
        sound = sound and bool(urlsplit(found).hostname) and urlsplit(found).port != 0
    except ValueError:
        sound = False
    if not sound:
        raise InvalidError(f"HF_ENDPOINT={without_secrets(found)!r} is not the address of a server: https://host")
    return found


def token() -> Token | None:
    """The token that huggingface_hub would send with this environment."""
    environ = os.environ
    if is_true(environ.get("HF_HUB_DISABLE_IMPLICIT_TOKEN")):
        return None
    name = "HF_TOKEN" if environ.get("HF_TOKEN") else "HUGGING_FACE_HUB_TOKEN"
    found = Token(environ.get(name, "").strip(), name)
    if not found.text:
        path = Path(os.path.expandvars(os.path.expanduser(environ.get("HF_TOKEN_PATH", home() / "token"))))  # noqa: PTH111
        asking(path)
        try:
            found = Token(path.read_text("utf-8", "replace").strip(), str(path))
        except (FileNotFoundError, NotADirectoryError):
            return None
        except OSError as error:
            message = f"cannot read the token of the Hub: {error}"
            raise AccessError(message, path=str(path), errno=error.errno) from error
    if not found.text:
        return None
    if not re.fullmatch(r"[!-~]+", found.text):
        raise InvalidError(f"{found.source} holds no token of the Hub: it has spaces, or characters that are not ASCII")
    return found


# One request


class _Redirects(urllib.request.HTTPRedirectHandler):
    """Follows redirects, and takes the token to no other server."""

    def redirect_request(
        self, req: urllib.request.Request, fp: IO[bytes], code: int, msg: str, headers: HTTPMessage, newurl: str
    ) -> urllib.request.Request | None:
        to = urljoin(req.full_url, newurl)
        if not to.startswith("https:" if req.full_url.startswith("https:") else ("http:", "https:")):
            raise urllib.error.URLError("it redirects to an address of another kind, or from https to http")
        # Before 3.11 the library knew 307, and not 308
        following = super().redirect_request(req, fp, 307 if code == 308 else code, msg, headers, newurl)
        if following is not None and _server(to) != _server(req.full_url):
            following.remove_header("Authorization")
        return following

    http_error_308 = urllib.request.HTTPRedirectHandler.http_error_302


def _server(url: str) -> tuple[str, str, int]:
    parts = urlsplit(url)
    return parts.scheme, (parts.hostname or "").lower(), parts.port or (443 if parts.scheme == "https" else 80)


def _name(url: str) -> str:
    parts = urlsplit(url)
    return f"{parts.scheme}://{parts.netloc}"


#: The text of http.client for a tunnel.
_TUNNEL_REFUSED = "Tunnel connection failed: 407"


class _Proxied(urllib.request.BaseHandler):
    """Has requests go through the proxy that the core would take."""

    handler_order = 900  # when they know their host

    def __init__(self, storage: Storage | None) -> None:
        self._storage = storage

    def http_request(self, request: urllib.request.Request) -> urllib.request.Request:
        found = _core.proxy(request.full_url, self._storage)
        if found is not None:
            where, authorization = found
            request.set_proxy(where, "http")
            if authorization is not None:
                request.add_unredirected_header("Proxy-Authorization", authorization)
        return request

    https_request = http_request


def _context(url: str, storage: Storage | None) -> ssl.SSLContext:
    """The authorities that TLS trusts: those that the core trusts, wherever this Python keeps its own."""
    trusted = _core.certificates(storage)
    if trusted is None:
        warn_of_unchecked([urlsplit(url).hostname or ""])
        context = ssl.create_default_context()
        context.check_hostname = False
        context.verify_mode = ssl.CERT_NONE
        return context
    context = ssl.create_default_context(cadata=trusted)
    context.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN  # the certificate of a server may be trusted itself
    return context


def _opener(url: str, storage: Storage | None) -> urllib.request.OpenerDirector:
    proxied = (urllib.request.ProxyHandler({}), _Proxied(storage))
    if not url.startswith("https:"):
        return urllib.request.build_opener(_Redirects, *proxied)
    https = urllib.request.HTTPSHandler(context=_context(url, storage))
    return urllib.request.build_opener(_Redirects, *proxied, https)


def _ask(url: str, sent: Token | None, storage: Storage | None) -> Any:
    """The JSON at ``url``. Asks again if the Hub is busy or cannot be reached.

    Raises:
        urllib.error.HTTPError: what the Hub answers instead.
        AccessError: the proxy wants a name and a password.
        ReadError: it cannot be reached, or is no Hub.
    """
    headers = {"Accept": "application/json", "User-Agent": f"penstock/{_core.__version__}"}
    if sent is not None:
        headers["Authorization"] = f"Bearer {sent.text}"
    opener, tried = _opener(url, storage), 0
    while True:
        asking(url)
        tried += 1
        wait = _FIRST_PAUSE * 2 ** (tried - 1)
        try:
            with opener.open(urllib.request.Request(url, headers=headers), timeout=_TIMEOUT) as answer:
                text = answer.read(_MOST_BYTES)
            break
        except urllib.error.HTTPError as error:
            if error.code == 407:
                with error:
                    raise _refused_by_proxy(error.url, storage) from None
            if error.code not in _AGAIN or tried == TRIES:
                raise
            wait = max(wait, _retry_after(error))
            error.close()
        except (OSError, http.client.HTTPException) as error:
            reason = error.reason if isinstance(error, urllib.error.URLError) else error
            if _TUNNEL_REFUSED in str(reason):
                raise _refused_by_proxy(url, storage) from None
            if isinstance(reason, ssl.SSLCertVerificationError):
                raise ReadError(
                    f"the certificate of {_name(url)} is not trusted ({reason.verify_message}); if an authority of "
                    "your own has signed it, name the file with its certificate in SSL_CERT_FILE",
                    path=url,
                ) from error
            if tried == TRIES_UNANSWERED:
                message = f"cannot reach {_name(url)}: {reason or type(reason).__name__}; it was asked {tried} times"
                raise ReadError(message, path=url) from error
        pause(min(wait, _LONGEST_PAUSE))
    try:
        return json.loads(text)
    except ValueError as error:
        message = f"{_name(url)} did not answer as the Hub does: its answer is no JSON (does HF_ENDPOINT name a Hub?)"
        raise ReadError(message, path=url) from error


def _refused_by_proxy(url: str, storage: Storage | None) -> AccessError:
    found = _core.proxy(url, storage)
    named = "a proxy" if found is None else f"the proxy http://{found[0]}"
    text = 'it wants a user\'s name and a password: storage={"proxy": "http://user:password@host:port"}'
    return AccessError(f"{_name(url)}: {named} answers 407: {text}", path=url, status=407)


def _retry_after(error: urllib.error.HTTPError) -> float:
    value = error.headers.get("Retry-After", "")
    return float(value) if value.isdecimal() else 0.0


# Which commit


def pin(source: str, reference: Reference, sent: Token | None, storage: Storage | None = None) -> Pinned:
    """The commit that ``reference`` is now, and its files.

    Raises:
        NotFoundError: there is no such repository or revision, or it is not shown to everybody.
        AccessError: the Hub does not let us.
        ReadError: the Hub cannot be reached, or does not answer as a Hub does.
    """
    keeps, asked = _core.asks_for_versions(storage), time.time()
    url, said = _revision(source, reference, sent, storage, "?blobs=true" if keeps else "")
    try:
        name, commit = said.get("id") or reference.repository, said["sha"]
        siblings = [dict(sibling) for sibling in said["siblings"]]
        names = [str(sibling["rfilename"]) for sibling in siblings]
        sound = re.fullmatch(REPOSITORY, name, re.ASCII) is not None and COMMIT.fullmatch(commit) is not None
    except (KeyError, TypeError, ValueError, AttributeError):
        sound = False
    if not sound:
        message = f"{source}: {_name(url)} did not answer as the Hub does (does HF_ENDPOINT name a Hub?)"
        raise ReadError(message, path=url)
    pinned = Pinned(name, commit, names)
    if not keeps:
        return pinned
    return pinned._replace(layout=layout_of(reference, commit, base(pinned), siblings, asked))


def _revision(
    source: str, reference: Reference, sent: Token | None, storage: Storage | None, query: str = ""
) -> tuple[str, Any]:
    """The address of what the Hub says of a revision, and that."""
    url = f"{endpoint()}/api/models/{reference.repository}/revision/{quote(reference.revision, safe='')}{query}"
    try:
        return url, _ask(url, sent, storage)
    except urllib.error.HTTPError as error:
        with error:
            raise _refused(source, reference, error, sent) from None


def digests_of(source: str, pinned: Pinned, storage: Storage | None, files: Sequence[str]) -> dict[str, Expected]:
    """The hashes that the Hub expects of the files at these addresses, as far as it has them.

    Raises:
        NotFoundError, AccessError, ReadError: as `pin`.
    """
    reference = Reference(pinned.repository, pinned.commit, "")
    _, said = _revision(source, reference, token(), storage, "?blobs=true")
    try:
        listed = {str(sibling["rfilename"]): dict(sibling) for sibling in said["siblings"]}
    except (KeyError, TypeError, ValueError):
        listed = {}
    found = {}
    for file in files:
        about = listed.get(unquote(file.removeprefix(base(pinned))), {})
        if (expected := digest_in(about, "Hub")) is not None:
            found[file] = expected
    return found


def base(pinned: Pinned) -> str:
    """How the addresses of the files of a commit begin."""
    return f"{endpoint()}/{pinned.repository}/resolve/{pinned.commit}/"


def _refused(source: str, reference: Reference, error: urllib.error.HTTPError, sent: Token | None) -> PenstockError:
    """The error for an answer of the Hub that is not a commit."""
    where, said = endpoint(), error.headers
    code, note = said.get("X-Error-Code", ""), said.get("X-Error-Message", "")
    request = f", request {said['X-Request-Id']}" if said.get("X-Request-Id") else ""
    named = f"({error.code}{f', {code}' if code else ''}{request})"
    repository = reference.repository
    if code == "GatedRepo":
        return gated(source, repository, sent, named)
    if code == "RevisionNotFound":
        message = f"{source}: {repository} has no revision {reference.revision} on {where} {named}"
        return NotFoundError(message, path=source)
    if error.code == 401 and note.startswith("Invalid credentials") and sent is not None:
        message = f"{source}: {where} does not know the token from {sent.source} {named}; `hf auth login` gives another"
        return AccessError(message, path=source)
    if code == "RepoNotFound" or error.code in (401, 404):
        message = f"{source}: there is no repository {repository} on {where}, or it is private {named}; {_with(sent)}"
        return NotFoundError(message, path=source)
    if error.code == 403:
        why = f": {note}" if note else ""
        return AccessError(f"{source}: {where} refuses access to {repository} {named}{why}; {_with(sent)}", path=source)
    if error.code == 429:
        message = f"{source}: {where} has had too many requests from here {named}; {_with(sent)}, or wait some minutes"
        return ReadError(message, path=source)
    if error.code in _AGAIN:
        message = f"{source}: {where} is busy or broken {named}; it was asked {TRIES} times"
    else:
        message = f"{source}: {where} did not answer as the Hub does {named} (does HF_ENDPOINT name a Hub?)"
    return ReadError(message, path=source)


def gated(source: str, repository: str, sent: Token | None, named: str) -> AccessError:
    """The error for a repository whose owner wants to be asked for access."""
    page = f"{endpoint()}/{repository}"
    if sent is None:
        todo = f"ask for it at {page}, then give a token of that account: `hf auth login`, or HF_TOKEN"
    else:
        todo = f"the account of the token from {sent.source} has not got it: ask for it at {page}"
    return AccessError(f"{source}: access to {repository} must be granted first {named}: {todo}", path=source)


def _with(sent: Token | None) -> str:
    """Advice about a token."""
    if sent is None:
        return "no token was sent: `hf auth login`, or HF_TOKEN, gives one"
    return f"the token from {sent.source} was sent"


# The checkpoint of a commit


def open_commit(
    source: str,
    reference: Reference,
    pinned: Pinned,
    sent: Token | None,
    stall_timeout: float | None = None,
    storage: Storage | None = None,
    variant: str | None = None,
) -> _core.Checkpoint:
    """The checkpoint that lies where ``reference`` says, at this commit: the same one as in a snapshot of it.

    Raises:
        NotFoundError: there is none.
        AccessError: the Hub does not let us read its files.
    """
    names = _names(source, reference, pinned, variant)
    address = base(pinned) + quote(reference.within)
    asked = without_credentials(storage)

    def read(access: Access) -> _core.Checkpoint:
        known = None if names is None else [quote(name) for name in names]
        return _core.Checkpoint.open([address], stall_timeout, asked, *access, variant, names=known)

    return explained(source, pinned, sent, read)


def without_credentials(storage: Storage | None) -> Storage | None:
    """Settings for the Hub, which has its own token: a callable is for other servers."""
    return cast("Storage", {**storage, "credentials": None}) if isinstance(storage, Mapping) else storage


def explained(source: str, pinned: Pinned, sent: Token | None, read: Callable[[Access], T]) -> T:
    """The result of ``read``, which asks the Hub for files with this token; errors are put in terms of the Hub."""
    where = endpoint()
    try:
        return read(Access(None if sent is None else (_name(where), sent.text), pinned.layout))
    except AccessError as error:
        if "GatedRepo" in error.message:
            raise gated(source, pinned.repository, sent, f"({error})") from None
        raise


def _names(source: str, reference: Reference, pinned: Pinned, variant: str | None) -> list[str] | None:
    """The names in the folder to open; None if it is a file.

    Raises:
        NotFoundError: there is nothing to open among them, or a part of it.
    """
    within, place = reference.within, f"{reference} on {endpoint()} (commit {pinned.commit})"
    if within in pinned.names:
        return None
    folder = f"{within}/" if within else ""
    names = [name[len(folder) :] for name in pinned.names if name.startswith(folder)]
    if within and not names:
        held = sorted({name.split("/")[0] for name in pinned.names})
        raise NotFoundError(f"{place}: there is no {within}; the repository holds {listed(held)}", path=source)
    try:
        here = [name for name in names if "/" not in name]
        chosen = [here[position] for position in _core.Checkpoint.to_open(source, here, variant)]
    except NotFoundError as error:
        inside = sorted({name.rpartition("/")[0] for name in pinned.names if name.endswith(".safetensors")} - {""})
        more = ""
        if inside and not within:
            revision = reference.revision.replace("/", "%2F")
            example = f"{SCHEME}{reference.repository}@{revision}/{inside[0]}"
            more = f". Folders of it have some: {listed(inside)}; open {example}"
        raise NotFoundError(f"{place}: {error.message}{more}", path=source) from None
    for name, there, count in partial_sets(chosen):
        message = f"{there} of the {count} shard files of {name!r} are there, by their names, and no index"
        raise NotFoundError(f"{place}: {message}", path=source)
    return here


def open_repository(
    source: str,
    lacking: NotFoundError | None,
    kept: Snapshot | None = None,
    stall_timeout: float | None = None,
    storage: Storage | None = None,
    variant: str | None = None,
) -> tuple[_core.Checkpoint, Snapshot | None, Digests | None]:
    """The checkpoint that ``source`` names, from the Hub.

    Args:
        lacking: What the local cache lacks of it; None if it has the snapshot ``kept``.
        kept: A commit that the revision had. It is opened if the Hub cannot be reached.

    Returns:
        The checkpoint of the core. The snapshot that it is, if the cache has that very commit, else what asks the Hub
        for the digests of its files.

    Raises:
        NotFoundError, AccessError, ReadError: as `pin` and `open_commit`. The text of ``lacking`` is part of theirs.
        StalledError: the Hub does not answer.
    """
    reference = parse(source)
    if reference is None:
        raise lacking or InvalidError(f"{source!r} is not the name of a repository")

    def ask() -> tuple[Token | None, Pinned]:
        sent = token()
        return sent, pin(source, reference, sent, storage)

    try:
        sent, pinned = patiently(ask, stall_timeout, endpoint())
    except ReadError as error:
        if kept is None:
            raise _both(source, error, lacking, True) from error.__cause__
        _logger().warning("%s, so %s is commit %s of the local Hub cache", error.message, source, kept.commit)
        return open_snapshot(kept, stall_timeout, variant), kept, None
    except (NotFoundError, AccessError) as error:
        raise _both(source, error, lacking, True) from error.__cause__
    # The cache may have the commit, and not know that it is this revision
    local = f"{SCHEME}{reference.repository}@{pinned.commit}" + (f"/{reference.within}" if reference.within else "")
    try:
        snapshot = patiently(lambda: find(local), stall_timeout, local)
        return open_snapshot(snapshot, stall_timeout, variant), snapshot, None
    except NotFoundError as error:
        lacking = lacking or error
    try:
        core = open_commit(source, reference, pinned, sent, stall_timeout, storage, variant)
    except (NotFoundError, AccessError, ReadError) as error:
        raise _both(source, error, lacking, False) from error.__cause__
    _tell(source, pinned, lacking)
    return core, None, partial(digests_of, source, pinned, storage)


def _both(source: str, error: PenstockError, lacking: NotFoundError | None, unknown: bool) -> PenstockError:
    """The error of the Hub, with what the cache said before. ``unknown``: whether the Hub has it."""
    if lacking is None:
        cache = "The local cache has it. With a disk cache the Hub is asked for it first; HF_HUB_OFFLINE=1 asks nobody"
    else:
        cache = f"The local cache was looked at first: {_lacks(source, lacking)}"
    kind = type(error)
    if kind is ReadError and unknown and not source.startswith(SCHEME):
        kind = NotFoundError  # as offline: nothing here has that name
    number = errno.ENOENT if kind is NotFoundError else error.errno
    status, request_id, text = error.status, error.request_id, f"{error.message}. {cache}"
    return kind(text, path=error.path, range=error.range, errno=number, status=status, request_id=request_id)


def _lacks(source: str, lacking: NotFoundError) -> str:
    """The part that the cache lacks, without the advice to fill it."""
    return lacking.message.removeprefix(f"{source}: ").partition(ADVICE)[0].rstrip(" .")


def _logger() -> logging.Logger:
    with importing():
        import logging
    return logging.getLogger("penstock")


def _tell(source: str, pinned: Pinned, lacking: NotFoundError) -> None:
    """Says that the network is used: as a warning, except where that was asked for and the cache has nothing of it, or
    where a disk cache keeps it."""
    with importing():
        import logging
    kept, quiet = "keeps nothing", source.startswith(SCHEME) and lacking.path == source
    if pinned.layout is not None:
        kept, quiet = "the disk cache keeps it; whole files go to the local Hub cache too", True
    _logger().log(
        logging.INFO if quiet else logging.WARNING,
        "%s: the local Hub cache cannot serve it (%s), so each load reads commit %s of %s from %s and %s; "
        "`hf download` keeps it, and HF_HUB_OFFLINE=1 keeps penstock from the network",
        source,
        _lacks(source, lacking),
        pinned.commit,
        pinned.repository,
        endpoint(),
        kept,
    )
