"""Named small workloads, one for each thing that a scheduler or a prefix cache does differently.

Each is a function of a few numbers and gives requests in arrival order. `traces/` has one file
made by each of them.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from simserve.types import TraceRequest
from simserve.workload.arrivals import ArrivalProcess
from simserve.workload.lengths import IndependentLengths, Length
from simserve.workload.sessions import SyntheticSessions, generate_sessions, in_arrival_order
from simserve.workload.synthetic import RequestClass, SharedPrefix, Synthetic, generate

__all__ = [
    "long_vs_short",
    "multi_turn",
    "shared_template",
    "single_document",
    "unique_prefix",
]


def long_vs_short(
    *,
    num_short: int,
    long_prompt_len: int,
    short_prompt_len: int,
    long_output_len: int,
    short_output_len: int,
    position: str = "first",
    gap_s: float = 0.0,
) -> Iterator[TraceRequest]:
    """One long prompt among `num_short` short ones, a request every `gap_s` seconds.

    The long one stands `first`, in the `middle` or `last` (`position`).
    Shows what a long prefill does to the others. Classes are `long` and `short`.

    Raises:
        ValueError: naming the argument that is out of range.
    """
    lengths = (long_prompt_len, short_prompt_len, long_output_len, short_output_len)
    if min(lengths) < 1 or num_short < 0:
        raise ValueError("num_short must be at least 0 and each length at least 1")
    if not 0 <= gap_s < float("inf"):
        raise ValueError(f"gap_s must be at least 0 and finite, got {gap_s}")
    places = {"first": 0, "middle": num_short // 2, "last": num_short}
    if position not in places:
        raise ValueError(f"position must be first, middle or last, got '{position}'")
    for i in range(num_short + 1):
        is_long = i == places[position]
        yield TraceRequest(
            request_id=f"r{i}",
            arrival_s=i * gap_s,
            prompt=((f"r{i}/prompt", long_prompt_len if is_long else short_prompt_len),),
            output_len=long_output_len if is_long else short_output_len,
            class_="long" if is_long else "short",
        )


def multi_turn(
    *,
    num_sessions: int,
    arrival: ArrivalProcess,
    num_turns: Length,
    prompt_len: Length,
    output_len: Length,
    think_time_s: float,
    seed: int,
) -> Iterator[TraceRequest]:
    """Conversations whose turns contain all that was said before. For closed and open loop.

    Raises:
        ValueError: naming the argument that is out of range.
    """
    spec = SyntheticSessions(
        num_sessions=num_sessions,
        arrival=arrival,
        num_turns=num_turns,
        prompt_len=prompt_len,
        output_len=output_len,
        think_time_s=think_time_s,
        think_time="exponential",
        seed=seed,
    )
    return in_arrival_order(generate_sessions(spec))


def shared_template(
    *,
    num_requests: int,
    arrival: ArrivalProcess,
    num_groups: int,
    zipf_alpha: float,
    prefix_len: Length,
    prompt_len: Length,
    output_len: Length,
    seed: int,
) -> Iterator[TraceRequest]:
    """Batch work on a few templates: a shared beginning, then something of the request's own.

    Raises:
        ValueError: naming the argument that is out of range.
    """
    prefix = SharedPrefix(num_groups=num_groups, prefix_len=prefix_len, zipf_alpha=zipf_alpha)
    return _independent(num_requests, arrival, prompt_len, output_len, prefix, seed)


def unique_prefix(
    *,
    num_requests: int,
    arrival: ArrivalProcess,
    header_len: int,
    prefix_len: Length,
    prompt_len: Length,
    output_len: Length,
    seed: int,
) -> Iterator[TraceRequest]:
    """The template comes after a header of the request's own: much equal text, nothing reusable.

    Raises:
        ValueError: naming the argument that is out of range.
    """
    if header_len < 1:
        raise ValueError(f"header_len must be at least 1, got {header_len}")
    prefix = SharedPrefix(num_groups=1, prefix_len=prefix_len)
    for request in _independent(num_requests, arrival, prompt_len, output_len, prefix, seed):
        header = (f"{request.request_id}/header", header_len)
        yield replace(request, prompt=(header, *request.prompt))


def single_document(
    *,
    num_requests: int,
    arrival: ArrivalProcess,
    prompt_len: Length,
    output_len: Length,
    seed: int,
) -> Iterator[TraceRequest]:
    """Each request asks about a long document of its own: prefill and KV capacity, no sharing.

    Raises:
        ValueError: naming the argument that is out of range.
    """
    return _independent(num_requests, arrival, prompt_len, output_len, None, seed)


def _independent(
    num_requests: int,
    arrival: ArrivalProcess,
    prompt_len: Length,
    output_len: Length,
    prefix: SharedPrefix | None,
    seed: int,
) -> Iterator[TraceRequest]:
    lengths = IndependentLengths(prompt_len=prompt_len, output_len=output_len)
    return generate(
        Synthetic(
            num_requests=num_requests,
            arrival=arrival,
            classes=(RequestClass(lengths=lengths),),
            shared_prefix=prefix,
            seed=seed,
        )
    )
