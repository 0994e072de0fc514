"""What comes out of verified drafts is distributed as the model's tokens, whatever was drafted."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from simserve_kernels import rejection_reference as reference  # noqa: E402
from simserve_kernels import sampling_reference  # noqa: E402
from simserve_kernels.sampling_settings import SamplingColumns, SamplingParams  # noqa: E402

VOCAB = 11
SETTINGS: dict[str, dict[str, Any]] = {
    "all": {},
    "hot": {"temperature": 1.7},
    "top_k": {"top_k": 4},
    "top_p": {"top_p": 0.7, "temperature": 0.8},
    "min_p": {"min_p": 0.2},
    "greedy": {"temperature": 0.0},
}


def case(
    num_requests: int, k: int, settings: dict[str, Any], drafts: str, device: str = "cpu"
) -> dict[str, Any]:
    """Equal requests with k drafts each, drawn from q by a generator of their own."""
    generator = np.random.default_rng(3)
    target = np.tile(generator.normal(0, 1.5, (k + 1, VOCAB)), (num_requests, 1))
    other = generator.normal(0, 1.5, (k + 1, VOCAB))
    if drafts == "bad":  # the least likely token, always
        other = np.where(target[: k + 1] == target[: k + 1].min(-1, keepdims=True), 0.0, -1e9)
    q = np.exp(other - other.max(-1, keepdims=True))
    q /= q.sum(-1, keepdims=True)
    ids = np.full((num_requests, k + 1), -1)
    for place in range(k):
        ids[:, place] = generator.choice(VOCAB, num_requests, p=q[place])
    params = [SamplingParams(seed=7 * i + 1, **settings) for i in range(num_requests)]
    columns = SamplingColumns.of(
        [one for one in params for _ in range(k + 1)],
        [20 + j for _ in range(num_requests) for j in range(k + 1)],
        device,
    )
    probs = torch.tensor(np.tile(q, (num_requests, 1)), dtype=torch.float32, device=device)
    return {
        "logits": torch.tensor(target, dtype=torch.float32, device=device),
        "columns": columns,
        "draft_ids": torch.tensor(ids.ravel(), device=device),
        "query_start": torch.arange(0, len(target) + 1, k + 1, device=device),
        "draft_probs": None if drafts == "certain" else probs,
    }


def target_probs(made: dict[str, Any], rows: slice) -> Any:
    logits, columns = made["logits"], made["columns"]
    kept = sampling_reference.kept_tokens(logits, columns)
    weights = sampling_reference.kept_weights(logits, columns, kept)[rows]
    return (weights / weights.sum(-1, keepdim=True)).cpu().numpy()


def chi_square(tokens: Any, probs: Any) -> float:
    """Distance from the expected counts, in standard deviations of what chance makes."""
    expected = probs * len(tokens)
    found = np.bincount(tokens, minlength=VOCAB)
    assert not found[expected == 0].any(), "a token that the filters leave out"
    on = expected > 0
    degrees = on.sum() - 1
    if not degrees:
        return 0.0
    statistic = ((found - expected)[on] ** 2 / expected[on]).sum()
    return float((statistic - degrees) / np.sqrt(2 * degrees))


def check_distribution(made: dict[str, Any], verify: Any, k: int) -> None:
    """Tokens of each place are distributed as p, among those requests that come so far."""
    tokens, accepted = verify(**made)
    ids = tokens.cpu().numpy().reshape(-1, k + 1)
    accepted = accepted.cpu().numpy()
    for place in range(k + 1):
        there = accepted >= place
        if there.sum() > 200:
            probs = target_probs(made, slice(place, place + 1))[0]
            assert chi_square(ids[there, place], probs) < 5
    drafts = made["draft_ids"].cpu().numpy().reshape(-1, k + 1)
    for place in range(k):
        assert (ids[accepted > place, place] == drafts[accepted > place, place]).all()
        assert (accepted <= k).all()


@pytest.mark.parametrize(
    ("name", "drafts"),
    [
        *((name, "drawn") for name in SETTINGS),
        *((name, "bad") for name in ("all", "top_k", "greedy")),
        *((name, "certain") for name in ("hot", "top_p", "min_p")),
    ],
)
def test_tokens_are_distributed_as_the_model_has_them(name: str, drafts: str) -> None:
    """All of drafts, and all of settings twice; on a GPU in every combination."""
    check_distribution(case(4000, 2, SETTINGS[name], drafts), reference.verify_drafts, 2)


def test_drafts_are_accepted_as_often_as_they_can_be() -> None:
    """With probability Σ min(p, q), which drawing anew and comparing does not reach."""
    made = case(4000, 1, {}, "drawn")
    p, q = target_probs(made, slice(0, 1))[0], made["draft_probs"][0].numpy()
    _, accepted = reference.verify_drafts(**made)
    assert float(accepted.double().mean()) == pytest.approx(np.minimum(p, q).sum(), abs=0.03)


def test_drafts_from_the_model_itself_are_all_accepted() -> None:
    made = case(300, 2, {}, "drawn")
    made["draft_probs"] = torch.tensor(target_probs(made, slice(None)))
    generator = np.random.default_rng(0)
    for row in range(len(made["draft_ids"])):
        if row % 3 < 2:
            p = made["draft_probs"][row].numpy()
            made["draft_ids"][row] = int(generator.choice(VOCAB, p=p / p.sum()))
    assert (reference.verify_drafts(**made)[1] == 2).all()


def test_certain_drafts_change_no_token() -> None:
    made = case(200, 2, {"top_p": 0.9}, "certain")
    tokens, accepted = reference.verify_drafts(**made)
    assert torch.equal(tokens, sampling_reference.sample(made["logits"], made["columns"]))
    assert 0 < accepted.sum() < 400


def test_a_row_does_not_depend_on_the_others() -> None:
    made = case(30, 2, {"top_k": 6}, "drawn")
    tokens, accepted = reference.verify_drafts(**made)
    part = slice(6, 12)
    columns = made["columns"]
    alone = {
        "logits": made["logits"][part],
        "columns": columns._replace(
            **{n: one[part] for n, one in columns.tensors.items() if one is not None}
        ),
        "draft_ids": made["draft_ids"][part],
        "query_start": torch.tensor([0, 3, 6]),
        "draft_probs": made["draft_probs"][part],
    }
    got, count = reference.verify_drafts(**alone)
    assert torch.equal(got, tokens[part])
    assert torch.equal(count, accepted[2:4])


def ragged(device: str) -> dict[str, Any]:
    """Requests with no, one and three drafts; drawn, greedy and filtered ones."""
    made = case(12, 3, {}, "drawn", device)
    kept = [row for row in range(48) if row % 12 not in (2, 3, 4, 5, 6)]
    rows = torch.tensor(kept, device=device)
    params = [
        SamplingParams(seed=i, **list(SETTINGS.values())[i % len(SETTINGS)])
        for i in (row // 4 for row in kept)
    ]
    columns = SamplingColumns.of(params, kept, device)
    ids = made["draft_ids"][rows].clone()
    ids[::2] = made["logits"][rows].argmax(-1)[::2]
    lengths = [2, 1, 4] * 4
    ends = torch.tensor(np.cumsum(lengths), device=device)
    ids[ends - 1] = -1
    return {
        "logits": made["logits"][rows],
        "columns": columns,
        "draft_ids": ids,
        "query_start": torch.cat((ends.new_zeros(1), ends)),
        "draft_probs": made["draft_probs"][rows].contiguous(),
    }


@pytest.mark.parametrize("certain", [False, True])
def test_the_kernel_agrees_with_the_reference(certain: bool, device: str) -> None:
    from simserve_kernels.rejection import verify_drafts

    made = ragged(device)
    if certain:
        made["draft_probs"] = None
    tokens, accepted = verify_drafts(**made)
    expected, count = reference.verify_drafts(**made)
    assert torch.equal(accepted, count)
    assert torch.equal(tokens, expected)
    assert len(set(accepted.tolist())) > 1


@pytest.mark.gpu
@pytest.mark.parametrize("drafts", ["drawn", "bad", "certain"])
@pytest.mark.parametrize("name", SETTINGS)
def test_tokens_on_a_gpu_are_distributed_as_the_model_has_them(name: str, drafts: str) -> None:
    from simserve_kernels.rejection import verify_drafts

    check_distribution(case(20_000, 2, SETTINGS[name], drafts, "cuda"), verify_drafts, 2)
