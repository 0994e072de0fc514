"""How a request of simserve's own format wants its tokens chosen."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from simserve.errors import did_you_mean
from simserve.sampling import MOST_LOGPROBS, RequestSampling
from simserve.types import TraceRequest
from simserve.workload.rows import BadRow, Record

__all__ = ["encode_sampling", "parse_sampling"]

_FIELD = "sampling"


def parse_sampling(record: Record, output_len: int) -> Mapping[str, Any] | None:
    """The settings that a record gives; None if it gives none. Raises BadRow."""
    given = record.get(_FIELD)
    if given is None:
        return None
    if not isinstance(given, dict):
        raise BadRow(_FIELD, "is not an object of settings", "bad_sampling")
    asked = {name: _parse(name, value) for name, value in given.items()}
    try:
        RequestSampling(**asked)
    except ValueError as error:
        raise BadRow(_FIELD, str(error), "bad_sampling") from None
    if asked.get("min_tokens", 0) > output_len:
        message = f"is {asked['min_tokens']}, more than the {output_len} tokens of output_len"
        raise BadRow(f"{_FIELD}.min_tokens", message, "bad_sampling")
    if (asked.get("logprobs") or 0) > MOST_LOGPROBS:
        raise BadRow(f"{_FIELD}.logprobs", f"is more than {MOST_LOGPROBS}", "bad_sampling")
    return asked


def encode_sampling(request: TraceRequest) -> dict[str, Any]:
    """What `parse_sampling` gives back."""
    asked = dict(request.sampling or {})
    if request.logprobs is not None:
        asked["logprobs"] = request.logprobs
    return asked


def _parse(name: str, value: Any) -> Any:
    if name not in _KINDS:
        known = did_you_mean(name, _KINDS) or f"; there are {', '.join(_KINDS)}"
        raise BadRow(f"{_FIELD}.{name[:40]}", f"unknown setting{known}", "unknown_key")
    what, parse = _KINDS[name]
    try:
        return parse(value)
    except (TypeError, ValueError, OverflowError):  # the last: no float is as large
        raise BadRow(f"{_FIELD}.{name}", f"is not {what}", "bad_sampling") from None


def _number(value: Any) -> float:
    if type(value) not in (int, float):
        raise TypeError
    return float(value)


def _whole(value: Any) -> int:
    if type(value) is not int or not -(2**63) <= value < 2**63:
        raise TypeError
    return value


def _whole_or_none(value: Any) -> int | None:
    return None if value is None else _whole(value)


def _flag(value: Any) -> bool:
    if not isinstance(value, bool):
        raise TypeError
    return value


def _ids(value: Any) -> tuple[int, ...]:
    if not isinstance(value, list):
        raise TypeError
    return tuple(map(_whole, value))


def _ids_or_none(value: Any) -> tuple[int, ...] | None:
    return None if value is None else _ids(value)


def _words(value: Any) -> tuple[tuple[int, ...], ...]:
    if not isinstance(value, list):
        raise TypeError
    return tuple(map(_ids, value))


def _biases(value: Any) -> dict[int, float]:
    if not isinstance(value, dict):
        raise TypeError
    return {int(token): _number(bias) for token, bias in value.items()}


_KINDS: dict[str, tuple[str, Callable[[Any], Any]]] = {
    "temperature": ("a number", _number),
    "top_k": ("a whole number", _whole),
    "top_p": ("a number", _number),
    "min_p": ("a number", _number),
    "seed": ("a whole number", _whole_or_none),
    "presence_penalty": ("a number", _number),
    "frequency_penalty": ("a number", _number),
    "repetition_penalty": ("a number", _number),
    "logit_bias": ("an object of numbers by token id", _biases),
    "allowed_token_ids": ("a list of token ids", _ids_or_none),
    "bad_words": ("a list of lists of token ids", _words),
    "min_tokens": ("a whole number", _whole),
    "stop_token_ids": ("a list of token ids", _ids),
    "ignore_eos": ("true or false", _flag),
    "logprobs": ("a whole number", _whole_or_none),
}
