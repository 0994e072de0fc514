from __future__ import annotations

from collections.abc import Callable

import pytest

from simserve.cost.formula import FormulaCost
from simserve.errors import ConfigError
from simserve.types import StepRun
from tests.cost.columns import column


def test_the_sum_is_taken_from_left_to_right(step: Callable[..., StepRun]) -> None:
    a, b, c = 0.1, 0.3e-5, 0.7e-9
    run = step((100, 1), (7, 30))
    s1, s2 = 31, 101 + 30 * 37
    assert column(FormulaCost(a, b, c).price(run).durations_s) == [(a + b * s1) + c * s2]


def test_constant_steps(step: Callable[..., StepRun]) -> None:
    price = FormulaCost(1.0).price(step((100, 1), count=4))
    assert column(price.durations_s, 4) == [1.0] * 4
    assert column(price.parts["gpu_s"], 4) == [1.0] * 4


@pytest.mark.parametrize(
    "coefficients", [(0.0,), (-1e-3,), (float("nan"),), (1.0, float("inf")), (1.0, 0.0, -1e-9)]
)
def test_coefficients_that_make_no_sense_are_refused(coefficients: tuple[float, ...]) -> None:
    with pytest.raises(ConfigError, match=r"cost\.|all coefficients are 0"):
        FormulaCost(*coefficients)
