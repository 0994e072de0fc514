"""Transforms: exact effects and counts, nothing changed in place, order and sharing kept."""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Iterator

import pytest
from hypothesis import given
from hypothesis import strategies as st

from simserve.errors import TraceError
from simserve.segments import tokens
from simserve.types import MmItem, TraceRequest
from simserve.workload import transform
from simserve.workload.transform import Transforms

FIELDS = dict.fromkeys(Transforms.__dataclass_fields__)


def request(
    name: str, arrival_s: float = 0.0, prompt_len: int = 100, **more: object
) -> TraceRequest:
    arguments: dict[str, object] = {
        "prompt": (("shared", 20), (name, prompt_len - 20))
        if prompt_len > 20
        else ((name, prompt_len),),
        "output_len": 10,
        **more,
    }
    return TraceRequest(request_id=name, arrival_s=arrival_s, **arguments)  # type: ignore[arg-type]


@st.composite
def traces(draw: st.DrawFn) -> list[TraceRequest]:
    gaps = draw(st.lists(st.sampled_from([0.0, 0.0, 0.25, 1.0, 3.5]), min_size=1, max_size=25))
    arrivals = [sum(gaps[: i + 1]) for i in range(len(gaps))]
    lengths = st.integers(1, 300)
    return [
        request(f"r{i}", arrival_s, draw(lengths), output_len=draw(lengths))
        for i, arrival_s in enumerate(arrivals)
    ]


def apply(
    requests: list[TraceRequest], **options: object
) -> tuple[list[TraceRequest], Counter[str]]:
    counts: Counter[str] = Counter()
    changed = list(Transforms(**options).apply(requests, counts))  # type: ignore[arg-type]
    return changed, +counts


def test_speedup_divides_times_after_the_origin() -> None:
    out, counts = apply([request("a"), request("b", 3.0, think_time_s=1.0)], speedup_ratio=2.0)
    assert [(r.arrival_s, r.think_time_s) for r in out] == [(0, 0), (1.5, 0.5)]
    assert not counts


def test_a_time_slice_is_half_open_and_starts_at_zero() -> None:
    trace = [request(str(t), float(t)) for t in range(6)]
    out, counts = apply(trace, start_s=2, end_s=4)
    assert [(r.request_id, r.arrival_s) for r in out] == [("2", 0.0), ("3", 1.0)]
    assert counts == {"time_slice": 2}


def test_shorter_prompts_keep_their_beginning() -> None:
    out, counts = apply([request("a"), request("b", prompt_len=1)], prompt_len_multiplier=0.5)
    assert [r.prompt for r in out] == [(("shared", 20), ("a", 30)), (("b", 1),)]
    assert counts == {"prompt_len_multiplier": 1}
    out, _ = apply([request("a")], prompt_len_multiplier=0.1)
    assert out[0].prompt == (("shared", 10),)


def test_longer_prompts_grow_a_tail_that_nobody_shares() -> None:
    out, _ = apply([request("a"), request("b")], prompt_len_multiplier=1.5)
    assert [r.prompt_len for r in out] == [150, 150]
    assert out[0].prompt[:-1] == request("a").prompt
    assert out[0].prompt[-1][0] != out[1].prompt[-1][0]


@pytest.mark.parametrize("multiplier", [1e9, 1e300, 1e308])
@pytest.mark.parametrize("name", ["prompt_len_multiplier", "output_len_multiplier"])
def test_no_length_grows_beyond_what_a_trace_may_hold(name: str, multiplier: float) -> None:
    with pytest.raises(TraceError, match=rf"^request 'a': {name}: \d+ tokens times 1e\+\d+ are"):
        apply([request("a")], **{name: multiplier})


def test_outputs_scale_with_their_identity() -> None:
    trace = [request("a", output=(("x", 6), ("y", 4))), request("b")]
    shorter, counts = apply(trace, output_len_multiplier=0.7)
    assert [(r.output_len, r.output) for r in shorter] == [(7, (("x", 6), ("y", 1))), (7, None)]
    assert counts == {"output_len_multiplier": 2}
    longer, _ = apply(trace, output_len_multiplier=2)
    assert longer[0].output is not None
    assert longer[0].output[:2] == (("x", 6), ("y", 4))
    assert sum(length for _, length in longer[0].output) == longer[0].output_len == 20


def test_limits_drop_cap_or_cut_and_count() -> None:
    trace = [request("a"), request("b", prompt_len=101), request("c", output_len=11)]
    out, counts = apply(trace, max_isl=100)
    assert [r.request_id for r in out] == ["a", "c"]
    assert counts == {"max_isl": 1}
    out, counts = apply(trace, max_osl=10)
    assert [r.output_len for r in out] == [10, 10, 10]
    assert counts == {"max_osl": 1}
    out, counts = apply(trace, truncate_to=100, max_isl=100)
    assert [r.prompt_len for r in out] == [100, 100, 100]
    assert counts == {"truncate_to": 1}


def test_turns_that_lose_their_parent_begin_a_session() -> None:
    chat = [
        request("a", 0.0),
        request("b", 1.0, prompt_len=120, parent="a", think_time_s=1.0),
        request("c", 2.0, parent="b", think_time_s=1.0),
        request("d", 3.0, parent="c", think_time_s=1.0),
    ]
    for options in ({"start_s": 1.5}, {"max_isl": 100, "start_s": 0.5}):
        out, counts = apply(chat, **options)
        assert [(r.request_id, r.parent, r.think_time_s) for r in out] == [
            ("c", None, 0.0),
            ("d", "c", 1.0),
        ]
        assert counts["lost_parent"] == 1


def test_multimodal_items_that_are_cut_go() -> None:
    items = (MmItem("i", 0, 10), MmItem("j", 10, 41))
    out, _ = apply([request("a", mm_items=items)], truncate_to=50)
    assert out[0].mm_items == items[:1]
    out, _ = apply([request("a", mm_items=items)], truncate_to=51)
    assert out[0].mm_items == items


def test_a_limit_reads_no_further() -> None:
    def read() -> Iterator[TraceRequest]:
        yield request("a")
        yield request("b")
        raise AssertionError("read too far")

    assert len(list(Transforms(num_requests=2).apply(read(), Counter()))) == 2


def test_ties_are_spread_within_the_tick_and_the_next_arrival() -> None:
    trace = [request(f"{t}-{i}", float(t)) for t in (0, 3, 4) for i in range(4)]
    trace.append(request("lone", 9.0))
    out, counts = apply(trace, spread_ties_s=3.0)
    arrivals = [r.arrival_s for r in out]
    assert arrivals == sorted(arrivals)
    assert len(set(arrivals)) == 13
    assert all(0 <= t < 3 for t in arrivals[:4])
    assert all(3 <= t < 4 for t in arrivals[4:8])
    assert all(4 <= t < 7 for t in arrivals[8:12])
    assert arrivals[12] == 9.0
    assert counts == {"spread_ties_s": 12}


def test_turns_that_wait_neither_tie_nor_move_others() -> None:
    parents = {2: "0", 5: "3"}
    trace = [request(str(i), 7.0, parent=parents.get(i)) for i in range(6)]
    out, counts = apply(trace, spread_ties_s=1.0)
    assert counts == {"spread_ties_s": 4}
    times_s = [r.arrival_s for r in out]
    assert times_s == sorted(times_s)
    assert [times_s[i] for i in parents] == [times_s[i - 1] for i in parents]
    assert len(set(times_s)) == 4
    alone = [request("0", 7.0), request("1", 7.0, parent="0")]
    assert apply(alone, spread_ties_s=1.0) == (alone, {})


def test_spreading_depends_on_the_seed_only() -> None:
    trace = [request(str(i)) for i in range(50)]
    spread = [
        [r.arrival_s for r in Transforms(spread_ties_s=1.0).apply(trace, Counter(), seed)]
        for seed in (0, 0, 1)
    ]
    assert spread[0] == spread[1] != spread[2]
    assert sum(spread[0]) / 50 == pytest.approx(0.5, abs=0.17)


@given(traces(), st.floats(0.1, 10), st.floats(0.1, 4), st.integers(1, 300), st.integers(1, 300))
def test_any_combination_keeps_order_bounds_counts_and_the_original(
    trace: list[TraceRequest], ratio: float, multiplier: float, isl: int, osl: int
) -> None:
    original = copy.deepcopy(trace)
    out, counts = apply(
        trace,
        start_s=0.5,
        end_s=20.0,
        spread_ties_s=0.5,
        speedup_ratio=ratio,
        prompt_len_multiplier=multiplier,
        output_len_multiplier=multiplier,
        max_isl=isl,
        max_osl=osl,
    )
    assert trace == original
    arrivals = [r.arrival_s for r in out]
    assert arrivals == sorted(arrivals)
    assert all(1 <= r.prompt_len <= isl and 1 <= r.output_len <= osl for r in out)
    inside = sum(0.5 <= r.arrival_s < 20 for r in trace)
    assert len(out) + counts["max_isl"] == inside
    assert counts["time_slice"] == sum(r.arrival_s < 0.5 for r in trace)


@given(traces(), st.floats(0.05, 3))
def test_scaled_prompts_agree_with_the_old_ones_as_far_as_they_go(
    trace: list[TraceRequest], multiplier: float
) -> None:
    out, _ = apply(trace, prompt_len_multiplier=multiplier)
    for old, new in zip(trace, out, strict=True):
        shared = min(old.prompt_len, new.prompt_len)
        assert new.prompt_len == max(1, round(old.prompt_len * multiplier))
        assert (tokens(new.prompt, 997)[:shared] == tokens(old.prompt, 997)[:shared]).all()


def test_no_options_change_nothing() -> None:
    trace = [request("a"), request("b", 1.0)]
    assert apply(trace) == (trace, Counter())


@pytest.mark.parametrize("field", list(FIELDS))
@pytest.mark.parametrize("value", [-1, float("nan"), float("inf")])
def test_bad_values_are_named(field: str, value: float) -> None:
    with pytest.raises(ValueError, match=field):
        Transforms(**{field: value})  # type: ignore[arg-type]


def test_an_empty_slice_is_refused() -> None:
    with pytest.raises(ValueError, match="end_s"):
        Transforms(start_s=2, end_s=2)


def test_the_functions_work_alone() -> None:
    counts: Counter[str] = Counter()
    kept = transform.max_isl([request("a"), request("b", prompt_len=500)], 100, counts)
    assert [r.request_id for r in kept] == ["a"]
    assert counts["max_isl"] == 1
