"""Tables of how far a profile is from measured steps."""

from __future__ import annotations

from collections.abc import Mapping

from simserve.cost.profile_file import RegimeError

__all__ = ["error_cells"]

_KNOWN = {"blind": "blind", "host_known": "host known"}


def error_cells(errors: Mapping[str, Mapping[str, RegimeError]]) -> list[list[str]]:
    """A row a regime: steps, then mean error and bias for each of the columns given.

    Args:
        errors: by column (`blind`, `host_known`, or another name), by regime.
    """
    columns = [_KNOWN.get(name, name) for name in errors]
    header = ["steps", "number", *(f"{c}: {what}" for c in columns for what in ("MAPE", "bias"))]
    first = next(iter(errors.values()))
    rows = [header]
    for regime in first:
        found = [by_regime[regime] for by_regime in errors.values()]
        numbers = [text for one in found for text in (_percent(one.mape), f"{_signed(one.bias)}")]
        rows.append([regime, f"{found[0].num_steps:,}", *numbers])
    return rows


def _percent(value: float) -> str:
    return f"{100 * value:.1f} %"


def _signed(value: float) -> str:
    text = f"{100 * value:+.1f} %"
    return text.replace("-", "−")
