"""With real drafts that the model verifies, requests get the tokens that they get without."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Sequence
from functools import cache
from typing import Any, Literal

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

torch = pytest.importorskip("torch")

from simserve.executor.drafts import DraftWindow  # noqa: E402
from simserve.executor.ngram import NgramProposer  # noqa: E402
from simserve.executor.real import graph_keys  # noqa: E402
from simserve.executor.real.attention import AttentionPath  # noqa: E402
from simserve.executor.real.choices import SamplingChoice, SamplingChoices  # noqa: E402
from simserve.executor.real.decoder_shape import DecoderShape, decoder_shape  # noqa: E402
from simserve.executor.real.draft_model import DraftSource  # noqa: E402
from simserve.executor.real.machine import Machine  # noqa: E402
from simserve.executor.real.outcomes import Outcome, Outcomes  # noqa: E402
from simserve.executor.real.sampler import params_of  # noqa: E402
from simserve.executor.real.speculation import (  # noqa: E402
    Drafted,
    LookupDrafts,
    ModelDrafts,
)
from simserve.executor.real.weights import load_decoder  # noqa: E402
from simserve.metrics.recorder import RunData  # noqa: E402
from simserve.segments import tokens  # noqa: E402
from simserve.types import ModelShape, StepPlan, TraceRequest  # noqa: E402
from simserve_kernels import sampling_reference as reference  # noqa: E402
from simserve_kernels.sampling_settings import SamplingColumns  # noqa: E402
from tests.executor.decoders import ContiguousAttention  # noqa: E402
from tests.executor.served import Schedule, open_machine, request, serve  # noqa: E402
from tests.executor.test_real_sampling import choice  # noqa: E402
from tests.executor.test_real_schedules import (  # noqa: E402
    REQUESTS,
    recomputed,
    schedules,
    sharpen,
    tiny,
    workloads,
)


class KnowingDrafts:
    """Drafts from the tokens that requests will get, some of them spoilt: any number is right."""

    def __init__(self, expected: dict[str, list[int]], k: int, max_model_len: int) -> None:
        self._expected = expected
        self._k = k
        self._window = DraftWindow(k, max_model_len)

    def draft(self, plan: StepPlan, emitted: Sequence[int], known: Any) -> Any:
        if not self._window.fits(plan):
            return Drafted(None)
        drafts = {}
        for request_id, count in zip(plan.request_ids, emitted, strict=True):
            so_far = len(known.outcomes.of(request_id).token_ids)
            right = self._expected[request_id][so_far : so_far + self._k] if count else []
            spoilt = (7 * so_far + len(request_id)) % (self._k + 1)
            drafts[request_id] = [
                (token + (place == spoilt)) % 53 for place, token in enumerate(right)
            ]
        return Drafted(drafts)


class WatchedModelDrafts(ModelDrafts):
    """Of a draft model that is the model itself: its cache is the model's, wherever that counts."""

    def __init__(self, machine: Machine, k: int, max_model_len: int) -> None:
        assert machine.draft is not None
        super().__init__(machine.draft, k, max_model_len)
        layers = zip(machine.caches, machine.draft.caches, strict=True)
        self._pairs = [pair for own, other in layers for pair in zip(own, other, strict=True)]
        self._path = machine.path

    def draft(self, plan: StepPlan, emitted: Sequence[int], known: Any) -> Drafted:
        drafted = super().draft(plan, emitted, known)
        columns = zip(plan.request_ids, plan.starts, plan.num_tokens, emitted, strict=True)
        for request_id, start, num_tokens, count in columns:
            wrong = len(plan.draft_tokens.get(request_id, ())) - max(0, count - 1)
            places = np.arange(start + num_tokens - wrong)
            rows = np.full_like(places, known.rows.of[request_id])
            slots = known.rows.slots(rows, places)
            for a, b in self._pairs:
                assert torch.allclose(self._at(a, slots), self._at(b, slots), 1e-9, 1e-9)
        return drafted

    def _at(self, cache: Any, slots: Any) -> Any:
        """Keys or values of tokens."""
        tokens = cache.movedim(1 if self._path.kv_layout == "nhd" else 3, 1)
        return tokens[slots // tokens.shape[1], slots % tokens.shape[1]]


def smaller(head_dim: int = 8) -> Any:
    """A draft model for `tiny`: one layer, another width."""
    sizes = {"num_hidden_layers": 1, "hidden_size": 16, "intermediate_size": 24}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": head_dim}
    model = ModelShape(name="smaller", vocab_size=53, max_position_embeddings=128, **sizes, **heads)
    return decoder_shape(model, {"model_type": "llama"}, "smaller")


SHARP = [choice(1, temperature=0.04, top_p=0.8), choice(1, temperature=0.03, top_k=3)]


@cache
def sharp(shape: DecoderShape) -> Any:
    """What `speculated` opens, without a machine."""
    decoder = load_decoder(shape, seed=0, dtype=torch.float64, device="cpu")
    sharpen(decoder)
    return decoder


@cache
def target_probs(shape: DecoderShape, said: tuple[int, ...], entry: int) -> Any:
    """What the model, alone, draws from behind a prompt of 9 tokens and some that it has said."""
    decoder = sharp(shape)
    ids = tokens((("p", 9),), shape.model.vocab_size).tolist() + list(said)
    last, places = torch.tensor([len(ids) - 1]), torch.arange(len(ids))
    logits = decoder.forward(torch.tensor(ids), places, ContiguousAttention(None), logits_rows=last)
    columns = SamplingColumns.of([params_of(SHARP[entry].sampling)], [0], "cpu")
    kept = reference.kept_tokens(logits, columns)
    weights = reference.kept_weights(logits, columns, kept)[0].numpy()
    return weights / weights.sum()


class LikelyDrafts:
    """What the model finds likeliest; of every second request the second draft is another."""

    def __init__(self, shape: DecoderShape) -> None:
        self._shape = shape

    def draft(self, plan: StepPlan, emitted: Sequence[int], known: Any) -> Drafted:
        drafts: dict[str, list[int]] = {}
        for request_id, count in zip(plan.request_ids, emitted, strict=True):
            said, drafts[request_id] = tuple(known.outcomes.of(request_id).token_ids), []
            if count:
                first = self._likeliest(said)
                second = self._likeliest((*said, first)) + int(request_id[1:]) % 2
                drafts[request_id] = [first, second % 53]
        return Drafted(drafts)

    def _likeliest(self, said: tuple[int, ...]) -> int:
        return int(target_probs(self._shape, said, 0).argmax())


By = Literal["lookup", "knows", "likely", "smaller", "itself"]


def speculated(
    schedule: Schedule,
    requests: Sequence[TraceRequest],
    k: int,
    sampling: Sequence[SamplingChoice] = (),
    quirks: Any = "fixed",
    by: By = "lookup",
    **options: Any,
) -> tuple[dict[str, Outcome], RunData]:
    """Serve requests with drafts by looking up, from what they will get, or by a model."""
    kept: list[Outcome] = []
    path = AttentionPath(schedule.attention, schedule.kv_layout, schedule.mixed, k)
    shape = options.pop("shape", tiny())
    drafters = {"smaller": smaller(shape.model.head_dim), "itself": shape}
    source = DraftSource(drafters[by]) if by in drafters else None
    machine = open_machine(shape, schedule, path=path, sampling=sampling, draft=source, **options)
    sharpen(machine.decoder)
    drafts: Any = LookupDrafts(NgramProposer(1, 3, k, schedule.max_model_len, quirks))
    if by == "knows":
        expected = {one.request_id: recomputed(shape, one) for one in requests}
        drafts = KnowingDrafts(expected, k, schedule.max_model_len)
    elif by == "likely":
        drafts = LikelyDrafts(shape)
    elif machine.draft is not None:
        sharpen(machine.draft.decoder)
        drafts = ModelDrafts(machine.draft, k, schedule.max_model_len)
        if by == "itself" and machine.rows.ids.device.type == "cpu":
            drafts = WatchedModelDrafts(machine, k, schedule.max_model_len)
    _, data = serve(
        machine,
        schedule,
        requests,
        outcomes=Outcomes(kept.append),
        speculation=drafts,
    )
    return {one.request_id: one for one in kept}, data


@settings(max_examples=15)
@given(
    schedule=schedules,
    requests=workloads(),
    spare_blocks=st.integers(0, 8),
    k=st.integers(1, 4),
    quirks=st.sampled_from(["fixed", "as_engine"]),
    by=st.sampled_from(["lookup", "knows", "smaller", "itself"]),
    looks_ahead=st.booleans(),
    spare_len=st.integers(0, 8),
)
def test_greedy_tokens_are_those_without_drafts(
    schedule: Schedule,
    requests: list[TraceRequest],
    spare_blocks: int,
    k: int,
    quirks: str,
    by: By,
    looks_ahead: bool,
    spare_len: int,
) -> None:
    longest = max(one.prompt_len + one.output_len for one in requests)
    changed = {
        "num_gpu_blocks": -(-(longest + 2 * k) // schedule.block_size) + 1 + spare_blocks,
        "max_model_len": longest + spare_len,
        "max_num_batched_tokens": max(schedule.max_num_batched_tokens, schedule.max_num_seqs),
        "plans_ahead": False,
        "lookahead": k * looks_ahead,
    }
    schedule = Schedule(**{**vars(schedule), **changed})
    got, _ = speculated(schedule, requests, k, quirks=quirks, by=by)
    for one in requests:
        assert got[one.request_id].token_ids == recomputed(tiny(), one)


@pytest.mark.parametrize(("num_gpu_blocks", "by"), [(64, "lookup"), (14, "smaller")])
def test_drawn_tokens_are_those_without_drafts(num_gpu_blocks: int, by: By) -> None:
    """Drafts are right where they are what is drawn anyway, with the place's random numbers."""
    schedule = Schedule(num_gpu_blocks=num_gpu_blocks, block_size=4, max_num_batched_tokens=20)
    sampling = [choice(1, temperature=0.3), choice(1, top_p=0.5), choice(1, min_p=0.2)]
    sampling.append(choice(1, temperature=0))
    got, data = speculated(schedule, REQUESTS, 3, sampling, by=by)
    kept: list[Outcome] = []
    machine = open_machine(tiny(), schedule, sampling=sampling)
    sharpen(machine.decoder)
    serve(machine, schedule, REQUESTS, outcomes=Outcomes(kept.append))
    assert {name: one.token_ids for name, one in got.items()} == {
        one.request_id: one.token_ids for one in kept
    }
    assert (data.requests.num_preemptions.sum() > 0) == (num_gpu_blocks < 64)


def check_distribution(shape: DecoderShape, count: int, by: By, **options: Any) -> None:
    """Of one prompt many are drawn; behind each beginning, tokens come as often as they should.

    The first draft of a step is judged behind a token that is known, the second one behind it.
    """
    schedule = Schedule(max_num_seqs=64, max_num_batched_tokens=256, lookahead=2, num_gpu_blocks=90)
    requests = [request(f"r{i}", 0.0, [("p", 9)], 3) for i in range(count)]
    got, data = speculated(schedule, requests, 2, SHARP, by=by, shape=shape, **options)
    choices = SamplingChoices(SHARP, 0)
    found: dict[tuple[int, tuple[int, ...]], Counter[int]] = defaultdict(Counter)
    for one in requests:
        entry, ids = int(choices.of(one).top_k > 0), tuple(got[one.request_id].token_ids)
        for place in (1, 2):
            found[entry, ids[:place]][ids[place]] += 1
    distance = degrees = 0.0
    for (entry, said), counts in found.items():
        expected = target_probs(shape, said, entry) * counts.total()
        assert all(expected[token] > 0 for token in counts), "a token that the filters leave out"
        observed = np.array([counts[token] for token in range(len(expected))])
        many = expected >= 5
        if many.sum() > 1:
            rest = expected[~many].sum()
            distance += ((observed - expected)[many] ** 2 / expected[many]).sum()
            if rest > 1e-9:
                distance += (observed - expected)[~many].sum() ** 2 / rest
            degrees += many.sum() - 1 + (rest > 1e-9)
    assert degrees > 10
    assert abs(distance - degrees) < 4 * np.sqrt(2 * degrees)
    verified = data.spec_decode
    share = sum(verified.accepted_per_pos) / sum(verified.draft_tokens_per_pos)
    assert 0.1 < share < 0.9, "drafts of both kinds"


def test_drawn_tokens_are_distributed_as_the_model_has_them() -> None:
    check_distribution(tiny(), 300, "likely")


@pytest.mark.gpu
@pytest.mark.parametrize("by", ["likely", "itself"])
def test_tokens_on_a_gpu_are_distributed_as_the_model_has_them(by: By) -> None:
    check_distribution(tiny(64), 10_000, by, device="cuda", dtype="float32")


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("max_num_batched_tokens", "by", "most_split"),
    [(9, "lookup", 32), (64, "lookup", 0), (9, "smaller", 0), (64, "itself", 32)],
)
def test_tokens_on_a_gpu_are_those_without_drafts(
    max_num_batched_tokens: int, by: By, most_split: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(graph_keys, "MAX_SPLIT_TOKENS", most_split)
    lookahead = 0 if by == "lookup" else 3
    schedule = Schedule(max_num_batched_tokens=max_num_batched_tokens, lookahead=lookahead)
    shape, sampling = tiny(64), [choice(1, temperature=0), choice(1, top_p=0.9)]
    on_gpu = {"shape": shape, "device": "cuda", "dtype": "float32"}
    got, data = speculated(schedule, REQUESTS, 3, sampling, by=by, **on_gpu)
    expected, _ = speculated(schedule, REQUESTS, 3, sampling, shape=shape)
    assert {name: one.token_ids for name, one in got.items()} == {
        name: one.token_ids for name, one in expected.items()
    }
    found = data.spec_decode
    assert found.num_drafts > 0
    assert by != "itself" or sum(found.accepted_per_pos) > 20


def test_some_drafts_are_accepted() -> None:
    """Or the tests above would hold without any being verified."""
    _, data = speculated(Schedule(), REQUESTS, 3, by="knows")
    found = data.spec_decode
    assert min(found.accepted_per_pos) > 2
    assert sum(found.accepted_per_pos) < sum(found.draft_tokens_per_pos)
    assert data.steps.num_steps < 10
    steps = data.steps
    assert steps.parts["draft_s"].sum() == pytest.approx(found.draft_s)
    parts = [steps.parts[name] for name in steps.parts if name != "first_shape"]
    assert sum(parts) == pytest.approx(steps.duration_s)


def test_a_model_that_drafts_for_itself_is_always_right() -> None:
    """With room for all drafts from the first one on, and outputs that end with a whole step."""
    requests = [request(f"r{i}", 0.0, length, 1 + 3 * 4) for i, length in enumerate([9, 23, 7])]
    _, data = speculated(Schedule(lookahead=3), requests, 3, by="itself")
    found, steps = data.spec_decode, data.steps
    assert found.accepted_per_pos == found.draft_tokens_per_pos == [9, 9, 9]
    assert steps.num_steps == 4
    assert (steps.parts["draft_s"] > 0).all()
    parts = [steps.parts[name] for name in steps.parts if name != "first_shape"]
    assert sum(parts) == pytest.approx(steps.duration_s)


@pytest.mark.parametrize(
    ("block_size", "lookahead", "prompt_len", "drafts"),
    [(4, 3, 16, [0, 3]), (4, 3, 14, [2, 3]), (1, 3, 14, [0, 3]), (1, 0, 14, [0, 0])],
)
def test_drafts_need_slots(
    block_size: int, lookahead: int, prompt_len: int, drafts: list[int]
) -> None:
    """A request that has just come in has what its last block leaves; one that runs has k."""
    schedule = Schedule(block_size=block_size, lookahead=lookahead)
    _, data = speculated(schedule, [request("a", 0.0, prompt_len, 13)], 3, by="itself")
    assert (data.steps.num_tokens[1:3] - 1).tolist() == drafts


def test_a_stop_among_accepted_drafts_ends_a_request() -> None:
    free, _ = speculated(Schedule(), REQUESTS, 3, [choice(1, temperature=0)])
    stop = free["e"].token_ids[5]
    ends = [choice(1, temperature=0, stop_token_ids=(stop,))]
    got, data = speculated(Schedule(), REQUESTS, 3, ends, by="knows")
    assert data.num_stopped > 0
    for name, one in got.items():
        ids = free[name].token_ids
        end = ids.index(stop) + 1 if stop in ids else len(ids)
        assert one.token_ids == ids[:end]
