"""Several runs as one summary."""

from __future__ import annotations

from itertools import product

import numpy as np
import pytest

from simserve.metrics.repetitions import summarise_repetitions


def test_repetitions_become_means_with_intervals() -> None:
    runs = [
        {
            "seed": k,
            "p99_ttft_ms": 100.0 + k,
            "num_steps": 5,
            "label": "x",
            "note": str(k),
            "gone": g,
        }
        for k, g in enumerate([1.0, None, 2.0, 3.0])
    ]
    merged = summarise_repetitions(runs, seed=3)
    assert merged["p99_ttft_ms"] == 101.5
    low, high = merged["p99_ttft_ms_ci95_low"], merged["p99_ttft_ms_ci95_high"]
    assert isinstance(low, float)
    assert isinstance(high, float)
    means = np.mean(list(product([100.0, 101.0, 102.0, 103.0], repeat=4)), axis=1)
    assert [low, high] == pytest.approx(np.percentile(means, [2.5, 97.5]), abs=0.05)
    assert (merged["num_steps"], merged["label"], merged["num_repetitions"]) == (5, "x", 4)
    assert (merged["seed"], merged["note"], merged["gone"]) == (None, None, None)
    assert "num_steps_ci95_low" not in merged
    assert summarise_repetitions(runs, seed=3) == merged
    with pytest.raises(ValueError, match="no repetitions"):
        summarise_repetitions([])
