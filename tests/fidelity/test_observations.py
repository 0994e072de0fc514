from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from simserve.cost.features import extract
from simserve.cost.profile_file import Graphs
from simserve.cost.step_model import Path as KernelPath
from simserve.cost.step_work import SizeFactors, step_work
from simserve.fidelity.fit.profile import VLLM_GRAPHS
from simserve.fidelity.logs.log_plans import log_plans
from simserve.fidelity.logs.observations import observe, split_by_path
from simserve.fidelity.logs.vllm_log import StepLog
from simserve.types import StepRun


def test_columns_count_what_plans_count(warm: StepLog) -> None:
    """The fit and a simulation see the same work in the same steps."""
    steps, sizes = observe(warm), VLLM_GRAPHS.sizes
    factors = SizeFactors(prefills={2: 1.1, 64: 1.2, 512: 0.9}, decodes={2: 1.5, 64: 0.8})
    groups = split_by_path(steps, VLLM_GRAPHS, factors)
    assert sorted(np.concatenate([group.rows for group in groups])) == list(range(len(steps)))
    plans = list(log_plans(warm))
    for path, rows, work in groups:
        for place, row in enumerate(rows.tolist()):
            run = StepRun(plans[row])
            features = extract(run)
            for name, value in step_work(run, features, sizes, None, factors)._asdict().items():
                column = getattr(work, name)
                assert value == (column if column is None else column[place]), name
            tokens, alone = features.num_tokens, features.num_prefills == 0
            expected = KernelPath.PIECEWISE if tokens <= 512 else KernelPath.EAGER
            assert path == (KernelPath.FULL if alone and tokens <= 256 else expected)
    met = {one for group in groups for one in group.work.size_factor.tolist()}
    assert met == {1.0, 0.9, 1.2, 1.5}


def test_gaps_between_steps_and_who_came_in_them(tiny: StepLog) -> None:
    steps = observe(tiny)
    assert steps.gap_s[:2] == pytest.approx([1e-3, 1e-4])
    assert np.isnan(steps.gap_s[2])
    assert steps.gap_requests.tolist() == [0, 1, 0]
    assert steps.gap_tokens.tolist() == [0, 20, 0]
    assert steps.num_new.tolist() == [1, 0, 1]
    assert steps.num_table_tokens.tolist() == [32, 0, 20]


def test_a_gap_in_which_the_loop_waited_for_a_request_is_not_its_time(tiny: StepLog) -> None:
    late = [tiny.requests[0], replace(tiny.requests[1], arrival_s=0.03104)]
    assert np.isnan(observe(replace(tiny, requests=tuple(late))).gap_s[1])


def test_a_resumed_request_brings_a_new_table_again(tiny: StepLog) -> None:
    preempted = replace(tiny.steps, preempted={0: (0,)})
    assert observe(replace(tiny, steps=preempted)).num_new.tolist() == [1, 1, 1]


def test_a_step_without_tokens_counts_nothing(tiny: StepLog) -> None:
    offsets = tiny.steps.row_offsets
    for place in range(3):
        emptied = np.insert(offsets, place, offsets[place])[:4]
        steps = observe(replace(tiny, steps=replace(tiny.steps, row_offsets=emptied)))
        assert (
            steps.num_tokens[place] == steps.decode_kv_tokens[place] == steps.num_reqs[place] == 0
        )


def test_graphs_must_increase() -> None:
    with pytest.raises(ValueError, match="increase"):
        Graphs(sizes=[8, 4], full_up_to=8)
