"""Arrival processes and length distributions: exact where they can be, else within their error."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
from numpy.typing import NDArray

from simserve.workload.arrivals import (
    ArrivalProcess,
    BurstArrivals,
    ConstantArrivals,
    GammaArrivals,
    PoissonArrivals,
    RampArrivals,
)
from simserve.workload.lengths import (
    ConstantLength,
    EmpiricalLength,
    Length,
    LognormalLength,
    UniformLength,
    ZipfLength,
)
from simserve.workload.streams import Stream, generator

NAN, INF = float("nan"), float("inf")


def times_s(process: ArrivalProcess, count: int) -> NDArray[np.float64]:
    return np.concatenate(list(process.times(generator(0, Stream.ARRIVALS), count)))


def test_constant_arrivals_do_not_drift() -> None:
    arrivals = times_s(ConstantArrivals(rate=200), 10_000)
    assert arrivals[-1] == pytest.approx(49.995, abs=1e-9)
    assert times_s(ConstantArrivals(rate=10), 1001)[-1] == 100.0


@pytest.mark.parametrize(
    "process",
    [
        PoissonArrivals(rate=5),
        GammaArrivals(rate=5, burstiness=0.25),
        GammaArrivals(rate=5, burstiness=4),
        RampArrivals(start_rps=1, end_rps=9),
        RampArrivals(start_rps=1, end_rps=9, strategy="exponential", burstiness=0.5),
        BurstArrivals(size=7, gap_s=0.5),
        ConstantArrivals(rate=5),
    ],
)
def test_arrivals_start_at_zero_and_never_go_backwards(process: ArrivalProcess) -> None:
    arrivals = times_s(process, 70_000)  # more than a chunk
    assert arrivals.shape == (70_000,)
    assert arrivals[0] == 0
    assert (np.diff(arrivals) >= 0).all()


@pytest.mark.parametrize("burstiness", [0.25, 1.0, 4.0])
def test_gamma_gaps_have_the_rate_and_variation_asked_for(burstiness: float) -> None:
    gaps = np.diff(times_s(GammaArrivals(rate=5, burstiness=burstiness), 100_001))
    cv = burstiness**-0.5
    assert gaps.mean() == pytest.approx(0.2, rel=4 * cv / 100_000**0.5)
    assert gaps.std() / gaps.mean() == pytest.approx(cv, rel=0.03)


def test_poisson_gaps_are_exponential() -> None:
    gaps = np.diff(times_s(PoissonArrivals(rate=5), 100_001))
    assert gaps.mean() == pytest.approx(0.2, rel=0.013)
    assert gaps.std() / gaps.mean() == pytest.approx(1, rel=0.02)
    assert (gaps > 0.2).mean() == pytest.approx(np.exp(-1), abs=0.007)


@pytest.mark.parametrize(
    "process",
    [ConstantArrivals(rate=INF), PoissonArrivals(rate=INF), GammaArrivals(rate=INF, burstiness=2)],
)
def test_an_infinite_rate_sends_all_at_once(process: ArrivalProcess) -> None:
    assert (times_s(process, 10) == 0).all()


def test_bursts() -> None:
    assert times_s(BurstArrivals(size=3, gap_s=0.5), 8).tolist() == [0, 0, 0, 0.5, 0.5, 0.5, 1, 1]


def test_ramps_pass_through_their_rates() -> None:
    linear = RampArrivals(start_rps=1, end_rps=9)
    assert linear.rates(0, 5, 5).tolist() == [1, 3, 5, 7, 9]
    exponential = RampArrivals(start_rps=1, end_rps=16, strategy="exponential")
    assert exponential.rates(0, 5, 5) == pytest.approx([1, 2, 4, 8, 16])
    assert linear.rates(0, 1, 1).tolist() == [1]
    # Expected span: the sum of 1 / rate over all requests but the first.
    arrivals = times_s(RampArrivals(start_rps=2, end_rps=20), 20_000)
    expected = (1 / RampArrivals(start_rps=2, end_rps=20).rates(1, 20_000, 20_000)).sum()
    assert arrivals[-1] == pytest.approx(expected, rel=0.04)


def draw(length: Length, count: int = 100_000) -> NDArray[np.int64]:
    drawn = length.draw(generator(0, Stream.PROMPT_LEN), count)
    assert drawn.dtype == np.int64
    return drawn


def test_constant_and_uniform_lengths() -> None:
    assert draw(ConstantLength(value=7), 3).tolist() == [7, 7, 7]
    values, counts = np.unique(draw(UniformLength(min=3, max=7)), return_counts=True)
    assert values.tolist() == [3, 4, 5, 6, 7]
    assert counts == pytest.approx(20_000, rel=0.03)


def test_lognormal_mean_is_that_of_the_distribution() -> None:
    drawn = draw(LognormalLength(mean=1005, sigma=0.8))
    assert drawn.mean() == pytest.approx(1005, abs=4 * drawn.std() / 100_000**0.5)
    assert np.log(drawn).std() == pytest.approx(0.8, rel=0.01)
    clipped = draw(LognormalLength(mean=1005, sigma=0.8, min=16, max=2000))
    assert clipped.max() == 2000
    assert (clipped[drawn <= 2000] == np.maximum(drawn[drawn <= 2000], 16)).all()
    assert draw(LognormalLength(mean=0.01, sigma=1)).min() == 1
    assert (draw(LognormalLength(mean=100, sigma=0), 5) == 100).all()


def test_zipf_lengths_follow_the_power_law() -> None:
    values, counts = np.unique(draw(ZipfLength(alpha=1, min=2, max=5)), return_counts=True)
    weights = 1 / np.array([2, 3, 4, 5])
    assert values.tolist() == [2, 3, 4, 5]
    assert counts / 100_000 == pytest.approx(weights / weights.sum(), abs=0.006)


def test_empirical_lengths_come_from_the_values() -> None:
    values, counts = np.unique(draw(EmpiricalLength(values=(5, 5, 9))), return_counts=True)
    assert values.tolist() == [5, 9]
    assert counts[0] / 100_000 == pytest.approx(2 / 3, abs=0.006)


@pytest.mark.parametrize(
    ("make", "field"),
    [
        (lambda: ConstantArrivals(rate=0), "rate"),
        (lambda: PoissonArrivals(rate=NAN), "rate"),
        (lambda: GammaArrivals(rate=1, burstiness=0), "burstiness"),
        (lambda: BurstArrivals(size=0, gap_s=1), "size"),
        (lambda: BurstArrivals(size=1, gap_s=NAN), "gap_s"),
        (lambda: RampArrivals(start_rps=0, end_rps=1), "start_rps"),
        (lambda: RampArrivals(start_rps=1, end_rps=INF), "end_rps"),
        (lambda: RampArrivals(start_rps=1, end_rps=2, strategy="cubic"), "strategy"),  # type: ignore[arg-type]
        (lambda: ConstantLength(value=0), "value"),
        (lambda: ConstantLength(value=10**30), "value must be at most 2147483647"),
        (lambda: UniformLength(min=0, max=1), "min"),
        (lambda: UniformLength(min=1, max=2**31), "max must be at most 2147483647"),
        (lambda: UniformLength(min=2, max=1), "max"),
        (lambda: LognormalLength(mean=0, sigma=1), "mean"),
        (lambda: LognormalLength(mean=NAN, sigma=1), "mean"),
        (lambda: LognormalLength(mean=1, sigma=-1), "sigma"),
        (lambda: LognormalLength(mean=1, sigma=1, min=5, max=4), "max"),
        (lambda: ZipfLength(alpha=-1, min=1, max=2), "alpha"),
        (lambda: ZipfLength(alpha=1, min=1, max=10**9), "max"),
        (lambda: EmpiricalLength(values=()), "values"),
    ],
)
def test_bad_values_are_named(make: Callable[[], object], field: str) -> None:
    with pytest.raises(ValueError, match=field):
        make()
