"""Measures whole steps of an executor: made-up requests in made-up blocks. Needs no torch.

Every request is new in the first step, its first K tokens computed already, as after a prefix hit.
Then decodes go on, a token a step; a request with several tokens ends and another one with the same
numbers takes its place and blocks, so that each step computes the same shape. What lies in the
computed blocks does not matter to how long it takes, but requests may have some of them together:
then the GPU's cache has them after the first.

A GPU's clock falls under prompts that follow one another. A case may rest before each step: its
decodes run alone, or a single one does, as before most prompts in service.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import numpy as np

from simserve.errors import CapacityError
from simserve.executor.real.bench.step_cases import RequestShape, StepCase
from simserve.protocols import Executor
from simserve.types import Kind, StepPlan, StepRun, TraceRequest, seconds_at

__all__ = ["StepSamples", "measure_steps"]


class StepSamples(NamedTuple):
    """Of the measured steps, one entry a step."""

    durations_s: list[float]
    parts: dict[str, list[float]]
    """As the executor names them: `*_s` are seconds."""


class _Member(NamedTuple):
    """A request of the case and the blocks it owns, enough for all steps."""

    number: int
    shape: RequestShape
    blocks: list[int]
    num_repeated: int
    """How many of them an earlier member has as well."""


def _no_rest(case: StepCase) -> int:
    return 0


def measure_steps(
    executor: Executor,
    cases: Sequence[StepCase],
    *,
    block_size: int,
    num_gpu_blocks: int,
    num_warmup_steps: int,
    num_steps: int,
    num_rest_steps: Callable[[StepCase], int] = _no_rest,
) -> Iterator[StepSamples]:
    """Yield the samples of each case: `num_warmup_steps` run before `num_steps` that count.

    Before each of them so many steps of decodes run as `num_rest_steps` says of the case. They are
    no samples, and their plans are numbered -1.

    Raises:
        CapacityError: the blocks, of which number 0 is not used, do not hold a case; nothing has
            run then.
    """
    total = num_warmup_steps + num_steps
    rests = [num_rest_steps(case) for case in cases]
    members = [
        _members(case, block_size, num_gpu_blocks, total * (1 + rest), rest > 0)
        for case, rest in zip(cases, rests, strict=True)
    ]
    requests = _Requests(executor, block_size, total * (1 + max(rests, default=0)))
    clock_s = 0.0
    for number, (those, rest) in enumerate(zip(members, rests, strict=True)):
        samples = StepSamples([], {})
        own = those[: len(cases[number].requests)]
        for step in range(total):
            for _ in range(rest):
                plan = requests.plan(number, -1, _decodes(those, own))
                clock_s = executor.submit(StepRun(plan), clock_s).ends_s[0]
            result = executor.submit(StepRun(requests.plan(number, step, own)), clock_s)
            end_s = result.ends_s[0]
            if step >= num_warmup_steps:
                samples.durations_s.append(end_s - clock_s)
                for name, values in result.parts.items():
                    samples.parts.setdefault(name, []).append(seconds_at(values, 0))
            clock_s = end_s
        yield samples


def _members(
    case: StepCase, block_size: int, num_gpu_blocks: int, num_steps: int, rests: bool
) -> list[_Member]:
    """Blocks are handed out in random order, as after hours of service.

    A case that rests and has no decode gets one behind its requests.
    """
    shapes = list(case.requests)
    if rests and all(shape.num_new_tokens > 1 for shape in shapes):
        shapes.append(_LONE_DECODE)
    repeated = [
        shape.num_shared_tokens // block_size if shape == before else 0
        for shape, before in zip(shapes, [None, *shapes], strict=False)
    ]
    counts = [
        -(-_last_len(shape, num_steps) // block_size) - shared
        for shape, shared in zip(shapes, repeated, strict=True)
    ]
    if sum(counts) >= num_gpu_blocks:
        raise CapacityError(
            f"--case {case.name}: needs {sum(counts)} KV blocks of {block_size} tokens, and there "
            f"are {num_gpu_blocks - 1}; take a smaller case or fewer steps"
        )
    order = np.random.default_rng(0).permutation(np.arange(1, sum(counts) + 1))
    owned = np.split(order, np.cumsum(counts)[:-1])
    members: list[_Member] = []
    for shape, own, shared in zip(shapes, owned, repeated, strict=True):
        before = members[-1].blocks[:shared] if shared else []
        members.append(_Member(len(members), shape, before + own.tolist(), shared))
    return members


def _decodes(members: Sequence[_Member], own: Sequence[_Member]) -> list[_Member]:
    """Those of a case that run while it rests."""
    return [one for one in own if one.shape.num_new_tokens == 1] or list(members[len(own) :])


def _last_len(shape: RequestShape, num_steps: int) -> int:
    """Tokens of a request after the last step."""
    return shape.num_tokens + (num_steps - 1 if shape.num_new_tokens == 1 else 0)


_LONE_DECODE = RequestShape(1, 15)


class _Requests:
    """Makes the plans, and knows who runs."""

    def __init__(self, executor: Executor, block_size: int, num_steps: int) -> None:
        self._executor = executor
        self._block_size = block_size
        self._num_steps = num_steps
        self._running: dict[str, int] = {}
        """Blocks in the table of each request that has run in the last step."""
        self._case = -1
        self._num_plans = 0
        """Of this case so far."""

    def plan(self, case: int, step: int, members: Sequence[_Member]) -> StepPlan:
        """The next step of a case, numbered `step`."""
        done = self._num_plans if case == self._case else 0
        self._case, self._num_plans = case, done + 1
        plan = StepPlan(step=step, num_common_prefix_blocks=(0,))
        plan.num_shared_kv_tokens = self._block_size * sum(one.num_repeated for one in members)
        before, self._running = self._running, {}
        for number, shape, blocks, _ in members:
            stays = shape.num_new_tokens == 1
            request_id = f"{case}/{number}" if stays else f"{case}/{number}/{step}"
            start = shape.num_computed_tokens + (done if stays else 0)
            held = before.get(request_id, 0)
            needed = -(-(start + shape.num_new_tokens) // self._block_size)
            if request_id not in before:
                self._executor.add_request(_trace_request(request_id, shape, self._num_steps))
                plan.kinds[request_id] = Kind.NEW
            if needed > held:
                plan.new_blocks[request_id] = (blocks[held:needed],)
            self._running[request_id] = needed
            plan.request_ids.append(request_id)
            plan.starts.append(start)
            plan.num_tokens.append(shape.num_new_tokens)
            plan.samples.append(True)
        plan.finished_ids += [
            request_id for request_id in before if request_id not in self._running
        ]
        return plan


def _trace_request(request_id: str, shape: RequestShape, num_steps: int) -> TraceRequest:
    prompt = ((f"{request_id}/prompt", shape.num_tokens),)
    return TraceRequest(
        request_id=request_id, arrival_s=0.0, prompt=prompt, output_len=num_steps + 1
    )
