"""Penalties, masks and seeds hold for each request, whatever else runs and who was preempted."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")

from simserve.executor.real.choices import SamplingChoices  # noqa: E402
from simserve.executor.real.outcomes import Outcome, Outcomes  # noqa: E402
from simserve.executor.real.sampler import params_of  # noqa: E402
from simserve.executor.real.weights import load_decoder  # noqa: E402
from simserve.segments import tokens  # noqa: E402
from simserve.types import TraceRequest  # noqa: E402
from simserve_kernels import sampling_reference as reference  # noqa: E402
from simserve_kernels.sampling_settings import SamplingColumns  # noqa: E402
from tests.executor.decoders import ContiguousAttention  # noqa: E402
from tests.executor.served import Schedule, open_machine, request, serve  # noqa: E402
from tests.executor.test_real_outcomes import SCHEDULES  # noqa: E402
from tests.executor.test_real_sampling import REQUESTS, choice  # noqa: E402
from tests.executor.test_real_schedules import tiny  # noqa: E402
from tests.kernels.request_rules import ruled  # noqa: E402

STOPS = tuple(range(0, 53, 3))
CHOICES = (
    choice(1, temperature=0),
    choice(1, temperature=0, repetition_penalty=1.8, frequency_penalty=0.5),
    choice(1, temperature=0.8, presence_penalty=1.5, logit_bias={5: 2.0, 40: 1.0}),
    choice(1, temperature=2.0, stop_token_ids=STOPS, min_tokens=4, logprobs=2),
    choice(1, allowed_token_ids=tuple(range(20, 40)), bad_words=((21,), (30, 31), (22, 23, 24))),
)


def recomputed(one: TraceRequest, choices: SamplingChoices, head_dim: int) -> list[int]:
    """Everything computed again for each token, and its rules from all tokens before it."""
    shape, asked = tiny(head_dim), choices.of(one)
    decoder = load_decoder(shape, seed=0, dtype=torch.float64, device="cpu")
    prompt, output = tokens(one.prompt, shape.model.vocab_size).tolist(), []
    while len(output) < one.output_len and not (output and output[-1] in asked.stop_token_ids):
        ids = torch.tensor(prompt + output)
        logits = decoder.forward(
            ids,
            torch.arange(len(ids)),
            ContiguousAttention(None),
            logits_rows=torch.tensor([len(ids) - 1]),
        )
        logits = ruled(logits[0], asked, prompt, output)[None]
        columns = SamplingColumns.of([params_of(asked)], [len(ids)], "cpu")
        output.append(int(reference.sample(logits, columns)))
    return output


def check(schedule: Schedule, device: str = "cpu", dtype: str = "float64", head: int = 8) -> None:
    kept: list[Outcome] = []
    machine = open_machine(
        tiny(head), schedule, device=device, dtype=dtype, sampling=CHOICES, max_logprobs=2
    )
    _, data = serve(machine, schedule, REQUESTS, outcomes=Outcomes(kept.append))
    choices = SamplingChoices(CHOICES, 0)
    asked = {choices.of(one).temperature for one in REQUESTS}
    assert asked == {one.sampling.temperature for one in CHOICES}
    got = {one.request_id: one.token_ids for one in kept}
    assert got == {one.request_id: recomputed(one, choices, head) for one in REQUESTS}
    assert (data.requests.num_preemptions.sum() > 0) == (schedule.num_gpu_blocks < 64)
    if device == "cuda":
        assert not data.steps.parts["first_shape"].any(), "the warm-up compiles everything"


@pytest.mark.parametrize("name", SCHEDULES)
def test_rules_do_not_depend_on_the_schedule(name: str) -> None:
    check(SCHEDULES[name])


@pytest.mark.gpu
@pytest.mark.parametrize("name", SCHEDULES)
def test_rules_on_a_gpu_are_those_of_the_cpu(name: str) -> None:
    check(SCHEDULES[name], "cuda", "float32", 64)


def test_a_seed_gives_the_same_tokens_whatever_else_is_in_the_batch() -> None:
    def drawn(others: int, **settings: object) -> list[int]:
        kept: list[Outcome] = []
        alike = request("same", 0.0, (("prompt", 6),), 8)
        rest = [request(f"o{i}", 0.0, 4 + i, 5) for i in range(others)]
        machine = open_machine(tiny(), Schedule(), sampling=[choice(1, **settings)])
        serve(machine, Schedule(), [*rest, alike], outcomes=Outcomes(kept.append))
        return next(one.token_ids for one in kept if one.request_id == "same")

    assert drawn(0, seed=7) == drawn(5, seed=7)
    assert drawn(0, seed=7) != drawn(0, seed=8)
