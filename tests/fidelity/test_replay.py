"""With the measured times fed back, every plan is the real engine's, and so is every latency."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from typer.testing import CliRunner

from simserve.cli.main import app
from simserve.errors import SimserveError, TraceError
from simserve.executor.simulated import SimulatedExecutor
from simserve.fidelity.conform.check import check_case
from simserve.fidelity.logs.log_plans import log_plans
from simserve.fidelity.logs.measured import METRICS, STATISTICS, measured_log, measured_run
from simserve.fidelity.logs.vllm_log import StepLog, parse_vllm_log, read_vllm_log
from simserve.fidelity.replay.endings import open_ends
from simserve.fidelity.replay.log_run import check_replay, replay_log, simulate_log
from simserve.fidelity.replay.plans import PlanCheck
from simserve.fidelity.replay.token_times import check_token_times
from simserve.types import StepOutput, StepPlan
from tests.fidelity.conftest import LOGS, NAMES, write
from tests.fidelity.made_log import HostCost, made_log, poisson

LARGEST_ERROR = 0.002


class Plans:
    """An observer that keeps what was decided."""

    def __init__(self) -> None:
        self.rows: list[Any] = []

    def scheduled(self, plan: StepPlan, now_s: float) -> None:
        self.rows.append(columns(plan))

    def updated(self, plan: StepPlan, output: StepOutput, now_s: float) -> None: ...

    def reset(self, succeeded: bool, now_s: float) -> None: ...


def columns(plan: StepPlan) -> Any:
    return (
        list(plan.request_ids),
        list(plan.starts),
        list(plan.num_tokens),
        list(plan.samples),
        dict(plan.kinds),
        list(plan.preempted_ids),
    )


def check_log(path: Path) -> None:
    log = read_vllm_log(path)
    plans = PlanCheck(log)
    data = replay_log(log, plans)
    assert plans.finish() is None, f"{log.name}: {plans.difference}"
    real, replayed = measured_log(log), measured_run(data)
    for metric in METRICS:
        for statistic in STATISTICS:
            want, have = real.get(metric, statistic), replayed.get(metric, statistic)
            assert have == pytest.approx(want, rel=LARGEST_ERROR), (log.name, metric, statistic)
    assert replayed.output_throughput == pytest.approx(real.output_throughput, rel=1e-4)
    for count in ("num_steps", "num_preemptions", "prefix_hit_tokens"):
        assert getattr(replayed, count) == getattr(real, count), (log.name, count)


@pytest.mark.parametrize("name", NAMES)
def test_recorded_logs_are_met(name: str) -> None:
    check_log(LOGS / f"{name}.json.gz")


def test_all_logs_are_met(all_logs: list[Path]) -> None:
    for path in all_logs:
        check_log(path)


def test_the_clock_is_the_record_s(warm: StepLog) -> None:
    steps = replay_log(warm).steps
    assert np.abs(steps.start_s - warm.steps.start_s).max() < 1e-9
    assert (steps.end_s == warm.steps.end_s).all()


def test_rebuilt_plans_are_those_of_the_scheduler(warm: StepLog) -> None:
    plans = Plans()
    replay_log(warm, plans)
    assert plans.rows == [columns(plan) for plan in log_plans(warm)]


def test_the_log_written_by_hand_is_met(tiny: StepLog) -> None:
    plans = PlanCheck(tiny)
    data = replay_log(tiny, plans)
    assert plans.finish() is None
    assert measured_run(data).prefix_hit_tokens == 16
    assert data.requests.arrival_s.tolist() == [0.001, 0.015]
    assert data.requests.queued_s.tolist() == pytest.approx([0.002, 0.0311])


@pytest.mark.parametrize(
    ("step", "rows", "says"),
    [
        (1, [[0, 7, 32]], "step 1, row 0: expected request 0 with 7 tokens after 32, got "
                          "request 0 with 8 tokens after 32"),
        (2, [[1, 4, 16], [0, 1, 40]], "step 2, row 0: expected request 1"),
        (2, [[0, 1, 40]], "step 2, requests: expected 1, got 2"),
    ],
)  # fmt: skip
def test_any_other_plan_is_noticed(
    tmp_path: Path, document: dict[str, Any], step: int, rows: Any, says: str
) -> None:
    document["steps"][step][4] = rows
    outcome = check_case(write(tmp_path / "x.json.gz", document))
    assert str(outcome.difference).startswith(says)


def test_preemptions_and_missing_steps_are_noticed(document: dict[str, Any]) -> None:
    document["steps"][2][5] = [1]
    log = parse_vllm_log(Path("x"), document)
    plans = PlanCheck(log)
    replay_log(log, plans)
    assert str(plans.finish()) == "step 2, preempted: expected [1], got []"
    document["steps"][2][5] = []
    document["steps"].append([50000, 1000, 1, 1, [[0, 1, 41]], []])
    plans = PlanCheck(parse_vllm_log(Path("x"), document))
    replay_log(parse_vllm_log(Path("x"), document), plans)
    assert str(plans.finish()) == "step 3, requests: expected 1, got 0"


def test_a_record_that_is_too_short_is_an_error(document: dict[str, Any]) -> None:
    del document["steps"][2]
    with pytest.raises(SimserveError, match="the record ends after 2 steps, but requests are left"):
        replay_log(parse_vllm_log(Path("x"), document))


def test_conform_tells_where_a_record_became_too_short(
    tmp_path: Path, document: dict[str, Any]
) -> None:
    # A budget of 16 takes more steps than were recorded, and differs in the first.
    document["config"]["budget"] = 16
    outcome = CliRunner().invoke(app, ["conform", str(write(tmp_path / "x.json.gz", document))])
    assert (outcome.exit_code, outcome.output) == (
        1,
        "tiny: DIFFERS at step 0, row 0: expected request 0 with 32 tokens after 0, "
        "got request 0 with 16 tokens after 0\n0 of 1 cases equal\n",
    )
    document["config"]["budget"] = 32
    del document["steps"][2]
    difference = check_case(write(tmp_path / "x.json.gz", document)).difference
    assert str(difference) == "step 2, requests: expected 0, got 1"


def test_what_is_beyond_a_record_is_no_difference(tmp_path: Path, document: dict[str, Any]) -> None:
    # Request 1 waits where the record ends; then the same log goes on without it.
    document["config"]["max_num_seqs"] = 1
    document["requests"][1]["times"] = []
    del document["steps"][2][4][1]
    path = tmp_path / "x.json.gz"
    assert check_case(write(path, document)).difference is None
    document["requests"].append({**document["requests"][1], "added": 50000, "times": [61000]})
    document["steps"].append([51000, 10000, 1, 1, [[2, 20, 0]], []])
    with pytest.raises(
        TraceError, match=r"requests\[1\]: times: no token came out, .* 3 steps are"
    ):
        check_case(write(path, document))
    document["steps"][1][4] = [[0, 7, 32]]  # before it came: a difference after all
    assert "step 1, row 0" in str(check_case(write(path, document)).difference)


def test_a_request_that_ended_while_it_was_preempted_is_known() -> None:
    log = made_log([(0.1 * i, 300, 200) for i in range(8)], HostCost(), num_free_blocks=95)
    assert log.steps.preempted
    assert open_ends(log) == {}
    step, victims = max(log.steps.preempted.items())
    later = slice(0, int(log.steps.row_offsets[step + 1]))
    rows = {
        name: getattr(log.steps, name)[later] for name in ("request", "num_tokens", "num_computed")
    }
    cut = replace(log, steps=replace(log.steps, **rows))
    assert open_ends(cut)[victims[0]] == "it was preempted after its last token"


@pytest.mark.parametrize("added_us", [31100, 31102])
def test_a_request_that_was_rounded_behind_its_step_is_in_it(
    document: dict[str, Any], added_us: int
) -> None:
    document["requests"][1]["added"] = added_us
    assert check_replay(parse_vllm_log(Path("x"), document))[1] is None


@pytest.mark.parametrize(
    ("place", "times", "says"),
    [
        (0, [20997, 41100], "token 0 came out at 20997 us, not in the step that computed it, which "
                            "ran from 21000 to 31000 us"),
        (0, [31000, 41103], "token 1 came out at 41103 us"),
        (1, [10**12], "token 0 came out at 1000000000000 us"),
    ],
)  # fmt: skip
def test_a_token_that_came_out_in_another_step_is_an_error(
    document: dict[str, Any], place: int, times: list[int], says: str
) -> None:
    check_token_times(parse_vllm_log(Path("x"), document))
    document["requests"][place]["times"] = times
    with pytest.raises(TraceError, match=rf"requests\[{place}\]: times: its {says}"):
        check_token_times(parse_vllm_log(Path("x"), document))


def test_tokens_come_out_in_their_steps_after_preemptions_too() -> None:
    log = made_log([(0.1 * i, 300, 200) for i in range(8)], HostCost(), num_free_blocks=95)
    assert log.steps.preempted
    check_token_times(log)
    late = [times.copy() for times in log.token_times_s]
    late[5][150] += 0.001
    with pytest.raises(TraceError, match=r"requests\[5\]: times: its token 150 came out"):
        check_token_times(replace(log, token_times_s=tuple(late)))


def test_who_is_preempted_where_a_record_ends_is_not_over() -> None:
    log = made_log([(0.1 * i, 300, 200) for i in range(8)], HostCost(), num_free_blocks=95)
    cut = first_steps(log, min(log.steps.preempted) + 1)
    assert "it was preempted after its last token" in open_ends(cut).values()
    _, difference = check_replay(cut)
    assert difference is not None
    assert difference.step == len(cut.steps)  # beyond the record


def first_steps(log: StepLog, count: int) -> StepLog:
    """The log of an engine that was stopped after some steps."""
    steps, num_rows = log.steps, int(log.steps.row_offsets[count])
    columns = {name: getattr(steps, name)[:count] for name in
               ("start_s", "end_s", "duration_s", "schedule_s", "update_s")}  # fmt: skip
    rows = {name: getattr(steps, name)[:num_rows] for name in
            ("request", "num_tokens", "num_computed")}  # fmt: skip
    times_s = tuple(times[times <= steps.end_s[count - 1] + 1e-9] for times in log.token_times_s)
    return replace(
        log,
        requests=tuple(
            replace(request, output_len=len(times) or request.output_len)
            for request, times in zip(log.requests, times_s, strict=True)
        ),
        token_times_s=times_s,
        steps=replace(
            steps,
            **columns,
            **rows,
            row_offsets=steps.row_offsets[: count + 1],
            preempted={step: who for step, who in steps.preempted.items() if step < count},
        ),
    )


def test_tokens_beyond_max_model_len_are_refused(tmp_path: Path, document: dict[str, Any]) -> None:
    document["config"]["max_model_len"] = 42
    assert check_case(write(tmp_path / "x.json.gz", document)).difference is None
    document["config"]["max_model_len"] = 41
    with pytest.raises(
        TraceError, match=r"requests\[0\]: segs: .* more than max_model_len, which is 41"
    ):
        check_case(write(tmp_path / "x.json.gz", document))


@pytest.mark.parametrize(
    "config", [{"policy": "priority"}, {"enable_chunked_prefill": False}, {"prefix_caching": False}]
)
def test_other_settings_are_rebuilt(config: dict[str, Any]) -> None:
    log = made_log(poisson(30, 60.0), HostCost(), max_num_seqs=3, **config)
    assert check_replay(log)[1] is None
    assert check_replay(replace(log, config=replace(log.config, **OTHERWISE[next(iter(config))])))[
        1
    ]


OTHERWISE: dict[str, Any] = {
    "policy": {"policy": "fcfs"},
    "enable_chunked_prefill": {"enable_chunked_prefill": True},
    "prefix_caching": {"max_num_seqs": 4},
}


@pytest.mark.parametrize("at_s", [0.0, 0.5])
def test_priorities_tell_apart_what_is_due_at_once(at_s: float) -> None:
    log = made_log([(at_s, 300, 60)] * 8, HostCost(), num_free_blocks=158)

    def preemptions(apart_s: float) -> list[int]:
        requests = tuple(
            replace(request, arrival_s=at_s + apart_s * i, priority=0)
            for i, request in enumerate(log.requests)
        )
        config = replace(log.config, policy="priority")
        executor = SimulatedExecutor(HostCost())
        data = simulate_log(replace(log, config=config, requests=requests), executor)
        assert np.abs(data.requests.arrival_s - at_s).max() <= 1e-5
        return [int(count) for count in data.requests.num_preemptions]

    assert sum(preemptions(1e-6)) > 0
    assert preemptions(0.0) == preemptions(1e-6)


def test_an_engine_whose_rules_are_not_known_is_refused(tiny: StepLog) -> None:
    with pytest.raises(TraceError, match=r"decisions of 'vllm-0\.9\.0' are not known"):
        replay_log(replace(tiny, engine="vllm-0.9.0"))


def test_the_engine_s_version_decides_the_rules(document: dict[str, Any]) -> None:
    # The pool holds 7 blocks. At step 1 the second request (5 blocks) finds 4 free: 0.11.0 admits
    # its first chunk, 0.20.2 does not.
    document["config"]["num_free_blocks"] = 7
    document["requests"][1].update(segs=[[8, 70]], added=20100, times=[])
    steps = document["steps"]
    steps[1][4] = [[0, 8, 32], [1, 24, 0]]
    old = PlanCheck(parse_vllm_log(Path("x"), {**document, "engine": "vllm-0.11.0"}))
    with pytest.raises(SimserveError, match="the record ends"):
        replay_log(old._log, old)
    assert old.difference is not None
    assert old.difference.step == 2
    new = PlanCheck(parse_vllm_log(Path("x"), document))
    with pytest.raises(SimserveError, match="the record ends"):
        replay_log(new._log, new)
    assert new.difference is not None
    assert new.difference.step == 1
    assert new.difference.got == ((0, 8, 32),)
    # The rule has a name of its own.
    document["config"]["scheduler_reserve_full_isl"] = False
    without = check_replay(parse_vllm_log(Path("x"), document))
    assert without == (None, old.difference)
