"""Credentials that a program gives, or botocore: asked on a daemon thread, for the core.

The core waits for the answer without the GIL. A callable that hangs keeps neither a load from being cancelled nor the
interpreter from ending.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from datetime import datetime
from typing import Any

from ._errors import AccessError, InvalidError, PenstockError, UnsupportedError
from ._late_imports import importing

CALLABLE = "the callable in storage credentials"
TEXTS = ("access_key_id", "secret_access_key", "session_token", "token")

Values = tuple[str | None, str | None, str | None, str | None, float | None]
"""The texts of `TEXTS`, and when they expire: seconds since the epoch."""
Failure = tuple[str, str, tuple[BaseException, str] | None]
"""The kind and the message of an error; what led to it, and what the message says of that."""


def ask(call: Callable[[], object], tell: Callable[[Values | None, Failure | None], None]) -> None:
    """Calls ``call`` on a thread of its own, and ``tell`` with what it gave or why it did not."""
    threading.Thread(target=_answer, args=(call, tell), name="penstock-credentials", daemon=True).start()


def _answer(call: Callable[[], object], tell: Callable[[Values | None, Failure | None], None]) -> None:
    values: Values | None = None
    failure: Failure | None = None
    try:
        values = _values(call())
    except PenstockError as error:
        cause = error.__cause__
        failure = error.kind, error.message, None if cause is None else (cause, _told(cause))
    except BaseException as error:
        # Its text may quote what nobody else should see: the exception itself is the cause of the error
        failure = "Permission", f"{CALLABLE} failed", (error, type(error).__name__)
    tell(values, failure)


def _values(given: object) -> Values:
    """The values that a callable gave, checked. No message shows any of them.

    Raises:
        InvalidError: it makes no sense.
    """
    if not isinstance(given, Mapping):
        raise InvalidError(f"{CALLABLE} gave a {type(given).__name__}: let it return a mapping with {_names()}")
    unknown = [str(name) for name in given if name not in (*TEXTS, "expires_at")]
    if unknown:
        raise InvalidError(f"{CALLABLE} gave {', '.join(sorted(unknown))}, which is not known: it may give {_names()}")
    texts = [given.get(name) for name in TEXTS]
    for name, text in zip(TEXTS, texts, strict=True):
        if not isinstance(text, str | None):
            raise InvalidError(f"{CALLABLE} gave a {type(text).__name__} as {name}: let it be a string")
    return (*texts, _seconds(given.get("expires_at")))  # type: ignore[return-value]


def _names() -> str:
    return ", ".join((*TEXTS, "expires_at"))


def _seconds(moment: object) -> float | None:
    if isinstance(moment, datetime):
        if moment.tzinfo is None:
            raise InvalidError(f"{CALLABLE} gave an expires_at without a time zone: give one, such as timezone.utc")
        return moment.timestamp()
    if isinstance(moment, int | float | None) and not isinstance(moment, bool):
        return moment
    raise InvalidError(
        f"{CALLABLE} gave a {type(moment).__name__} as expires_at: let it be a datetime, or seconds since the epoch"
    )


def _told(error: BaseException) -> str:
    """The text for an exception of botocore. The output of a process is not repeated."""
    name = type(error).__name__
    provider = getattr(error, "kwargs", {}).get("provider")
    return name if provider == "custom-process" else f"{name}: {error}"


class Profile:
    """A callable: the credentials of a profile of AWS's configuration files, which botocore finds and renews."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._found: Any = None

    def __call__(self) -> dict[str, object]:
        if self._found is None:
            self._found = self._find()
        try:
            keys = self._found.get_frozen_credentials()
        except Exception as error:
            raise self._failed(error) from error
        names = ("access_key", "secret_key", "token")
        return dict(zip(TEXTS, (getattr(keys, name) for name in names), strict=False))

    def _find(self) -> Any:
        try:
            with importing():
                import botocore.session
        except ImportError as error:
            raise UnsupportedError(
                f'the AWS profile "{self._name}" takes its credentials from SSO, a role or a process, which needs '
                f"botocore: `pip install botocore`; or give keys, such as those of `aws configure export-credentials "
                f"--profile {self._name} --format env`"
            ) from error
        try:
            found = botocore.session.Session(profile=self._name).get_credentials()
        except Exception as error:
            raise self._failed(error) from error
        if found is None:
            raise AccessError(f'botocore finds no credentials for the AWS profile "{self._name}"')
        return found

    def _failed(self, error: Exception) -> AccessError:
        return AccessError(f'botocore gets no credentials for the AWS profile "{self._name}"')
