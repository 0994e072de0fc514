"""Unquoted YAML scalars, read as YAML 1.2 does, and refused where YAML 1.1 readers would differ.

Two readings are kept apart on purpose: `1e3` is a number (YAML 1.1 says text), while `on`, `010`,
`12:30` and `1_000` are errors, because some reader would silently make something else of them.
"""

from __future__ import annotations

import math
import re

__all__ = ["AmbiguousScalarError", "Scalar", "read_scalar"]

Scalar = str | int | float | bool | None

_NULL = {"", "~", "null", "Null", "NULL"}
_BOOL = {"true": True, "True": True, "TRUE": True, "false": False, "False": False, "FALSE": False}
_YAML_11_BOOL = {"on": "true", "yes": "true", "off": "false", "no": "false"}
_INTEGER = re.compile(r"[-+]?(0|[1-9][0-9]*)")
_HEX = re.compile(r"0x[0-9a-fA-F]+")
_NUMBER = re.compile(r"[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)([eE][-+]?[0-9]+)?")
_WHOLE_EXPONENT = re.compile(r"([-+]?[0-9]+)[eE]\+?([0-9]+)")
_LEADING_ZERO = re.compile(r"([-+]?)0+([0-9]+)")
_SEXAGESIMAL = re.compile(r"[-+]?[0-9]+(:[0-5]?[0-9])+(\.[0-9]*)?")
_UNDERSCORE = re.compile(r"[-+]?[0-9][0-9_]*(\.[0-9_]*)?([eE][-+]?[0-9]+)?")
_OTHER_BASE = re.compile(r"[-+]?0[bo][0-9_]+|[-+]0x[0-9a-fA-F_]+")
_NOT_FINITE = re.compile(r"[-+]?\.(inf|Inf|INF)|\.(nan|NaN|NAN)")
_MAX_DIGITS = 100


class AmbiguousScalarError(ValueError):
    """The text would be read differently by different YAML readers, or is no usable number."""


def read_scalar(text: str) -> Scalar:
    """The value of an unquoted scalar.

    Raises:
        AmbiguousScalarError: with what to write instead.

    >>> [read_scalar(text) for text in ("64", "1e3", "1e-3", "true", "null", "0.11.0", "0x10")]
    [64, 1000, 0.001, True, None, '0.11.0', 16]
    >>> read_scalar("017")  # doctest: +IGNORE_EXCEPTION_DETAIL
    Traceback (most recent call last):
    AmbiguousScalarError: 017 is octal to some readers: write 17, or '017' for text
    """
    if text in _NULL:
        return None
    if text in _BOOL:
        return _BOOL[text]
    if _NUMBER.fullmatch(text) or _HEX.fullmatch(text):
        return _read_number(text)
    _refuse_ambiguous(text)
    return text


def _read_number(text: str) -> int | float:
    if len(text) > _MAX_DIGITS:
        raise AmbiguousScalarError(f"a number of {len(text)} characters is too long")
    if _HEX.fullmatch(text):
        return int(text, 16)
    if _INTEGER.fullmatch(text):
        return int(text)
    if match := _LEADING_ZERO.fullmatch(text):
        plain = f"{match[1]}{match[2]}"
        raise AmbiguousScalarError(
            f"{text} is octal to some readers: write {plain}, or '{text}' for text"
        )
    value = float(text)
    if not math.isfinite(value):
        raise AmbiguousScalarError(f"{text} is too large a number")
    if match := _WHOLE_EXPONENT.fullmatch(text):
        return int(match[1] + "0" * int(match[2]))
    return value


def _refuse_ambiguous(text: str) -> None:
    if (value := _YAML_11_BOOL.get(text.lower())) is not None:
        raise AmbiguousScalarError(
            f"{text} is a boolean to some readers: write {value}, or '{text}' for text"
        )
    if _SEXAGESIMAL.fullmatch(text):
        raise AmbiguousScalarError(
            f"{text} is a number to base 60 to some readers: "
            f"write a plain number in the key's unit, or '{text}' for text"
        )
    if "_" in text and _UNDERSCORE.fullmatch(text):
        raise AmbiguousScalarError(
            f"{text} is a number only to some readers: "
            f"write {text.replace('_', '')}, or '{text}' for text"
        )
    if _OTHER_BASE.fullmatch(text):
        raise AmbiguousScalarError(
            f"{text} is a number only to some readers: write it in decimal, or '{text}' for text"
        )
    if _NOT_FINITE.fullmatch(text):
        raise AmbiguousScalarError(f"{text} is not a finite number")
