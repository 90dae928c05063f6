"""The dtypes of the format and what each framework calls them.

Spellings are those of the safetensors header. A None means that the framework has no such dtype.
"""

from typing import Any, NamedTuple

from ._errors import InvalidError


class DType(NamedTuple):
    """One dtype of the format."""

    bits: int
    """Bits per element."""
    torch: str | None
    """Attribute of the ``torch`` module."""
    numpy: str | None
    """numpy's own name of it."""
    ml_dtypes: str | None
    """Attribute of the ``ml_dtypes`` module, for what numpy lacks."""
    dlpack: tuple[int, int] | None
    """(type code, bits) of DLPack 1.1."""


DTYPES: dict[str, DType] = {
    "BOOL": DType(8, "bool", "bool", None, (6, 8)),
    # Two elements a byte: torch's dtype is that pair, ml_dtypes' is one element in a byte of its own.
    "F4": DType(4, "float4_e2m1fn_x2", None, None, None),
    "F6_E2M3": DType(6, None, None, None, None),
    "F6_E3M2": DType(6, None, None, None, None),
    "U8": DType(8, "uint8", "uint8", None, (1, 8)),
    "I8": DType(8, "int8", "int8", None, (0, 8)),
    "F8_E5M2": DType(8, "float8_e5m2", None, "float8_e5m2", (12, 8)),
    "F8_E4M3": DType(8, "float8_e4m3fn", None, "float8_e4m3fn", (10, 8)),
    "F8_E8M0": DType(8, "float8_e8m0fnu", None, "float8_e8m0fnu", (14, 8)),
    "F8_E4M3FNUZ": DType(8, "float8_e4m3fnuz", None, "float8_e4m3fnuz", (11, 8)),
    "F8_E5M2FNUZ": DType(8, "float8_e5m2fnuz", None, "float8_e5m2fnuz", (13, 8)),
    "I16": DType(16, "int16", "int16", None, (0, 16)),
    "U16": DType(16, "uint16", "uint16", None, (1, 16)),
    "F16": DType(16, "float16", "float16", None, (2, 16)),
    "BF16": DType(16, "bfloat16", None, "bfloat16", (4, 16)),
    "I32": DType(32, "int32", "int32", None, (0, 32)),
    "U32": DType(32, "uint32", "uint32", None, (1, 32)),
    "F32": DType(32, "float32", "float32", None, (2, 32)),
    "C64": DType(64, "complex64", "complex64", None, (5, 64)),
    "F64": DType(64, "float64", "float64", None, (2, 64)),
    "I64": DType(64, "int64", "int64", None, (0, 64)),
    "U64": DType(64, "uint64", "uint64", None, (1, 64)),
}

CASTABLE = ("F16", "BF16", "F32", "F64")
"""The dtypes that ``dtype=`` casts from and to; all others (F8, F4, integers, bool, complex) are left alone."""

RAW = "raw"
"""``dtype="raw"``: the tensor's bytes, as uint8 of shape (nbytes,)."""

_SPELLINGS: dict[str, str] = {
    **{name: name for name in CASTABLE},
    **{str(DTYPES[name].torch): name for name in CASTABLE},
    "half": "F16",
    "float": "F32",
    "double": "F64",
}


def cast_target(dtype: Any) -> str | None:
    """The meaning of a ``dtype=`` argument: None, `RAW`, or the dtype (as spelled in a header) to cast to.

    Takes ``torch.bfloat16``, ``"bfloat16"``, ``"torch.bfloat16"``, ``"BF16"``, ``numpy.float32``, ``numpy.dtype("f4")``
    and the like.

    Raises:
        InvalidError: if it is none of these.
    """
    if dtype is None or dtype == RAW:
        return dtype  # type: ignore[no-any-return]
    name = dtype if isinstance(dtype, str) else getattr(dtype, "name", None) or getattr(dtype, "__name__", str(dtype))
    found = _SPELLINGS.get(str(name).removeprefix("torch."))
    if found is None:
        raise InvalidError(
            f"dtype={dtype!r} is not a dtype to cast to: give one of float16, bfloat16, float32, float64 "
            f"(as a string, or the dtype of torch or numpy), or {RAW!r} for plain bytes"
        )
    return found
