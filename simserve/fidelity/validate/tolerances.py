"""How far a simulation may be off: the default limits, and those given by hand."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from simserve.errors import ConfigError, did_you_mean

__all__ = ["BLIND", "HOST_KNOWN", "LIMITS", "parse_tolerances"]

BLIND: Mapping[str, float] = {
    "ttft_p50": 0.08,
    "ttft_p95": 0.08,
    "ttft_p99": 0.08,
    "itl_p50": 0.05,
    "itl_p95": 0.05,
    "itl_p99": 0.05,
    "e2el_p50": 0.05,
    "throughput": 0.02,
}
"""Relative limits for a profile alone. Latencies may also be off by the engine's own spread."""

HOST_KNOWN: Mapping[str, float] = {
    "ttft_p50": 0.05,
    "ttft_p95": 0.06,
    "ttft_p99": 0.06,
    "itl_p50": 0.03,
    "itl_p95": 0.03,
    "itl_p99": 0.03,
    "e2el_mean": 0.03,
    "e2el_p50": 0.03,
    "e2el_p95": 0.03,
    "e2el_p99": 0.03,
    "throughput": 0.02,
    "step_mape_gpu": 0.03,
    "step_mape_host": 0.06,
    "step_bias": 0.015,
}
"""Limits where the speed of the log's host is known. The spread is none: it is the host's."""

LIMITS = tuple(
    [f"{m}_{s}" for m in ("ttft", "itl", "tpot", "e2el") for s in ("mean", "p50", "p95", "p99")]
    + ["throughput", "step_mape_gpu", "step_mape_host", "step_bias"]
)
"""All that can be limited."""


def parse_tolerances(texts: Iterable[str]) -> dict[str, float]:
    """`NAME=PERCENT` to relative limits; a metric alone (`itl`) stands for its p50, p95 and p99.

    Raises:
        ConfigError: a name is not known, or its value is not a number of at least 0.
    """
    limits: dict[str, float] = {}
    for text in texts:
        name, _, value = text.partition("=")
        names = [name] if name in LIMITS else [f"{name}_{p}" for p in ("p50", "p95", "p99")]
        if names[0] not in LIMITS:
            near = did_you_mean(name, LIMITS)
            raise ConfigError(f"--tolerance {text}: there is no '{name}'{near}")
        try:
            percent = float(value)
        except ValueError:
            percent = -1.0
        if not percent >= 0.0:
            raise ConfigError(f"--tolerance {text}: expected NAME=PERCENT, such as ttft_p50=8")
        limits.update(dict.fromkeys(names, percent / 100.0))
    return limits
