"""Weighted statistics equal numpy's on the sample written out."""

from __future__ import annotations

import os
import subprocess
import sys

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from simserve.metrics.quantiles import Sample, mean, percentiles, std

WEIGHTED = st.lists(
    st.tuples(st.floats(-1e6, 1e6, allow_subnormal=False), st.integers(0, 7)), max_size=40
)
ASKED = st.lists(st.floats(0, 100), min_size=1, max_size=5)


@given(WEIGHTED, ASKED)
def test_percentiles_are_bit_equal_to_numpy_on_the_full_sample(
    weighted: list[tuple[float, int]], asked: list[float]
) -> None:
    values = np.array([value for value, _ in weighted], dtype=np.float64)
    weights = np.array([weight for _, weight in weighted], dtype=np.int64)
    full = np.repeat(values, weights)
    found = percentiles(Sample(values, weights), asked)
    if not len(full):
        assert found == [None] * len(asked)
        return
    assert found == np.percentile(full, asked).tolist()
    scale = max(1.0, float(np.abs(full).max()))
    assert mean(Sample(values, weights)) == pytest.approx(full.mean(), abs=1e-9 * scale)
    assert std(Sample(values, weights)) == pytest.approx(full.std(), abs=1e-7 * scale)


def test_an_empty_sample_has_no_statistics() -> None:
    empty = Sample.of(np.zeros(0))
    assert (mean(empty), std(empty), percentiles(empty, [50, 99])) == (None, None, [None, None])


def test_one_value_is_every_percentile() -> None:
    assert percentiles(Sample.of(np.array([7.0])), [0, 50, 99.9, 100]) == [7.0] * 4


MANY = """
import numpy as np
from simserve.metrics.quantiles import Sample, mean, std
rng = np.random.default_rng(0)
sample = Sample(rng.lognormal(size=50_000), rng.integers(0, 9, size=50_000))
print(mean(sample).hex(), std(sample).hex())
"""


def test_results_do_not_depend_on_the_number_of_threads() -> None:
    outputs = [
        subprocess.run(
            [sys.executable, "-c", MANY],
            env={**os.environ, "OPENBLAS_NUM_THREADS": threads},
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        for threads in ("1", "2")
    ]
    assert outputs[0] == outputs[1] != ""
