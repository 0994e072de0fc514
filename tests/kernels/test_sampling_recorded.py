"""The sampler agrees with what was recorded from vLLM v0.11.0: masks, penalties, mixed batches."""

from __future__ import annotations

import gzip
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("triton")

from simserve.sampling import RequestSampling  # noqa: E402
from simserve_kernels import sampling_reference as reference  # noqa: E402
from simserve_kernels.sampling import SamplingPlan, sample  # noqa: E402
from simserve_kernels.sampling_logprobs import (  # noqa: E402
    LogprobsPlan,
    store_logprobs,
)
from simserve_kernels.sampling_settings import (  # noqa: E402
    SamplingColumns,
    SamplingPath,
    TokenLogprobs,
)
from tests.kernels.request_rules import ruled  # noqa: E402

FILE = Path(__file__).parents[1] / "data" / "golden_functions.json.gz"
SMALL = SamplingPlan(chunk=32, tile=128, capacity=32, scan=32, survey_warps=1)
RECORDED = json.loads(gzip.decompress(FILE.read_bytes()))


def columns_of(case: dict[str, Any], path: SamplingPath, device: str) -> SamplingColumns:
    def column(name: str, dtype: Any) -> Any:
        values = case.get(name)
        return None if values is None else torch.tensor(values, dtype=dtype, device=device)

    rows = len(case["logits"])
    return SamplingColumns(
        path=path,
        temperature=column("temperature", torch.float32),
        seeds=torch.arange(rows, device=device),
        steps=torch.zeros(rows, dtype=torch.int64, device=device),
        top_k=column("top_k", torch.int32),
        top_p=column("top_p", torch.float32),
        min_p=column("min_p", torch.float32),
    )


def kept_logits(logits: Any, kept: Any) -> list[list[float]]:
    """Of each row, sorted: which of equal logits stays at a cut is not recorded."""
    pairs = zip(logits.tolist(), kept.tolist(), strict=True)
    return [sorted(x for x, stays in zip(*pair, strict=True) if stays) for pair in pairs]


def recorded_logits(case: dict[str, Any]) -> list[list[float]]:
    rows = torch.tensor(case["logits"]).tolist()
    return [sorted(row[i] for i in ids) for row, ids in zip(rows, case["kept"], strict=True)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_reference_keeps_the_recorded_logits(dtype: torch.dtype) -> None:
    cases = RECORDED["sampler_masks"]["cases"]
    assert len(cases) == 60
    for case in cases:
        logits = torch.tensor(case["logits"])
        kept = reference.kept_tokens(logits, columns_of(case, "random", "cpu"), dtype=dtype)
        assert kept_logits(logits, kept) == recorded_logits(case), case


def test_kernels_keep_the_recorded_logits(device: str) -> None:
    for case in RECORDED["sampler_masks"]["cases"][:: 1 if device == "cuda" else 7]:
        logits = torch.tensor(case["logits"], device=device)
        out = sample(logits, columns_of(case, "random", device), plan=SMALL)
        token = torch.arange(logits.shape[1], device=device)
        cut, last = out.cuts[:, None], out.last_ties[:, None]
        kept = (logits > cut) | ((logits == cut) & (token <= last))
        assert kept_logits(logits, kept) == recorded_logits(case), case
        assert kept.gather(1, out.tokens[:, None]).all()


def asked_in(case: dict[str, Any]) -> list[RequestSampling]:
    """What each request of a case wants."""
    names = {
        "presence_penalty": "presence",
        "frequency_penalty": "frequency",
        "repetition_penalty": "repetition",
        "min_tokens": "min_tokens",
        "stop_token_ids": "stop_token_ids",
        "bad_words": "bad_words",
        "allowed_token_ids": "allowed",
        "logit_bias": "logit_bias",
    }
    found = []
    for row in range(len(case["logits"])):
        given = {ours: case[name][row] for ours, name in names.items() if case.get(name)}
        given |= {"logit_bias": dict(given.get("logit_bias") or ())}
        found.append(RequestSampling(**given))
    return found


def test_penalties_and_masks_are_those_recorded() -> None:
    cases = RECORDED["sampler_greedy"]["cases"]
    assert len(cases) == 60
    for case in cases:
        logits = torch.tensor(case["logits"])
        rows = zip(logits, asked_in(case), case["prompt"], case["out"], strict=True)
        out = torch.stack([ruled(*row) for row in rows])
        recorded = [[-torch.inf if x is None else x for x in row] for row in case["processed"]]
        torch.testing.assert_close(out, torch.tensor(recorded), rtol=0, atol=1e-4)
        chosen = out.gather(1, reference.argmax(out)[:, None])[:, 0]
        token = torch.tensor(case["token"])
        torch.testing.assert_close(chosen, out.gather(1, token[:, None])[:, 0])


def test_allowed_tokens_and_bias_come_first() -> None:
    asked = RequestSampling(allowed_token_ids=(0, 2), logit_bias={0: 4.0}, presence_penalty=1.5)
    out = ruled(torch.tensor([1.0, 2.0, 3.0, 4.0]), asked, [], [0])
    assert out.tolist() == [3.5, -torch.inf, 3.0, -torch.inf]


def test_mixed_batches_choose_the_recorded_tokens(device: str) -> None:
    cases = RECORDED["sampler_mixed"]
    assert len(cases) == 20
    for case in cases[:: 1 if device == "cuda" else 4]:
        logits = torch.tensor(case["logits"], device=device)
        columns = columns_of(case, "mixed", device)
        assert sample(logits, columns, plan=SMALL).tokens.tolist() == case["token"]
        assert reference.sample(logits, columns).tolist() == case["token"]


def logprobs_by(
    store: Any, logits: Any, tokens: Any, wanted: Sequence[int], n: int, **options: Any
) -> TokenLogprobs:
    """What a function fills in, −7 where it leaves a place as it was."""
    device = logits.device
    memory = torch.full((len(logits), 3 + 2 * n), -7, dtype=torch.int32, device=device)
    out = TokenLogprobs(memory[:, 1 : 2 + n], memory[:, 2 + n :].view(torch.float32), memory[:, 0])
    asks = torch.tensor(wanted, dtype=torch.int32, device=device)
    store(out, logits, torch.as_tensor(tokens, device=device), asks, **options)
    return TokenLogprobs(*(one.cpu() for one in out))


def test_logprobs_and_ranks_are_those_recorded(device: str) -> None:
    cases = RECORDED["logprobs"]["cases"]
    assert {0} < {case["k"] for case in cases}
    for case in cases:
        logits, n = torch.tensor(case["logits"], device=device), case["k"]
        wanted = [n] * len(logits)
        exact = logprobs_by(reference.store_logprobs, logits, case["tokens"], wanted, n)
        plan = LogprobsPlan(chunk=32, sum_warps=1, pick_warps=1)
        found = logprobs_by(store_logprobs, logits, case["tokens"], wanted, n, plan=plan)
        for one in (exact, found):
            assert one.ranks.tolist() == case["ranks"]
            recorded = torch.tensor(case["logprobs"])
            torch.testing.assert_close(one.logprobs, recorded, rtol=0, atol=2e-5)
            assert one.ids[:, 0].tolist() == case["tokens"]
        assert torch.equal(found.ids, exact.ids)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_logprobs_of_those_rows_that_ask(device: str, seed: int, dtype: str) -> None:
    torch.manual_seed(seed)
    logits = torch.randn(6, 201, device=device).to(getattr(torch, dtype))
    logits[1] = 0.5  # all alike
    logits[2, 5:] = -torch.inf  # fewer tokens than are asked for
    tokens, wanted, n = [3, 200, 0, 7, 7, 9], [7, 3, 7, -1, 0, 7], 7
    plan = LogprobsPlan(chunk=64, sum_warps=1, pick_warps=1)
    found = logprobs_by(store_logprobs, logits, tokens, wanted, n, plan=plan)
    exact = logprobs_by(reference.store_logprobs, logits, tokens, wanted, n)
    for row, count in enumerate(wanted):
        assert torch.equal(found.ids[row, : 1 + count], exact.ids[row, : 1 + count])
        close = (found.logprobs[row, : 1 + count], exact.logprobs[row, : 1 + count])
        torch.testing.assert_close(*close, rtol=1e-5, atol=1e-5)
        assert (found.ids[row, 1 + count :] == -7).all(), "what was not asked for"
        assert found.ranks[row] == (-7 if count < 0 else exact.ranks[row])


def test_as_many_logprobs_as_there_are_tokens() -> None:
    with pytest.raises(ValueError, match="out has room for 5 of the likeliest of 4 tokens"):
        logprobs_by(store_logprobs, torch.zeros(1, 4), [0], [5], 5)
