"""Whether a difference between two results can be put down to something.

It can if exactly one effective setting differs, and if both results tell what made them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from simserve.fidelity.compare.result_source import Result

__all__ = [
    "SettingDifference",
    "differing_settings",
    "following_settings",
    "missing_facts",
    "one_sided_settings",
]

_REQUIRED = ("max_num_batched_tokens", "max_num_seqs", "enable_prefix_caching")
"""Without these a configuration is not the effective one of an engine."""
_FOLLOWS = {"scheduler_reserve_full_isl": "compat", "options": "scheduler.kind"}
"""Settings that another one decides: where that differs, they are part of it."""


_SIZES = ("model", "gpu", "dtype", "block_size", "gpu_memory_utilization", "max_model_len")
_DEFAULTS_BY = {
    "max_model_len": ("model",),
    "max_num_batched_tokens": ("gpu", "enable_chunked_prefill"),
    "max_num_seqs": ("gpu", "max_num_batched_tokens"),
    "num_gpu_blocks": (*_SIZES, "max_num_batched_tokens", "max_num_seqs"),
}
"""Settings that follow from others where simserve is not given them."""


class SettingDifference(NamedTuple):
    """A setting with its two values."""

    name: str
    values: tuple[object, object]

    def __str__(self) -> str:
        return f"{self.name}: {self.values[0]} / {self.values[1]}"


def differing_settings(a: Result, b: Result) -> list[SettingDifference]:
    """Settings that both results record, with different values; the engine's version is one.

    Where the `kind` of something differs, all its other keys are part of that one difference. A
    step log does not tell the settings of its workload, so there the requests themselves count.
    """
    differing = [
        SettingDifference(name, (a.settings[name], b.settings[name]))
        for name in a.settings
        if name in b.settings and a.settings[name] != b.settings[name]
    ]
    names = {one.name for one in differing}
    kinds = [name.removesuffix(".kind") for name in names if name.endswith(".kind")]
    kept = [one for one in differing if not _is_part(one.name, kinds, names)]
    if not _both_describe_workload(a, b) and a.workload and b.workload and a.workload != b.workload:
        kept.insert(0, SettingDifference("workload", (a.workload, b.workload)))
    if a.engine and b.engine and a.engine != b.engine:
        kept.insert(0, SettingDifference("engine", (a.engine, b.engine)))
    return kept


def _both_describe_workload(a: Result, b: Result) -> bool:
    return any(name.startswith("workload.") for name in a.settings.keys() & b.settings.keys())


def _is_part(name: str, kinds: list[str], names: set[str]) -> bool:
    if _FOLLOWS.get(name.partition(".")[0]) in names:
        return True
    return any(name.startswith(f"{kind}.") and name != f"{kind}.kind" for kind in kinds)


def following_settings(differing: Sequence[SettingDifference]) -> list[str]:
    """Of settings that differ, those that may do so only because another one does."""
    names = {one.name for one in differing}
    return [name for name, by in _DEFAULTS_BY.items() if name in names and names.intersection(by)]


def one_sided_settings(a: Result, b: Result) -> list[str]:
    """Settings that only one of them records: nobody knows whether they differ."""
    return [
        *(name for name in a.settings if name not in b.settings),
        *(name for name in b.settings if name not in a.settings),
    ]


def missing_facts(result: Result) -> list[str]:
    """What a result would have to tell so that a difference could be put down to anything."""
    missing = []
    if not result.engine:
        missing.append("engine version")
    lacking = [name for name in _REQUIRED if result.settings.get(name) is None]
    if lacking:
        missing.append(f"effective configuration ({', '.join(lacking)})")
    if result.hit_tokens is None and _caches(result.settings):
        missing.append("hit tokens of the prefix cache")
    return missing


def _caches(settings: Mapping[str, object]) -> bool:
    return settings.get("enable_prefix_caching") is not False
