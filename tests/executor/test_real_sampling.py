"""Drawn tokens are the same under any schedule, and each request draws as it should."""

from __future__ import annotations

from collections import Counter
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from simserve.executor.real.choices import SamplingChoice, SamplingChoices  # noqa: E402
from simserve.executor.real.request_rows import RequestRows  # noqa: E402
from simserve.executor.real.rule_rows import Ruled  # noqa: E402
from simserve.executor.real.sampler import Sampler, params_of  # noqa: E402
from simserve.executor.real.staging import Staging  # noqa: E402
from simserve.executor.real.weights import load_decoder  # noqa: E402
from simserve.sampling import RequestSampling  # noqa: E402
from simserve.segments import tokens  # noqa: E402
from simserve.types import TraceRequest  # noqa: E402
from simserve_kernels import sampling_reference as reference  # noqa: E402
from simserve_kernels.sampling_settings import SamplingColumns  # noqa: E402
from tests.executor.decoders import ContiguousAttention  # noqa: E402
from tests.executor.served import Schedule, open_machine, request, serve  # noqa: E402
from tests.executor.test_real_schedules import tiny  # noqa: E402


def choice(weight: float, **settings: Any) -> SamplingChoice:
    return SamplingChoice(weight, RequestSampling(**settings))


CHOICES = (
    choice(1, temperature=0),
    choice(1, top_p=0.9),
    choice(1, temperature=0.7, top_k=5),
    choice(1, min_p=0.3),
)
REQUESTS = [request(f"r{i}", 0.0, 5 + 3 * i, 6) for i in range(7)]
CPU = torch.device("cpu")


def recomputed(one: TraceRequest, choices: SamplingChoices, head_dim: int = 8) -> list[int]:
    """Everything computed again for each token."""
    shape = tiny(head_dim)
    decoder = load_decoder(shape, seed=0, dtype=torch.float64, device="cpu")
    params = params_of(choices.of(one))
    ids = tokens(one.prompt, shape.model.vocab_size).tolist()
    for _ in range(one.output_len):
        last = torch.tensor([len(ids) - 1])
        logits = decoder.forward(
            torch.tensor(ids), torch.arange(len(ids)), ContiguousAttention(None), logits_rows=last
        )
        columns = SamplingColumns.of([params], [len(ids)], "cpu")
        ids.append(int(reference.sample(logits, columns)))
    return ids[one.prompt_len :]


@pytest.mark.parametrize(
    "schedule",
    [
        Schedule(),
        Schedule(max_num_batched_tokens=9, max_num_seqs=3, caching=False),
        Schedule(num_gpu_blocks=6, block_size=8),
    ],
    ids=["at once", "few at a time", "preempted"],
)
def test_tokens_do_not_depend_on_the_schedule(schedule: Schedule) -> None:
    machine = open_machine(tiny(), schedule, sampling=CHOICES)
    choices = SamplingChoices(CHOICES, 0)
    got, data = serve(machine, schedule, REQUESTS)
    assert got == {one.request_id: recomputed(one, choices) for one in REQUESTS}
    assert (data.requests.num_preemptions.sum() > 0) == (schedule.num_gpu_blocks < 64)


@pytest.mark.gpu
@pytest.mark.parametrize("max_num_batched_tokens", [9, 64])
def test_tokens_on_a_gpu_are_those_of_the_cpu(max_num_batched_tokens: int) -> None:
    schedule = Schedule(max_num_batched_tokens=max_num_batched_tokens)
    machine = open_machine(tiny(64), schedule, device="cuda", dtype="float32", sampling=CHOICES)
    got, data = serve(machine, schedule, REQUESTS)
    choices = SamplingChoices(CHOICES, 0)
    assert got == {one.request_id: recomputed(one, choices, 64) for one in REQUESTS}
    assert not data.steps.parts["first_shape"].any(), "the warm-up compiles everything"


def test_requests_take_choices_by_weight() -> None:
    choices = (choice(3, temperature=0), choice(7, top_p=0.9))
    given = SamplingChoices(choices, 5)
    requests = [request(f"request {i}", 0.0, 1, 1) for i in range(2000)]
    params = [given.of(one) for one in requests]
    shares = Counter(one.top_p for one in params)
    assert shares[0.9] / 2000 == pytest.approx(0.7, abs=0.03)
    assert len({one.seed for one in params}) == 2000
    assert given.of(requests[7]) == params[7]
    assert SamplingChoices(choices, 6).of(requests[7]).seed != params[7].seed


def columns(sampler: Sampler, row: int) -> dict[str, Any]:
    return {
        name: None if one is None else one[row].item()
        for name, one in sampler._rows.tensors.items()
    }


def test_a_row_has_the_settings_of_who_is_in_it() -> None:
    """What an earlier request wanted is gone, also where the next one wants nothing."""
    settings = [RequestSampling(top_k=5), RequestSampling(top_p=0.5)]
    sampler = Sampler(settings, RequestRows(2, 8, 4, Staging(CPU)), 97)
    for number in (0, 1, 0):
        sampler.admit({1: Ruled(settings[number], frozenset(), 1, np.zeros(1, np.int32))})
        found = columns(sampler, 1)
        assert (found["top_k"], found["top_p"]) == ((5, 1.0), (0, 0.5))[number]
        assert found["min_p"] is None


def test_only_the_likeliest_tokens_are_what_no_sampling_gives() -> None:
    schedule = Schedule()
    got = [
        serve(open_machine(tiny(), schedule, sampling=sampling), schedule, REQUESTS)[0]
        for sampling in ((), (choice(1, temperature=0),), (choice(1, top_k=1),))
    ]
    assert got[0] == got[1] == got[2]
