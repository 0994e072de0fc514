"""One flat dict of everything a run came to, under the keys of `vllm bench serve`.

Not measured, undefined and empty are None, never 0. Latencies are milliseconds, times seconds.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from simserve.errors import SimserveError
from simserve.metrics import load, quantiles
from simserve.metrics.goodput import Attainment
from simserve.metrics.groups import Groups
from simserve.metrics.latency import Latencies, View, sample, whole_run, window
from simserve.metrics.options import MetricOptions, RunInfo, Scalar
from simserve.metrics.quantiles import Sample
from simserve.metrics.recorder import RunData
from simserve.metrics.request_log import Outcome

__all__ = ["summarise"]

Summary = dict[str, Scalar]


def summarise(data: RunData, info: RunInfo, options: MetricOptions) -> Summary:
    """The summary of one run.

    Raises:
        SimserveError: injected is not completed + running + queued + rejected + aborted.
    """
    latencies = Latencies.of(data)
    view = whole_run(data)
    summary: Summary = {
        "date": info.date,
        "backend": info.backend,
        "label": info.label,
        "model_id": info.model_id,
        "tokenizer_id": info.tokenizer_id,
        "num_prompts": data.requests.num_requests,
        "request_rate": info.request_rate,
        "burstiness": info.burstiness,
        "max_concurrency": info.max_concurrency,
        "status": data.status,
    }
    summary |= _outcomes(data)
    summary |= _throughput(data, latencies, options, view, data.start_s, data.end_s)
    summary |= _latencies(data, latencies, options, view)
    summary["max_output_tokens_per_s"] = load.peak_tokens(data, view)
    summary["max_concurrent_requests"] = load.peak_concurrency(data, view)
    summary |= _arrivals(data)
    summary |= _load(data, data.start_s, data.end_s)
    summary |= _scheduler(data)
    summary |= data.spec_decode.summary(float(data.steps.duration_s.sum()))
    summary |= _cache(data)
    summary |= _classes(data, latencies, options, view, "")
    summary |= _groups(data, options)
    summary |= _window(data, latencies, options)
    return summary | dict(info.extra)


def percentile_key(percentile: float) -> str:
    """`p99`, `p99.9`: the way vLLM writes it."""
    return f"p{percentile:g}"


def _outcomes(data: RunData) -> Summary:
    count = {outcome: int(data.requests.are(outcome).sum()) for outcome in Outcome}
    injected = data.requests.num_requests
    if sum(count.values()) != injected:
        raise SimserveError(f"{injected} requests were injected, but outcomes are {count}")
    return {
        "completed": count[Outcome.COMPLETED],
        "completed_by_stop": data.num_stopped,
        "failed": count[Outcome.REJECTED] + count[Outcome.ABORTED],
        "rejected": count[Outcome.REJECTED],
        "aborted": count[Outcome.ABORTED],
        "running": count[Outcome.RUNNING],
        "queued": count[Outcome.QUEUED],
    }


def _throughput(
    data: RunData,
    latencies: Latencies,
    options: MetricOptions,
    view: View,
    start_s: float,
    end_s: float,
) -> Summary:
    """Rates between two times. Prompt tokens count when the first token comes out."""
    times, duration = data.times, max(0.0, end_s - start_s)  # a window may begin after the run
    completed = _completed(data, view)
    num_input = int(data.requests.input_length[view.holds(times.first_token_s)].sum())
    inside = (times.ends_s >= view.start_s) & (times.ends_s < view.end_s)
    num_output = int(times.tokens_per_step(view.requests)[inside].sum())
    num_completed = int(completed.sum())
    rates: Summary = {
        "duration": duration,
        "total_input_tokens": num_input,
        "total_output_tokens": num_output,
        "request_throughput": _rate(num_completed, duration),
        "request_goodput": None,
        "output_throughput": _rate(num_output, duration),
        "total_token_throughput": _rate(num_input + num_output, duration),
    }
    if options.goodput:
        attainment = Attainment.of(latencies, options.goodput)
        good = completed & attainment.all_met
        good_output = int(times.num_tokens[good].sum())
        good_input = int(data.requests.input_length[good].sum())
        rates["request_goodput"] = _rate(int(good.sum()), duration)
        rates["output_goodput"] = _rate(good_output, duration)
        rates["total_token_goodput"] = _rate(good_input + good_output, duration)
        rates |= _attainment(data, attainment, view)
    return rates


def _attainment(data: RunData, attainment: Attainment, view: View) -> Summary:
    """Shares of the requests that ended in a view; a failed one has met no objective."""
    requests = data.requests
    failed = requests.are(Outcome.REJECTED) | requests.are(Outcome.ABORTED)
    completed, ended = _completed(data, view), requests.ended_s
    num_failed = int((failed & (ended >= view.start_s) & (ended < view.end_s)).sum())
    total = int(completed.sum()) + num_failed
    shares: Summary = {"slo_attainment": _rate(int((completed & attainment.all_met).sum()), total)}
    for metric, met in attainment.by_metric.items():
        shares[f"slo_attainment_{metric}"] = _rate(int((completed & met).sum()), total)
    return shares


def _latencies(data: RunData, latencies: Latencies, options: MetricOptions, view: View) -> Summary:
    """The statistics of each metric, and how many requests have no TPOT."""
    summary: Summary = {}
    for metric in options.percentile_metrics:
        summary |= _statistics(sample(data, latencies, metric, view), metric, options)
    undefined = _completed(data, view) & np.isnan(latencies.tpot)
    summary["tpot_undefined"] = int(undefined.sum())
    return summary


def _statistics(seconds: Sample, metric: str, options: MetricOptions) -> Summary:
    """`{mean,median,std,p50,…}_{metric}_ms`."""
    values, asked = seconds.scaled(1000.0), options.all_percentiles
    found = quantiles.percentiles(values, [50.0, *asked])
    summary: Summary = {
        f"mean_{metric}_ms": quantiles.mean(values),
        f"median_{metric}_ms": found[0],
        f"std_{metric}_ms": quantiles.std(values),
    }
    for percentile, value in zip(asked, found[1:], strict=True):
        summary[f"{percentile_key(percentile)}_{metric}_ms"] = value
    return summary


def _arrivals(data: RunData) -> Summary:
    """A finite trace drains after its last arrival: what held until then tells overload."""
    arrivals = data.requests.arrival_s
    if not len(arrivals):
        return {"last_arrival_s": None, "offered_request_rate": None,
                "request_throughput_until_last_arrival": None}  # fmt: skip
    last = float(arrivals.max())
    completed = data.requests.are(Outcome.COMPLETED) & (data.requests.ended_s <= last)
    span = last - data.start_s
    return {
        "last_arrival_s": last,
        "offered_request_rate": _rate(len(arrivals), span),
        "request_throughput_until_last_arrival": _rate(int(completed.sum()), span),
    }


def _load(data: RunData, start_s: float, end_s: float) -> Summary:
    """Means over time; idle time counts."""
    usage = load.kv_cache_usage(data)
    gauges: Summary = {
        f"mean_{name}": load.step_mean(data, values, start_s, end_s)
        for name, values in data.steps.gauges.items()
    }
    return gauges | {
        "mean_concurrency": load.concurrency(data, start_s, end_s),
        "mean_num_running": load.step_mean(data, data.steps.num_running, start_s, end_s),
        "mean_num_waiting": load.step_mean(data, data.steps.num_waiting, start_s, end_s),
        "mean_kv_cache_usage": load.step_mean(data, usage, start_s, end_s),
    }


def _scheduler(data: RunData) -> Summary:
    steps, num_steps = data.steps, data.steps.num_steps
    free = steps.num_free_blocks
    usage = load.kv_cache_usage(data)
    summary: Summary = {
        "max_num_running": int(steps.num_running.max()) if num_steps else None,
        "max_kv_cache_usage": float(usage.max()) if num_steps else None,
        "min_free_blocks": int(free.min()) if num_steps else None,
        "num_gpu_blocks": data.num_gpu_blocks,
        "num_steps": num_steps,
        "num_prefill_tokens": int((steps.num_tokens - steps.num_decode_tokens).sum()),
        "num_decode_tokens": int(steps.num_decode_tokens.sum()),
        "num_preemptions": int(steps.num_preempted.sum()),
        "num_resumed": data.num_resumed,
        "num_ghosts": data.num_ghosts,
        "recomputed_tokens": int(data.requests.recomputed_tokens.sum()),
    }
    for code, stop in enumerate(steps.admission_stops):
        share = _rate(int((steps.admission_stop == code).sum()), num_steps)
        summary[f"admission_stop_{stop}"] = share
    return summary


def _cache(data: RunData) -> Summary:
    if not data.enable_prefix_caching:
        return dict.fromkeys(
            (
                "prefix_cache_queries",
                "prefix_cache_hits",
                "prefix_cache_hit_rate",
                "total_cached_tokens",
                "evicted_cached_blocks",
                "prefix_cache_note",
            )
        )
    queries, hits = (
        int(column.sum())
        for column in (data.steps.prefix_cache_queries, data.steps.prefix_cache_hits)
    )
    return {
        "prefix_cache_queries": queries,
        "prefix_cache_hits": hits,
        "prefix_cache_hit_rate": _rate(hits, queries),
        "total_cached_tokens": int(np.maximum(data.requests.cached_tokens, 0).sum()),
        "evicted_cached_blocks": int(data.steps.evicted_cached_blocks.sum()),
        "prefix_cache_note": data.prefix_cache_note,
    }


def _classes(
    data: RunData, latencies: Latencies, options: MetricOptions, view: View, prefix: str
) -> Summary:
    """The same latencies for every class by itself; requests without a class make none."""
    summary: Summary = {}
    for name in sorted(set(data.requests.class_names) - {""}):
        part = view.of_class(data, data.requests.class_names.index(name))
        facts: Summary = {"completed": int(_completed(data, part).sum())}
        facts |= _latencies(data, latencies, options, part)
        summary |= {f"{prefix}class.{name}.{key}": value for key, value in facts.items()}
    return summary


def _groups(data: RunData, options: MetricOptions) -> Summary:
    """Requests of users that were several of the engine, if there are any, and what they took."""
    groups = Groups.of(data)
    if groups is None:
        return {}
    steps, duration = data.steps, data.end_s - data.start_s
    facts: Summary = {
        "num_prompts": len(groups.completed),
        "completed": int(groups.completed.sum()),
        "request_throughput": _rate(int(groups.completed.sum()), duration),
        "mean_num_requests": float(groups.num_requests.mean()),
    }
    for metric in ("ttft", "e2el"):
        facts |= _statistics(groups.sample(metric), metric, options)
    return {f"group.{key}": value for key, value in facts.items()} | {
        "num_computed_tokens": int(steps.num_tokens.sum()),
        "max_kv_blocks": int(data.num_gpu_blocks - 1 - steps.num_free_blocks.min())
        if steps.num_steps
        else None,
        "max_unshared_kv_blocks": data.max_unshared_blocks,
    }


def _window(data: RunData, latencies: Latencies, options: MetricOptions) -> Summary:
    """Everything that can be said of a window, beside the figures of the whole run."""
    if options.window_s is None:
        return {}
    start_s, asked_end_s = options.window_s
    end_s = data.end_s if asked_end_s is None else asked_end_s
    # A window that ends with the run takes in the last token.
    view = window(data, start_s, np.inf if asked_end_s is None else end_s)
    num_completed = int(_completed(data, view).sum())
    facts: Summary = {"start_s": start_s, "end_s": end_s, "completed": num_completed}
    facts |= _throughput(data, latencies, options, view, start_s, end_s)
    facts |= _latencies(data, latencies, options, view)
    facts |= _load(data, start_s, end_s)
    return {f"window.{key}": value for key, value in facts.items()} | _classes(
        data, latencies, options, view, "window."
    )


def _completed(data: RunData, view: View) -> NDArray[np.bool_]:
    """Mask of the requests that completed within a view."""
    return data.requests.are(Outcome.COMPLETED) & view.holds(data.requests.ended_s)


def _rate(count: int, total: float) -> float | None:
    """`count / total`, or None where there is nothing to divide by."""
    return count / total if total > 0 else None
