"""A request ends by length before it ends by a token, and keeps nothing behind that token."""

from __future__ import annotations

import pytest

from simserve.kv.manager import PagedKVCacheManager
from simserve.sched.params import SchedulerParams
from simserve.sched.vllm import VllmScheduler
from simserve.types import Request, Status, StepPlan, StepResult, TraceRequest


def scheduler() -> VllmScheduler:
    kv = PagedKVCacheManager(
        num_gpu_blocks=64, block_size=4, max_model_len=64, enable_prefix_caching=True
    )
    return VllmScheduler(
        SchedulerParams(max_num_batched_tokens=64, max_num_seqs=8, max_model_len=64), kv
    )


def requests(*output_lens: int) -> list[Request]:
    traces = [
        TraceRequest(request_id=f"r{i}", arrival_s=0.0, prompt=((i, 5),), output_len=output_len)
        for i, output_len in enumerate(output_lens)
    ]
    return [Request(trace, 64) for trace in traces]


def result(plan: StepPlan, stops: dict[str, int] | None = None) -> StepResult:
    return StepResult([1.0], {}, plan.samples, stops=stops)


@pytest.mark.parametrize("steps_before", [0, 1, 3])
def test_a_stop_ends_one_of_several_that_decode_together(steps_before: int) -> None:
    one, all_ = scheduler(), requests(9, 9, 9)
    for request in all_:
        one.add_request(request)
    for _ in range(steps_before):
        plan = one.schedule()
        one.update(plan, result(plan))
    plan = one.schedule()
    output = one.update(plan, result(plan, {"r1": 1}))
    ended = all_[1]
    assert output.finished == [ended]
    assert list(output.num_emitted) == [1, 1, 1]
    assert (ended.status, ended.finish_reason) == (Status.FINISHED_STOPPED, "stop")
    assert ended.num_output_tokens == steps_before + 1
    after = one.schedule()
    assert after.request_ids == ["r0", "r2"]
    assert after.finished_ids == ["r1"]
    one.update(after, result(after))
    assert [request.num_output_tokens for request in all_] == [
        steps_before + 2,
        steps_before + 1,
        steps_before + 2,
    ]


def test_length_comes_first() -> None:
    one, (request,) = scheduler(), requests(1)
    one.add_request(request)
    plan = one.schedule()
    one.update(plan, result(plan, {"r0": 1}))
    assert (request.status, request.finish_reason) == (Status.FINISHED_LENGTH_CAPPED, "length")


@pytest.mark.parametrize(
    ("kept", "output_len", "expected"),
    [(2, 9, (2, "stop")), (2, 2, (2, "length")), (3, 2, (2, "length")), (4, 9, (4, "stop"))],
)
def test_tokens_of_a_step_behind_the_stop_are_dropped(
    kept: int, output_len: int, expected: tuple[int, str]
) -> None:
    one, (request,) = scheduler(), requests(output_len)
    one.add_request(request)
    plan = one.schedule()
    output = one.update(plan, StepResult([1.0], {}, [4], stops={"r0": kept}))
    assert (list(output.num_emitted), request.num_output_tokens) == ([expected[0]], expected[0])
    assert request.finish_reason == expected[1]
