"""`simserve bench step`: the grammar of shapes, the plans made of them, and the samples."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from simserve.errors import CapacityError, SimserveError
from simserve.executor.real.bench.gpu_watch import GpuState
from simserve.executor.real.bench.step_cases import RequestShape, parse_step_case
from simserve.executor.real.bench.step_report import step_cells, step_row
from simserve.executor.real.bench.steps import StepSamples, measure_steps
from simserve.types import Kind, StepPlan, StepResult, StepRun, TraceRequest

BLOCK_SIZE = 4


class FakeExecutor:
    """Keeps books as a real one must, and takes 1 ms a token."""

    single_steps = True

    def __init__(self) -> None:
        self.plans: list[StepPlan] = []
        self.known: dict[str, TraceRequest] = {}
        self.tables: dict[str, list[int]] = {}
        self.computed: dict[str, int] = {}

    def add_request(self, request: TraceRequest) -> None:
        assert request.request_id not in self.known
        self.known[request.request_id] = request

    def submit(self, run: StepRun, start_s: float) -> StepResult:
        plan = run.plan
        for request_id in plan.finished_ids:
            for books in (self.known, self.tables, self.computed):
                del books[request_id]
        for row in plan.scheduled:
            blocks = list(row.new_blocks[0]) if row.new_blocks else []
            if row.kind is Kind.NEW:
                assert row.request_id not in self.tables
                self.computed[row.request_id] = row.start
            assert self.computed[row.request_id] == row.start
            table = self.tables.setdefault(row.request_id, [])
            table += blocks
            end = row.start + row.num_tokens
            assert len(table) == -(-end // BLOCK_SIZE)
            request = self.known[row.request_id]
            assert end <= request.prompt_len + request.output_len
            self.computed[row.request_id] = end
        owned = [block for table in self.tables.values() for block in table]
        assert (len(owned) - len(set(owned))) * BLOCK_SIZE == plan.num_shared_kv_tokens
        assert 0 not in owned
        self.plans.append(plan)
        duration_s = 1e-3 * plan.total_num_tokens
        parts = {
            "forward_s": np.array([0.75 * duration_s]),
            "sync_s": np.array([0.25 * duration_s]),
        }
        return StepResult(np.array([start_s + duration_s]), parts, [1] * len(plan.request_ids))


def measure(executor: FakeExecutor, *texts: str, num_gpu_blocks: int = 1000) -> list[StepSamples]:
    samples = measure_steps(
        executor,
        [parse_step_case(text) for text in texts],
        block_size=BLOCK_SIZE,
        num_gpu_blocks=num_gpu_blocks,
        num_warmup_steps=2,
        num_steps=3,
    )
    return list(samples)


@pytest.mark.parametrize(
    ("text", "name", "requests"),
    [
        ("8192", "8192", [(8192, 0)]),
        ("1@2048", "1@2048", [(1, 2048)]),
        ("3*1@7", "3*1@7", [(1, 7)] * 3),
        ("mix=2*1@9, 4@8", "mix", [(1, 9), (1, 9), (4, 8)]),
        ("2*5,1", "2*5,1", [(5, 0), (5, 0), (1, 0)]),
        ("2*1@9~4", "2*1@9~4", [(1, 9, 4), (1, 9, 4)]),
    ],
)
def test_shapes_are_read(text: str, name: str, requests: list[tuple[int, ...]]) -> None:
    case = parse_step_case(text)
    assert case.name == name
    assert list(case.requests) == [RequestShape(*request) for request in requests]
    assert parse_step_case(case.shape).requests == case.requests
    assert case.num_tokens == sum(new for new, *_ in requests)
    assert case.max_len == max(new + computed for new, computed, *_ in requests)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", r"'' is not \[N\*\]Q\[@K\[~S\]\]"),
        ("64x1", "'64x1' is not"),
        ("1@", "'1@' is not"),
        ("1,,2", "'' is not"),
        ("-1", "'-1' is not"),
        ("0*1", "computes nothing"),
        ("3*0@5", "computes nothing"),
        ("2*1@5~6", "'2.1@5~6' shares more tokens than are computed"),
        ("2*1~6", "'2.1~6' is not"),
        ("a b=1", "'a b' is no name"),
        ("9000000*1", "more than 100000 requests"),
    ],
)
def test_what_is_no_shape_is_an_error(text: str, message: str) -> None:
    with pytest.raises(SimserveError, match=message) as caught:
        parse_step_case(text)
    assert str(caught.value).startswith(f"--case {text}: ")


parts = st.tuples(st.integers(1, 4), st.integers(1, 9), st.integers(0, 17), st.integers(0, 17))


@given(st.lists(parts, min_size=1, max_size=4))
def test_every_step_computes_the_same_shape(shape: list[tuple[int, int, int, int]]) -> None:
    """The fake executor asserts that blocks and starts fit together, whatever the shape."""
    executor = FakeExecutor()
    text = ",".join(f"{n}*{new}@{k + shared}~{shared}" for n, new, k, shared in shape)
    (samples,) = measure(executor, text)
    expected = [new for count, new, *_ in shape for _ in range(count)]
    assert [plan.num_tokens for plan in executor.plans] == [expected] * 5
    assert samples.durations_s == pytest.approx([1e-3 * sum(expected)] * 3)


def test_requests_alike_have_their_first_blocks_together() -> None:
    executor = FakeExecutor()
    measure(executor, "3*1@9~8,1@9,2*1@8~7,2*5@8~8")
    plan = executor.plans[0]
    tables = [list(plan.new_blocks[request_id][0]) for request_id in plan.request_ids]
    assert tables[0][:2] == tables[1][:2] == tables[2][:2]
    assert tables[4][0] == tables[5][0]
    assert tables[6][:2] == tables[7][:2]
    assert len({block for table in tables for block in table}) == 26 - (2 * 2 + 1 + 2)
    assert [plan.num_shared_kv_tokens for plan in executor.plans] == [4 * 7] * 5


def test_decodes_go_on_and_prompts_begin_anew() -> None:
    executor = FakeExecutor()
    measure(executor, "1@7,6@8")
    assert [plan.starts for plan in executor.plans] == [[7 + step, 8] for step in range(5)]
    assert executor.plans[0].kinds == {"0/0": Kind.NEW, "0/1/0": Kind.NEW}
    assert executor.plans[1].kinds == {"0/1/1": Kind.NEW}
    assert executor.plans[1].finished_ids == ["0/1/0"]


def test_a_case_ends_what_ran_before_it() -> None:
    executor = FakeExecutor()
    samples = measure(executor, "2*1@7", "3*1")
    assert executor.plans[5].finished_ids == ["0/0", "0/1"]
    assert sorted(executor.tables) == ["1/0", "1/1", "1/2"]
    assert [one.durations_s for one in samples] == [
        pytest.approx([0.002] * 3),
        pytest.approx([0.003] * 3),
    ]


@pytest.mark.parametrize(
    ("text", "starts"),
    [
        ("2*1@7,6@8", [[7, 7], [8, 8], [9, 9, 8], [10, 10], [11, 11], [12, 12, 8]]),
        ("6@8", [[15], [16], [8], [18], [19], [8]]),
    ],
)
def test_decodes_alone_run_before_a_step_that_rests(text: str, starts: list[list[int]]) -> None:
    executor = FakeExecutor()
    (samples,) = measure_steps(
        executor,
        [parse_step_case(text)],
        block_size=BLOCK_SIZE,
        num_gpu_blocks=100,
        num_warmup_steps=1,
        num_steps=1,
        num_rest_steps=lambda case: 2,
    )
    assert [plan.starts for plan in executor.plans] == starts
    assert [plan.step for plan in executor.plans] == [-1, -1, 0, -1, -1, 1]
    assert len(samples.durations_s) == 1


def test_a_case_that_the_pool_does_not_hold_is_an_error_before_anything_runs() -> None:
    measure(FakeExecutor(), "8*8", num_gpu_blocks=17)
    executor = FakeExecutor()
    with pytest.raises(CapacityError, match="needs 16 KV blocks of 4 tokens, and there are 15"):
        measure(executor, "1", "8*8", num_gpu_blocks=16)
    assert not executor.plans


def test_the_table_shows_medians_and_spread() -> None:
    parts = {"forward_s": [0.001] * 3, "schedule_s": [0.0] * 3, "first_shape": [1.0, 0.0, 0.0]}
    samples = StepSamples([0.003, 0.001, 0.002], parts)
    state = GpuState(1500.4, 690.0, 700.0)
    row = step_row(parse_step_case("two=2*1@9"), samples, state)
    assert row["gpu_state"] == {"sm_clock_mhz": 1500.4, "power_w": 690.0, "power_limit_w": 700.0}
    assert row["samples_s"] == [0.003, 0.001, 0.002]
    assert row["parts_samples"] == parts
    other = step_row(parse_step_case("4"), StepSamples([0.5], {"sync_s": [0.25]}))
    assert step_cells([row, other]) == [
        ["case", "requests", "tokens", "step ms", "min", "max", "forward", "sync", "MHz", "W"],
        ["two", "2", "2", "2.00", "1.00", "3.00", "1.00", "–", "1,500", "690"],
        ["4", "1", "4", "500.00", "500.00", "500.00", "–", "250.00", "–", "–"],
    ]
