"""What a profile says of the real executor that it was measured on, from the machine's facts."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pydantic import ValidationError

from simserve.cost.dealing import AttentionPlan
from simserve.cost.profile_file import Graphs, ProfileFile
from simserve.errors import ConfigError

__all__ = ["ENGINE", "attention_path", "attention_plan", "graphs", "measured_on", "other_path"]

ENGINE = "simserve"
"""Name of the engine."""


def graphs(facts: Mapping[str, Any], max_num_seqs: int, max_num_batched_tokens: int) -> Graphs:
    """What is captured on a GPU; elsewhere nothing is, and a profile names at least one size.

    Raises:
        ConfigError: torch is missing, without which the executor's sizes are not known.
    """
    if facts["device"] != "cuda":
        return Graphs(sizes=[1], full_up_to=1, piecewise=False)
    try:
        from simserve.executor.real.graph_keys import graph_sizes, mixed_graph_sizes
    except ImportError as error:
        raise ConfigError(f"which graphs the executor captures is not known: {error}") from error
    sizes = graph_sizes(max_num_seqs)
    of_prefills = mixed_graph_sizes(max_num_batched_tokens) if _captures_prefills(facts) else None
    return Graphs(
        sizes=sizes,
        full_up_to=sizes[-1],
        piecewise=of_prefills is not None,
        prefill_sizes=of_prefills,
    )


def attention_plan(facts: Mapping[str, Any]) -> AttentionPlan | None:
    """How its kernels deal attention out to the GPU; None: that is not known of these kernels, or
    the run is older than that.

    Raises:
        ConfigError: the facts, which came from a file, break the format.
    """
    found = facts.get("attention_plan")
    try:
        return None if found is None else AttentionPlan.model_validate(found)
    except ValidationError as error:
        problem = error.errors()[0]
        where = ".".join(map(str, ("attention_plan", *problem["loc"])))
        raise ConfigError(f"executor.{where}: {problem['msg']}") from error


def attention_path(facts: Mapping[str, Any]) -> str:
    """Attention kernels and graph modes, in words."""
    names = ("attention", "kv_layout", "mixed", "dtype", "kv_dtype")
    path = ", ".join(f"{name} {facts[name]}" for name in names)
    if facts["device"] != "cuda":
        return f"{path}; plain torch on a CPU"
    if _captures_prefills(facts):
        return f"{path}; CUDA graphs of decodes and of small steps with prefills"
    return f"{path}; CUDA graphs of decodes, other steps kernel by kernel"


def other_path(profile: ProfileFile, facts: Mapping[str, Any]) -> str | None:
    """What is to be said of a profile of another engine or attention path; None of this one's."""
    own = f"{ENGINE}, {attention_path(facts)}"
    theirs = f"{profile.engine.name}, {profile.attention_path}"
    if theirs == own:
        return None
    return f"profile '{profile.name}' was measured on another path: {theirs}"


def _captures_prefills(facts: Mapping[str, Any]) -> bool:
    return bool(facts["mixed"] == "varlen")


def measured_on(facts: Mapping[str, Any], environment: Mapping[str, Any], day: str) -> str:
    """Device, software and day, in words."""
    packages = ", ".join(f"{name} {facts[name]}" for name in ("torch", "triton") if name in facts)
    device = facts.get("device_name") or environment["platform"]
    commit = environment["commit"]
    made_from = f", simserve at {commit[:12]}" if commit else ""
    return f"{device}, {packages}{made_from}, {day}"
