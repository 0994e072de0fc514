"""The two tables of a run as Arrow tables, built column by column."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from simserve.errors import RunDirectoryError
from simserve.metrics.arrow import column, items, lists, named, numbers, strings
from simserve.metrics.latency import Latencies
from simserve.metrics.load import kv_cache_usage
from simserve.metrics.recorder import RequestRows, RunData, StepRows
from simserve.metrics.request_log import Outcome
from simserve.metrics.token_times import TokenTimes

if TYPE_CHECKING:
    import pyarrow as pa

__all__ = ["requests_table", "steps_table", "token_times"]

SCHEMA_VERSION = {b"simserve.schema_version": b"1"}


def requests_table(data: RunData | RequestRows, save_detailed: bool = False) -> pa.Table:
    """One row a request, in the order in which the engine took them in.

    `token_run_*` are lists of equal length: first step (row of the steps table), number of steps,
    tokens per step. `prefill_chunk_*` likewise: the step of each chunk of a prompt, and its tokens.
    `itl_ms`, every gap written out, only with `save_detailed`.
    """
    import pyarrow as pa

    requests, times = data.requests, data.times
    names = [name.lower() for name in Outcome.__members__]
    classes = [name or None for name in requests.class_names]
    errors = [requests.errors.get(row) for row in range(len(requests.request_ids))]
    columns: dict[str, Any] = {
        "request_id": strings(requests.request_ids),
        "class": named(classes, requests.class_code),
        "session": strings(requests.sessions),
        "turn": numbers(requests.turn),
        "group": strings(requests.groups),
        "priority": numbers(requests.priority),
        "status": named(names, requests.outcome),
        "finish_reason": strings(requests.finish_reasons),
        "error": strings(errors),
        "arrival_time_s": numbers(requests.arrival_s),
        "queued_s": numbers(requests.queued_s),
        "scheduled_s": numbers(requests.scheduled_s),
        "first_token_s": numbers(times.first_token_s),
        "last_token_s": numbers(times.last_token_s),
        "ended_s": numbers(requests.ended_s),
        "input_length": numbers(requests.input_length),
        "output_length": numbers(times.num_tokens),
        "requested_output_length": numbers(requests.requested_output_length),
        "common_prefix_tokens": numbers(
            requests.common_prefix_tokens, requests.common_prefix_tokens < 0
        ),
        "cached_tokens": numbers(requests.cached_tokens, requests.cached_tokens < 0),
        "recomputed_tokens": numbers(requests.recomputed_tokens),
        "num_preemptions": numbers(requests.num_preemptions),
    }
    columns |= _latency_columns(data)
    columns |= _token_run_columns(times)
    columns["prefill_chunk_step"] = lists(data.prefills.offsets, data.prefills.steps)
    columns["prefill_chunk_num_tokens"] = lists(data.prefills.offsets, data.prefills.tokens)
    if save_detailed:
        offsets, gaps = times.itl_lists()
        columns["itl_ms"] = lists(offsets, gaps * 1000.0)
    return pa.table(columns).replace_schema_metadata(SCHEMA_VERSION)


def _latency_columns(data: RunData | RequestRows) -> dict[str, Any]:
    latencies = Latencies.of(data)
    names = (
        "queue_time",
        "ttft",
        "tpot",
        "e2el",
        "max_itl",
        "prefill_time",
        "decode_time",
        "inference_time",
    )
    return {f"{name}_ms": numbers(getattr(latencies, name) * 1000.0) for name in names}


def _token_run_columns(times: TokenTimes) -> dict[str, Any]:
    return {
        "token_run_first_step": lists(times.offsets, times.firsts),
        "token_run_num_steps": lists(times.offsets, times.counts),
        "token_run_num_tokens": lists(times.offsets, times.tokens),
    }


def token_times(requests: pa.Table, steps: pa.Table) -> TokenTimes:
    """The token times that stand in the two tables of a run.

    Raises:
        RunDirectoryError: the tables are not of one run.
    """
    offsets, firsts = items(requests, "token_run_first_step")
    _, counts = items(requests, "token_run_num_steps")
    _, tokens = items(requests, "token_run_num_tokens")
    if not len(firsts) == len(counts) == len(tokens) == offsets[-1]:
        raise RunDirectoryError("requests.parquet: token_run_*: lists of a row differ in length")
    if len(firsts) and not 0 <= firsts.min() <= (firsts + counts).max() <= steps.num_rows:
        raise RunDirectoryError(
            f"requests.parquet: token_run_*: tells of steps that steps.parquet, with "
            f"{steps.num_rows} rows, does not have: the two are not of one run"
        )
    return TokenTimes(column(steps, "end_s"), offsets, firsts, counts, tokens)


def steps_table(data: RunData | StepRows) -> pa.Table:
    """One row a step; `parts.*` are the seconds that the executor's named parts took."""
    import pyarrow as pa

    steps = data.steps
    off = np.full(steps.num_steps, not data.enable_prefix_caching)
    columns: dict[str, Any] = {
        "step_id": numbers(steps.first_id + np.arange(steps.num_steps)),
        "start_s": numbers(steps.start_s),
        "end_s": numbers(steps.end_s),
        "duration_s": numbers(steps.duration_s),
    }
    columns |= {f"parts.{name}": numbers(seconds) for name, seconds in steps.parts.items()}
    columns |= {
        "num_running": numbers(steps.num_running),
        "num_waiting": numbers(steps.num_waiting),
        "num_scheduled": numbers(steps.num_scheduled),
        "num_tokens": numbers(steps.num_tokens),
        "num_decode_tokens": numbers(steps.num_decode_tokens),
        "num_prefill_tokens": numbers(steps.num_tokens - steps.num_decode_tokens),
        "num_preempted": numbers(steps.num_preempted),
        "num_free_blocks": numbers(steps.num_free_blocks),
        "kv_cache_usage": numbers(kv_cache_usage(data)),
        "prefix_cache_queries": numbers(steps.prefix_cache_queries, off),
        "prefix_cache_hits": numbers(steps.prefix_cache_hits, off),
        "evicted_cached_blocks": numbers(steps.evicted_cached_blocks, off),
        "num_shared_kv_tokens": numbers(steps.num_shared_kv_tokens, off),
        "admission_stop": named(steps.admission_stops, steps.admission_stop),
    }
    columns |= {f"kv.{name}": numbers(values) for name, values in steps.gauges.items()}
    return pa.table(columns).replace_schema_metadata(SCHEMA_VERSION)
