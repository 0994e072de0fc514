"""The first half of a formal report: what ran on what, and the workload."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from simserve.report.formal_facts import Fact, Lookup, Section, figure, missing

__all__ = ["system", "workload"]

LENGTHS = {
    "prompt": "input_length",
    "common prefix": "common_prefix_tokens",
    "output": "output_length",
}
"""Columns of requests.parquet by what they are called."""
NUM_SLICES = 10
"""Rows of the arrival timeline."""


def system(lookup: Lookup) -> Section:
    """Model, numbers' types, GPU, versions, and what computed or priced the steps."""
    facts = [
        lookup.known("model", "model_id"),
        lookup.known("dtype of weights and activations", "dtype"),
        lookup.known("dtype of the KV cache", "kv_cache_dtype"),
        _gpu(lookup),
        _version(lookup),
        _commit(lookup),
        lookup.known("decisions as those of", "decisions"),
        lookup.known("backend", "backend"),
        _attention(lookup),
        _software(lookup),
    ]
    return Section("System", facts)


def _gpu(lookup: Lookup) -> Fact:
    if not lookup.is_real:
        fact = lookup.known("GPU", "gpu")
        return fact if fact.missing else Fact("GPU", f"{fact.value}, simulated from its data sheet")
    if lookup.parts.summary.get("executor.device") == "cpu":
        return Fact("GPU", "none: computed on the CPU")
    name, driver = lookup.known("GPU", "executor.device_name"), lookup.env("GPU driver", "gpu")
    if name.missing or driver.missing:
        return name if name.missing else driver
    return Fact("GPU", f"{name.value} (name, driver: {driver.value})")


def _version(lookup: Lookup) -> Fact:
    fact = lookup.env("engine", "simserve")
    return fact if fact.missing else Fact("engine", f"simserve {fact.value}")


def _commit(lookup: Lookup) -> Fact:
    fact = lookup.env("commit", "commit")
    commit = fact.value.removesuffix("+")
    return fact if commit == fact.value else Fact("commit", f"{commit}, with local changes")


def _attention(lookup: Lookup) -> Fact:
    """The attention backend; of a simulated run, what stands for it."""
    name = "attention backend"
    if not lookup.is_real:
        return lookup.summary(name, "timing", form="none: steps are priced by {}")
    keys = ("executor.attention", "executor.kv_layout", "executor.mixed")
    form = "simserve_kernels, decodes {}, layout {}, steps with prefills {}"
    if lookup.parts.summary.get("executor.device") == "cpu":
        form = "plain torch, layout {1}, steps with prefills {2}"
    return lookup.summary(name, *keys, form=form)


def _software(lookup: Lookup) -> Fact:
    python = lookup.env("software", "python")
    packages = lookup.parts.env.get("packages")
    if python.missing or not packages or not isinstance(packages, dict):
        return python if python.missing else missing("software", "env.json: packages")
    listed = ", ".join(f"{name} {version}" for name, version in packages.items())
    return Fact("software", f"Python {python.value}, {listed}")


def workload(lookup: Lookup) -> Section:
    """Lengths, concurrency and arrivals."""
    facts = [
        lookup.summary(
            "requests",
            *("num_prompts", "completed", "rejected", "aborted", "running", "queued"),
            form="{}; completed {}, rejected {}, aborted {}, still running {}, still queued {}",
        ),
        _source(lookup),
    ]
    facts += [_total(lookup, name, column) for name, column in LENGTHS.items()]
    facts += [*_concurrency(lookup), *_arrivals(lookup)]
    rows = [_length_row(name, lookup.column(column)) for name, column in LENGTHS.items()]
    lengths = [["tokens", "mean", "p50", "p95", "p99", "max"], *(row for row in rows if row)]
    tables = [lengths] if len(lengths) > 1 else []
    return Section("Workload", facts, tables + _timeline(lookup))


def _source(lookup: Lookup) -> Fact:
    """Where the requests came from, so that others can have the same."""
    name = "source"
    if isinstance(trace := lookup.setting("workload", "trace"), dict):
        sha256 = lookup.env(name, "trace", "sha256")
        if sha256.missing:
            return sha256
        counts = lookup.parts.env["trace"].get("dropped")
        dropped = sum(counts.values()) if isinstance(counts, dict) else 0
        rows = f", {dropped:,} bad rows left out" if dropped else ""
        return Fact(name, f"{trace.get('name') or trace.get('path')}, SHA-256 {sha256.value}{rows}")
    if lookup.setting("workload", "synthetic") is None:
        return missing(name, "config.yaml: workload")
    return Fact(name, "made up as the configuration says")


def _total(lookup: Lookup, name: str, column: str) -> Fact:
    values = lookup.column(column)
    if values is None:
        return missing(f"{name} tokens", f"requests.parquet: {column}")
    return Fact(f"{name} tokens", f"{np.nansum(values):,.0f}")


def _length_row(name: str, values: NDArray[Any] | None) -> list[str] | None:
    known = values[~np.isnan(values)] if values is not None else np.zeros(0)
    if not len(known):
        return None
    figures = [known.mean(), *np.percentile(known, (50, 95, 99)), known.max()]
    return [name, *(f"{figure:,.0f}" for figure in figures)]


def _concurrency(lookup: Lookup) -> list[Fact]:
    limit = lookup.summary("limit of concurrency", "max_concurrency")
    if limit.value == "–":
        limit = Fact(limit.name, "none")
    return [
        limit,
        lookup.summary(
            "concurrency",
            *("mean_concurrency", "max_concurrent_requests", "mean_num_running"),
            form="{} requests in the system on average, {} at most; {} running on average",
        ),
    ]


def _arrivals(lookup: Lookup) -> list[Fact]:
    """How requests were meant to come, and how they came."""
    asked = lookup.summary("arrivals asked for", "request_rate", "burstiness")
    if not asked.missing and lookup.parts.summary["request_rate"] is None:
        asked = Fact(asked.name, "at the times of the source")
    elif not asked.missing:
        asked = lookup.summary(
            asked.name, "request_rate", "burstiness", form="{} requests/s, burstiness {}"
        )
    times = lookup.column("arrival_time_s")
    if times is None or not len(times):
        return [asked, missing("arrival timeline", "requests.parquet: arrival_time_s")]
    span = f"{len(times):,} from {times.min():,.3f} s to {times.max():,.3f} s"
    gaps = np.diff(np.sort(times))
    if len(gaps):
        p50, p95, p99 = np.percentile(gaps, (50, 95, 99))
        span += f"; gaps p50 {figure(p50)} s, p95 {figure(p95)} s, p99 {figure(p99)} s"
    return [asked, Fact("arrivals", span)]


def _timeline(lookup: Lookup) -> list[list[list[str]]]:
    """Requests and prompt tokens that arrived in equal slices of time; one row if all came at
    once."""
    times, lengths = lookup.column("arrival_time_s"), lookup.column("input_length")
    if times is None or lengths is None or not len(times):
        return []
    first, last = float(times.min()), float(times.max())
    edges = np.linspace(first, last, (NUM_SLICES if last > first else 1) + 1)
    places = np.clip(np.searchsorted(edges, times, side="right") - 1, 0, len(edges) - 2)
    requests = np.bincount(places, minlength=len(edges) - 1)
    tokens = np.bincount(places, lengths, len(edges) - 1)
    rows = [
        [f"{edges[i]:,.3f} to {edges[i + 1]:,.3f}", f"{requests[i]:,}", f"{tokens[i]:,.0f}"]
        for i in range(len(edges) - 1)
    ]
    return [[["arrivals (s)", "requests", "prompt tokens"], *rows]]
