"""Sampling kernels: what is left to draw from, and what is drawn, equal the float64 reference."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("triton")

from simserve_kernels import sampling_reference as reference  # noqa: E402
from simserve_kernels.sampling import SampledRows, SamplingPlan, plan_sampling, sample  # noqa: E402
from simserve_kernels.sampling_settings import SamplingColumns, SamplingParams  # noqa: E402

GPU = torch.cuda.is_available()
DEVICE = "cuda" if GPU else "cpu"
SMALL = SamplingPlan(chunk=32, tile=128, capacity=64, scan=64, survey_warps=1)
OVERFULL = SMALL._replace(capacity=2)
CLOSE = 1e-6
"""How near to a limit, relative to the sum, float32 and float64 may fall on different sides."""


@pytest.fixture(autouse=True)
def fresh_inputs(seed: int, device: str) -> None:
    torch.manual_seed(seed)


def params(count: int, **settings: Any) -> list[SamplingParams]:
    return [SamplingParams(seed=1000 + i, **settings) for i in range(count)]


def columns_of(rows: Sequence[SamplingParams], steps: Sequence[int] | None = None) -> Any:
    return SamplingColumns.of(rows, steps or range(len(rows)), DEVICE)


def kept_by(logits: Any, out: SampledRows) -> Any:
    x = logits.float().nan_to_num(nan=-torch.inf, posinf=1e30, neginf=-torch.inf)
    token = torch.arange(x.shape[1], device=x.device)
    cut, last = out.cuts[:, None], out.last_ties[:, None]
    return (x > -torch.inf) & ((x > cut) | ((x == cut) & (token <= last)))


def scaled(columns: SamplingColumns, factor: float) -> SamplingColumns:
    """With looser or stricter shares, for sums that are not those of float64 to the last bit."""
    top_p, min_p = columns.top_p, columns.min_p
    if top_p is not None:
        top_p = (top_p.double() * factor).where(top_p < 1, 1.0)
    return columns._replace(
        top_p=top_p, min_p=None if min_p is None else (min_p.double() / factor).clamp(max=1)
    )


def check(logits: Any, rows: Sequence[SamplingParams], plan: SamplingPlan = SMALL) -> SampledRows:
    """Sample, and compare with the reference what is kept and what is drawn of it."""
    columns = columns_of(rows)
    out = sample(logits, columns, plan=plan)
    greedy = columns.temperature < 1e-5
    expected = reference.argmax(logits)
    assert torch.equal(out.tokens[greedy], expected[greedy])
    if columns.path == "greedy":
        return out
    kept = kept_by(logits, out)
    fewest = reference.kept_tokens(logits, scaled(columns, 1 - CLOSE))
    most = reference.kept_tokens(logits, scaled(columns, 1 + CLOSE))
    drawn = ~greedy & kept.any(1)
    assert not (fewest & ~kept)[drawn].any()
    assert not (kept & ~most)[drawn].any()
    weights = reference.kept_weights(logits, columns, kept)
    running = weights.cumsum(-1)
    u = reference.uniforms(columns.seeds.tolist(), columns.steps.tolist())
    place = torch.tensor(u, dtype=torch.float64, device=logits.device)[:, None] * running[:, -1:]
    slack = CLOSE * running[:, -1:]
    token = out.tokens[:, None]
    after = running.gather(1, token)
    before = after - weights.gather(1, token)
    assert (before <= place + slack)[drawn].all()
    assert (after > place - slack)[drawn].all()
    assert kept.gather(1, token)[drawn].all()
    return out


MIXTURE = [
    *params(1, temperature=0),
    *params(1, temperature=0.6, top_p=0.9),
    *params(1, temperature=1.5, top_k=5, min_p=0.05),
    *params(1, top_k=20, top_p=0.7),
    *params(1, min_p=0.2),
    *params(1),
]


@pytest.mark.parametrize("vocab_size", [1, 37, 300])
@pytest.mark.parametrize("plan", [SMALL, OVERFULL], ids=["collected", "whole row"])
def test_mixed_settings_in_one_batch(vocab_size: int, plan: SamplingPlan) -> None:
    logits = torch.randn(len(MIXTURE), vocab_size, device=DEVICE) * 2.5
    check(logits, MIXTURE, plan)


@pytest.mark.parametrize(
    "settings",
    [
        {"top_k": 1},
        {"top_k": 99},
        {"top_k": 100},
        {"top_p": 1e-9},
        {"top_p": 0.999},
        {"min_p": 1.0},
        {"min_p": 1e-30},
        {"temperature": 1e-3, "top_p": 0.5},
        {"temperature": 50.0, "top_k": 70, "top_p": 0.9, "min_p": 0.9},
    ],
    ids=str,
)
def test_extreme_settings(settings: dict[str, Any]) -> None:
    logits = torch.randn(2, 100, device=DEVICE) * 2.5
    out = check(logits, params(2, **settings))
    if settings in ({"top_k": 1}, {"top_p": 1e-9}, {"min_p": 1.0}):
        assert torch.equal(out.tokens, logits.argmax(-1))


@pytest.mark.parametrize(
    ("plan", "dtype"),
    [(SMALL, torch.float32), (OVERFULL, torch.float16), (SMALL, torch.bfloat16)],
    ids=str,
)
def test_many_equal_logits(plan: SamplingPlan, dtype: torch.dtype) -> None:
    """Few different numbers: a cut falls among equal ones, of which the first stay."""
    wide = torch.randint(-2, 3, (4, 400), device=DEVICE).to(dtype)
    logits = wide[:, 37:337]
    rows = [
        *params(1, top_p=0.4),
        *params(1, top_p=0.9),
        *params(1, top_k=9),
        *params(1, top_p=0.01),
    ]
    out = check(logits, rows, plan)
    kept = kept_by(logits, out).cpu()
    for row, cut in zip((0, 1, 3), out.cuts.cpu()[[0, 1, 3]], strict=True):
        ties = (logits[row].float().cpu() == cut).nonzero()[:, 0]
        stays = kept[row, ties]
        assert stays[: stays.sum()].all()


def test_what_is_no_number_is_never_drawn() -> None:
    logits = torch.randn(5, 70, device=DEVICE)
    logits[0, ::2] = -torch.inf
    logits[1, 5:60] = torch.nan
    logits[2, :69] = -torch.inf
    logits[3] = -torch.inf
    logits[4, [3, 7]] = torch.inf
    rows = [*params(1, top_p=0.9), *params(1, top_k=60), *params(2, top_p=0.5), *params(1)]
    out = check(logits, rows)
    assert out.tokens[2:4].tolist() == [69, 0]
    assert out.tokens[4].item() in (3, 7)
    greedy = check(logits, params(5, temperature=0))
    assert greedy.tokens[2:].tolist() == [69, 0, 3]
    assert greedy.tokens.tolist() == reference.argmax(logits).tolist()


def test_a_draw_does_not_depend_on_the_batch_or_the_plan() -> None:
    logits = torch.randn(6, 100, device=DEVICE) * 2.5
    together = check(logits, MIXTURE)
    order = [4, 1, 3]
    columns = columns_of([MIXTURE[i] for i in order], order)
    plans = [
        SamplingPlan(chunk=128, tile=256, capacity=16, scan=32, pivots=8),
        OVERFULL._replace(tile=512),
    ]
    for plan in plans:
        apart = sample(logits[order], columns, plan=plan)
        for one, other in zip(apart, together, strict=True):
            assert torch.equal(one, other[order])


def test_all_of_a_tile_is_collected() -> None:
    """A thread of the gathering then has 32 logits, a bit each of a number."""
    logits = (torch.randn(4, 2500, device=DEVICE) / 64).sort(descending=True).values
    rows = [*params(1, top_p=0.5), *params(1, top_k=1200), *params(1, top_p=0.9), *params(1)]
    plan = plan_sampling(4, 2500)
    check(logits, rows, plan._replace(capacity=8192))
    check(logits.bfloat16(), rows, plan)


def test_seeds_and_steps_have_numbers_of_their_own() -> None:
    logits = torch.zeros(6, 64, device=DEVICE)
    seeds = [7, 7, 8, -1, 2**40 + 7, 7]
    steps = [0, 1, 0, 0, 0, 2**33]
    rows = [SamplingParams(seed=seed) for seed in seeds]
    columns = SamplingColumns.of(rows, steps, DEVICE)
    u = reference.uniforms(seeds, steps)
    assert len(set(u)) == 6
    expected = [int(64 * one) for one in u]
    assert sample(logits, columns, plan=SMALL).tokens.tolist() == expected
    assert reference.sample(logits, columns).tolist() == expected


def test_random_numbers_are_philox() -> None:
    """The published test vector of a key and counter of zeros."""
    assert reference.uniforms([0], [0]) == [0x6627E8D5E169C58D / 2**64]


@pytest.mark.parametrize(
    "settings", [{}, {"top_k": 5}, {"top_p": 0.8}, {"min_p": 0.1}, {"temperature": 2.0}], ids=str
)
def test_reference_draws_each_token_as_often_as_it_should(settings: dict[str, Any]) -> None:
    chi_square(settings, 20_000, lambda logits, columns: reference.sample(logits, columns))


def chi_square(settings: dict[str, Any], draws: int, draw: Any) -> None:
    """Seeds and logits are fixed: the figure is one number, below the 99.9 % point of its law."""
    logits = torch.linspace(-2, 2, 12).roll(5).to(DEVICE).expand(draws, 12).contiguous()
    columns = SamplingColumns.of([SamplingParams(seed=5, **settings)] * draws, range(draws), DEVICE)
    kept = reference.kept_tokens(logits[:1], columns._replace(**first(columns)))
    weights = reference.kept_weights(logits[:1], columns._replace(**first(columns)), kept)[0].cpu()
    expected = weights / weights.sum() * draws
    counts = draw(logits, columns).cpu().bincount(minlength=12)
    some = expected > 0
    assert counts[~some].sum() == 0
    figure = ((counts - expected)[some].square() / expected[some]).sum()
    limits = {11: 31.3, 4: 18.5}
    assert figure < limits.get(int(some.sum()) - 1, 31.3)


def first(columns: SamplingColumns) -> dict[str, Any]:
    return {name: None if one is None else one[:1] for name, one in columns.tensors.items()}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"logits": torch.zeros(2, 8, dtype=torch.int32)}, "logits is torch.int32"),
        ({"logits": torch.zeros(8)}, "logits has shape"),
        ({"logits": torch.zeros(8, 2).T}, "last dimension of logits has stride"),
        ({"logits": torch.zeros(2, 0)}, "logits has 0 columns"),
        ({"temperature": torch.ones(3)}, "temperature has shape"),
        ({"temperature": torch.ones(2).half()}, "temperature is torch.float16"),
        ({"seeds": torch.zeros(2).int()}, "seeds is torch.int32"),
        ({"top_k": torch.zeros(2).long()}, "top_k is torch.int64"),
        ({"top_p": torch.ones(4)[::2]}, "top_p is strided"),
        ({"min_p": torch.ones(2, device="meta")}, "min_p is on meta"),
    ],
)
def test_what_does_not_fit_is_refused(change: dict[str, Any], message: str) -> None:
    moved = {name: one if one.is_meta else one.to(DEVICE) for name, one in change.items()}
    logits = moved.pop("logits", torch.zeros(2, 8, device=DEVICE))
    with pytest.raises((TypeError, ValueError), match=message):
        sample(logits, columns_of(params(2))._replace(**moved))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"temperature": -1.0}, "temperature is -1.0"),
        ({"temperature": float("nan")}, "temperature is nan"),
        ({"top_k": -2}, "top_k is -2"),
        ({"top_p": 0.0}, "top_p is 0.0"),
        ({"min_p": 1.5}, "min_p is 1.5"),
        ({"seed": 2**63}, "seed is 9223372036854775808"),
    ],
)
def test_settings_that_mean_nothing_are_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        SamplingParams(**{"seed": 0, **settings})


def test_small_temperatures_are_raised_and_none_divides_by_zero() -> None:
    rows = [SamplingParams(seed=0, temperature=t) for t in (0.0, 1e-9, 0.005, 0.5)]
    columns = columns_of(rows)
    assert columns.path == "mixed"
    assert columns.temperature.tolist() == pytest.approx([0, 0.01, 0.01, 0.5])
    logits = torch.tensor([[1e30, 1.0, 0.0]] * 4, device=DEVICE)
    zero = columns._replace(temperature=torch.zeros(4, device=DEVICE))
    for one in (columns, zero, zero._replace(path="random")):
        assert sample(logits, one, plan=SMALL).tokens.tolist() == [0] * 4


def test_no_rows_give_no_tokens() -> None:
    none = torch.zeros(0, 8, device=DEVICE)
    assert sample(none, columns_of([])).tokens.shape == (0,)


@pytest.mark.parametrize(
    ("num_rows", "vocab_size"), [(1, 128256), (256, 128256), (3, 10**6), (1, 1)]
)
def test_plans_cover_the_vocabulary(num_rows: int, vocab_size: int) -> None:
    plan = plan_sampling(num_rows, vocab_size)
    assert 128 <= plan.tile <= 1024
    for size in (plan.chunk, plan.tile):
        assert size & (size - 1) == 0
    assert -(-vocab_size // plan.chunk) <= 256


REAL = {
    "greedy": {"temperature": 0},
    "plain": {},
    "top_k": {"top_k": 50},
    "top_k many": {"top_k": 20_000},
    "top_p": {"top_p": 0.9},
    "top_p most": {"top_p": 0.999},
    "top_p hot": {"top_p": 0.9, "temperature": 5.0},
    "min_p": {"min_p": 0.05},
    "all": {"top_k": 500, "top_p": 0.95, "min_p": 0.001, "temperature": 0.8},
}


def real_logits(kind: str, num_rows: int) -> Any:
    logits = torch.randn(num_rows, 128256, device="cuda") * 2.5
    if kind == "peaked":  # a few tokens stand out, as in a model that is sure
        logits[:, ::3000] += 12 * torch.rand_like(logits[:, ::3000])
    elif kind == "flat":
        logits = torch.ones_like(logits)
    elif kind == "masked":
        logits[:, 1000:] = -torch.inf
    return logits.bfloat16() if kind == "bfloat16" else logits


@pytest.mark.gpu
@pytest.mark.parametrize("name", REAL)
@pytest.mark.parametrize("num_rows", [1, 64, 256])
def test_a_real_vocabulary(num_rows: int, name: str) -> None:
    logits = real_logits("normal", num_rows)
    plan = plan_sampling(num_rows, logits.shape[1])
    out = check(logits, params(num_rows, **REAL[name]), plan)
    again = sample(logits[:1], columns_of(params(1, **REAL[name])))
    assert again.tokens.tolist() == out.tokens[:1].tolist()


@pytest.mark.gpu
@pytest.mark.parametrize("name", REAL)
@pytest.mark.parametrize("kind", ["peaked", "flat", "masked", "bfloat16"])
def test_unusual_rows_of_a_real_vocabulary(kind: str, name: str) -> None:
    logits = real_logits(kind, 4)
    check(logits, params(4, **REAL[name]), plan_sampling(4, logits.shape[1]))


@pytest.mark.gpu
@pytest.mark.parametrize(
    "settings", [{}, {"top_k": 5}, {"top_p": 0.8}, {"min_p": 0.1}, {"temperature": 2.0}], ids=str
)
def test_kernels_draw_each_token_as_often_as_they_should(settings: dict[str, Any]) -> None:
    chi_square(settings, 100_000, lambda logits, columns: sample(logits, columns).tokens)


@pytest.mark.gpu
def test_a_captured_graph_draws_for_new_logits_and_steps() -> None:
    rows = MIXTURE * 4
    logits = torch.randn(len(rows), 5000, device="cuda") * 2.5
    columns = columns_of(rows)
    sample(logits, columns)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = sample(logits, columns)
    for _ in range(3):
        logits.copy_(torch.randn_like(logits) * 2.5)
        columns.steps.add_(1)
        graph.replay()
        expected = sample(logits, columns)
        for one, other in zip(out[:1], expected[:1], strict=True):
            assert torch.equal(one, other)


def test_a_top_k_that_no_int32_holds_cuts_nothing() -> None:
    assert columns_of(params(1, top_k=2**63)).top_k.tolist() == [2**31 - 1]
