"""Text that no file can hold: Python's strings may have lone surrogates, which UTF-8 has not."""

from __future__ import annotations

from ._errors import InvalidError


def check_text(what: str, text: str) -> None:
    """Raises InvalidError if ``text`` cannot be UTF-8; ``what`` it is, such as "the name of a tensor"."""
    if not text.isascii():
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise InvalidError(
                f"{what} is {text!r}: character {error.start} is a lone surrogate, which UTF-8 cannot express. "
                "If it was decoded from bytes, decode them with the right encoding"
            ) from None
