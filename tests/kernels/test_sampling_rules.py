"""Rules on the device are those of single requests: masks, biases, penalties, in one batch."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("triton")

from simserve.executor.real.request_rows import RequestRows  # noqa: E402
from simserve.executor.real.rule_rows import Ruled, RuleRows  # noqa: E402
from simserve.executor.real.staging import Staging  # noqa: E402
from simserve.sampling import RequestSampling  # noqa: E402
from simserve_kernels import sampling_reference as reference  # noqa: E402
from simserve_kernels.sampling_rules import apply_rules  # noqa: E402
from tests.kernels.request_rules import ruled  # noqa: E402
from tests.kernels.test_sampling_recorded import RECORDED, asked_in  # noqa: E402

MAX_LEN = 64
STOPS = (3, 9)
SETTINGS: list[dict[str, Any]] = [
    {},
    {"presence_penalty": 0.7, "frequency_penalty": -0.3, "repetition_penalty": 1.3},
    {"min_tokens": 5, "stop_token_ids": STOPS, "logit_bias": {3: 2.0, 11: -1.5}},
    {"bad_words": ((4,), (7, 2), (1, 2, 6)), "allowed_token_ids": tuple(range(1, 97, 2))},
    {"bad_words": ((8, 5),), "logit_bias": {5: 30.0}, "repetition_penalty": 0.8},
    {},
]
PROMPTS = [[5, 5, 8], [1, 2, 3], [7], [1, 2, 7], [8, 8], [9] * 6]
OUTPUTS = [[1], [2, 9, 9, 9], [4, 4], [9, 7], [5, 8], []]


def state(
    asked: list[RequestSampling],
    prompts: list[list[int]],
    outputs: list[list[int]],
    vocab_size: int,
    device: str,
    stops: list[tuple[int, ...]] | None = None,
) -> tuple[RequestRows, RuleRows]:
    """Rows in which request i has row i."""
    rows = RequestRows(len(asked), MAX_LEN, 16, Staging(torch.device(device)))
    rules = RuleRows(asked, 4, rows, vocab_size)
    ids = [np.array(one + two, np.int32) for one, two in zip(prompts, outputs, strict=True)]
    for i, one in enumerate(ids):
        rows.ids[i, : len(one)] = torch.from_numpy(one).to(device)
    ends = stops or [one.stop_token_ids for one in asked]
    rules.admit(
        {i: Ruled(one, frozenset(ends[i]), len(prompts[i]), ids[i]) for i, one in enumerate(asked)}
    )
    return rows, rules


def applied(function: Any, logits: Any, rows: RequestRows, rules: RuleRows, order: Any) -> Any:
    out = logits.clone()
    known = torch.tensor([len(p) + len(o) for p, o in zip(PROMPTS, OUTPUTS, strict=True)])
    places = (order.to(logits.device), known[order].to(logits.device))
    function(out, rules.columns, *places, rows.ids)
    return out


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
def test_each_row_is_changed_as_its_request_wants(device: str, seed: int, dtype: Any) -> None:
    vocab_size = 97
    asked = [RequestSampling(**one) for one in SETTINGS]
    rows, rules = state(asked, PROMPTS, OUTPUTS, vocab_size, device)
    generator = torch.Generator().manual_seed(seed)
    order = torch.randperm(len(asked), generator=generator)
    logits = torch.randn(len(asked), vocab_size, generator=generator).to(device, dtype)
    expected = torch.stack(
        [
            ruled(row, asked[i], PROMPTS[i], OUTPUTS[i])
            for row, i in zip(logits.float(), order, strict=True)
        ]
    )
    found = applied(apply_rules, logits, rows, rules, order)
    bound = 1e-6 if dtype == torch.float32 else 4e-3
    torch.testing.assert_close(found.float(), expected, rtol=bound, atol=bound)
    plain = [row for row, i in enumerate(order.tolist()) if not SETTINGS[i]]
    assert torch.equal(found[plain], logits[plain])
    torch.testing.assert_close(
        applied(reference.apply_rules, logits.float(), rows, rules, order), expected
    )


def test_counts_grow_as_tokens_are_put_out(device: str) -> None:
    """As if the requests had come in with them; and nothing of a former request stays."""
    asked = [RequestSampling(**one) for one in SETTINGS]
    _, rules = state(asked, PROMPTS, [[] for _ in OUTPUTS], 97, device)
    for step in range(4):
        live = [i for i, one in enumerate(OUTPUTS) if len(one) > step]
        places, tokens = torch.tensor(live), torch.tensor([OUTPUTS[i][step] for i in live])
        rules.count(places.to(device), tokens.to(device))
    _, expected = state(asked, PROMPTS, OUTPUTS, 97, device)
    penalised = [1, 4]
    assert torch.equal(rules.columns.counts[penalised], expected.columns.counts[penalised])
    ids = np.array(PROMPTS[1], np.int32)
    rules.admit({1: Ruled(asked[1], frozenset(), 3, ids), 4: Ruled(asked[0], frozenset(), 3, ids)})
    assert rules.columns.counts[1].nonzero().flatten().tolist() == [1, 2, 3]
    assert not rules.columns.has_tokens[4]


def test_kernel_and_reference_do_what_was_recorded(device: str) -> None:
    """Masks, biases and penalties of vLLM, one case a batch."""
    cases = RECORDED["sampler_greedy"]["cases"]
    for case in cases[:: 1 if device == "cuda" else 6]:
        logits = torch.tensor(case["logits"], device=device)
        of_case = (asked_in(case), case["prompt"], case["out"])
        rows, rules = state(*of_case, logits.shape[1], device)
        known = [len(p) + len(o) for p, o in zip(case["prompt"], case["out"], strict=True)]
        places = (torch.arange(len(logits), device=device), torch.tensor(known, device=device))
        recorded = torch.tensor(
            [[-torch.inf if x is None else x for x in row] for row in case["processed"]]
        )
        for function in (apply_rules, reference.apply_rules):
            out = logits.clone()
            function(out, rules.columns, *places, rows.ids)
            torch.testing.assert_close(out.cpu(), recorded, rtol=0, atol=1e-4)


def test_columns_that_do_not_fit_are_refused(device: str) -> None:
    asked = [RequestSampling(**one) for one in SETTINGS]
    rows, rules = state(asked, PROMPTS, OUTPUTS, 97, device)
    places = torch.zeros(2, dtype=torch.int64, device=device)
    with pytest.raises(ValueError, match="allowed has shape"):
        apply_rules(torch.zeros(2, 96, device=device), rules.columns, places, places, rows.ids)
    with pytest.raises(TypeError, match=r"rows is torch\.int32"):
        apply_rules(
            torch.zeros(2, 97, device=device), rules.columns, places.int(), places, rows.ids
        )
