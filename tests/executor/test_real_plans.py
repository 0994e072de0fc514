"""What the real executor makes of single plans: drafts, ghosts, admissions, and its times."""

from __future__ import annotations

from collections.abc import Sequence
from time import perf_counter
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from simserve.cost.formula import FormulaCost  # noqa: E402
from simserve.errors import SimserveError, TraceError  # noqa: E402
from simserve.executor.real import graph_keys  # noqa: E402
from simserve.executor.real.attention import AttentionPath, BatchOnDevice  # noqa: E402
from simserve.executor.real.batch import EMPTY_BATCH, Batch, build_batch  # noqa: E402
from simserve.executor.real.executor import RealExecutor  # noqa: E402
from simserve.executor.real.forward import TokenInputs  # noqa: E402
from simserve.executor.real.graph_keys import GraphKeys  # noqa: E402
from simserve.executor.real.machine import Machine  # noqa: E402
from simserve.executor.real.pace import Pace, TimedScheduler  # noqa: E402
from simserve.executor.real.step_inputs import StepInputs, StepShape  # noqa: E402
from simserve.kv.manager import PagedKVCacheManager  # noqa: E402
from simserve.sched.params import SchedulerParams  # noqa: E402
from simserve.sched.vllm import VllmScheduler  # noqa: E402
from simserve.types import Kind, StepPlan, StepResult, StepRun  # noqa: E402
from tests.executor.served import Schedule, open_machine, request  # noqa: E402
from tests.executor.test_real_schedules import tiny  # noqa: E402

BLOCK_SIZE = 4
SCHEDULE = Schedule(block_size=BLOCK_SIZE, num_gpu_blocks=16, max_num_seqs=2)


def machine(num_draft_tokens: int = 0, replays: bool = True, **more: Any) -> Machine:
    path = AttentionPath("auto", "nhd", "varlen", num_draft_tokens)
    return open_machine(tiny(), SCHEDULE, replays=replays, path=path, **more)


def executor(on: Machine, **options: Any) -> RealExecutor:
    params = SchedulerParams(max_num_batched_tokens=64, max_num_seqs=2, max_model_len=64)
    kv = PagedKVCacheManager(num_gpu_blocks=16, block_size=BLOCK_SIZE, max_model_len=64)
    pace = options.pop("pace", Pace("virtual"))
    return RealExecutor(on, TimedScheduler(VllmScheduler(params, kv)), pace, **options)


def plan(rows: Sequence[tuple[str, Kind, int, int]], **more: Any) -> StepPlan:
    """Rows (request, kind, start, tokens); each yields a token."""
    return StepPlan(
        step=0,
        request_ids=[row[0] for row in rows],
        starts=[row[2] for row in rows],
        num_tokens=[row[3] for row in rows],
        samples=[True] * len(rows),
        kinds={row[0]: row[1] for row in rows if row[1] is not Kind.RUNNING},
        **more,
    )


def submit(to: RealExecutor, what: StepPlan, start_s: float = 0.0) -> StepResult:
    return to.submit(StepRun(what), start_s)


def captured(on: Machine, key: StepShape, batch: Batch) -> tuple[TokenInputs, BatchOnDevice]:
    """What a graph reads when it is replayed with a batch."""
    inputs = StepInputs(key)
    memory = torch.full((inputs.size,), 1 << 40)
    inputs.write(memory.numpy(), EMPTY_BATCH, on.rows)
    inputs.write(memory.numpy(), batch, on.rows)
    return inputs.read(memory, on.rows)


def recorded_logits(on: Machine) -> list[torch.Tensor]:
    """Logits of every step from now on."""
    seen: list[torch.Tensor] = []
    on.forward.sample = lambda inputs, logits: seen.append(logits)  # type: ignore[method-assign]
    return seen


def test_drafts_are_verified_as_if_they_were_decoded_one_by_one() -> None:
    admission = plan([("a", Kind.NEW, 0, 7)], new_blocks={"a": ([1, 5, 9],)})
    at_once, one_by_one = machine(num_draft_tokens=2), machine()
    logits = []
    for on in (at_once, one_by_one):
        logits.append(recorded_logits(on))
        run = executor(on)
        run.add_request(request("a", 0.0, 7, 8))
        submit(run, admission)
        if on is at_once:
            drafted = plan([("a", Kind.RUNNING, 7, 3)], draft_tokens={"a": (-1, -1)})
            submit(run, drafted)
        else:
            for start in (7, 8, 9):
                submit(run, plan([("a", Kind.RUNNING, start, 1)]))
    verified, decoded = (torch.cat(found) for found in logits)
    assert verified.shape == decoded.shape == (4, 53)
    torch.testing.assert_close(verified, decoded, rtol=1e-9, atol=1e-12)


def test_a_ghost_writes_nothing_and_still_counts() -> None:
    on = machine()
    run = executor(on)
    for name in ("a", "b"):
        run.add_request(request(name, 0.0, 5, 8))
    rows = [("a", Kind.NEW, 0, 5), ("b", Kind.NEW, 0, 5)]
    submit(run, plan(rows, new_blocks={"a": ([1, 2],), "b": ([3, 4],)}))
    before = on.caches[0][0].clone()
    ghost = plan([("a", Kind.RUNNING, 5, 1), ("b", Kind.GHOST, 0, 1)], preempted_ids=["b"])
    result = submit(run, ghost)
    changed = (on.caches[0][0] != before) & ~(on.caches[0][0].isnan() & before.isnan())
    assert {tuple(place[:2]) for place in changed.nonzero().tolist()} == {(2, 1)}
    assert list(result.num_emitted) == [1, 1]
    assert list(run.rows.of) == ["a"]
    alone = plan([("a", Kind.GHOST, 0, 1)], preempted_ids=["a"])
    assert submit(run, alone).ends_s[0] > 0


def test_a_preempted_request_keeps_its_tokens_while_another_has_its_row() -> None:
    on = machine(replays=False)
    run = executor(on)
    for name in ("a", "b"):
        run.add_request(request(name, 0.0, 5, 8))
    submit(run, plan([("a", Kind.NEW, 0, 5)], new_blocks={"a": ([1, 2],)}))
    row = on.rows.of["a"]
    had = on.rows.ids[row, :6].tolist()
    incoming = plan([("b", Kind.NEW, 0, 5)], new_blocks={"b": ([3, 4],)}, preempted_ids=["a"])
    submit(run, incoming)
    assert on.rows.of == {"b": row}
    submit(run, plan([("a", Kind.RESUMED, 0, 6)], new_blocks={"a": ([1, 2],)}))
    assert on.rows.ids[on.rows.of["a"], :6].tolist() == had


def test_parts_add_up_to_the_duration() -> None:
    run = executor(machine(breakdown=True), shadow=FormulaCost(0.25))
    run.add_request(request("a", 0.0, 5, 8))
    began = perf_counter()
    result = submit(run, plan([("a", Kind.NEW, 0, 5)], new_blocks={"a": ([1, 2],)}), 3.0)
    wall_s = perf_counter() - began
    parts = {name: float(seconds) for name, seconds in result.parts.items()}
    assert parts.pop("shadow_s") == 0.25
    assert parts.pop("first_shape") == 0
    inner = sum(parts.pop(f"{name}_s") for name in ("linear", "kv_write", "attention", "head"))
    assert inner == pytest.approx(parts["forward_s"])
    duration_s = float(result.ends_s[0]) - 3.0
    assert sum(parts.values()) == pytest.approx(duration_s)
    assert 0 < duration_s <= wall_s


def test_realtime_waits_for_a_step_to_begin() -> None:
    run = executor(machine(), pace=Pace("realtime"))
    run.add_request(request("a", 0.0, 5, 8))
    began = perf_counter()
    first = submit(run, plan([("a", Kind.NEW, 0, 5)], new_blocks={"a": ([1, 2],)}), 0.0)
    start_s = float(first.ends_s[0]) + 0.05
    second = submit(run, plan([("a", Kind.RUNNING, 5, 1)]), start_s)
    assert start_s < second.ends_s[0] <= perf_counter() - began


def test_a_literal_id_outside_the_vocabulary_is_refused() -> None:
    run = executor(machine())
    with pytest.raises(TraceError, match=r"request a: .* below 53; .* the model's vocabulary"):
        run.add_request(request("a", 0.0, [((1, 53), 2)], 2))


def test_more_requests_than_rows_are_refused() -> None:
    run = executor(machine())
    names = ("a", "b", "c")
    for name in names:
        run.add_request(request(name, 0.0, 2, 2))
    tables = {name: ([i + 1],) for i, name in enumerate(names)}
    with pytest.raises(SimserveError, match="more than scheduler"):
        submit(run, plan([(name, Kind.NEW, 0, 2) for name in names], new_blocks=tables))


def test_rows_hold_what_plans_add() -> None:
    on = machine()
    run = executor(on)
    run.add_request(request("a", 0.0, 5, 8))
    submit(run, plan([("a", Kind.NEW, 0, 5)], new_blocks={"a": ([7, 3],)}))
    submit(run, plan([("a", Kind.RUNNING, 5, 4)], new_blocks={"a": ([9],)}))
    row = on.rows.of["a"]
    assert on.rows.tables[row, :4].tolist() == [7, 3, 9, -1]
    assert on.rows.slots(np.array([row, row]), np.array([4, 8])).tolist() == [12, 36]
    submit(run, plan([], finished_ids=["a"]))
    assert on.rows.of == {}
    np.testing.assert_array_equal(on.rows.tables[on.rows.spare_row].numpy(), -1)


def test_a_step_sends_its_batch_and_what_has_changed(monkeypatch: pytest.MonkeyPatch) -> None:
    """In a copy each, whoever comes in or gets blocks."""
    on = machine()
    run, sent = executor(on), []
    staging = on.rows.staging
    monkeypatch.setattr(staging, "send", lambda piece: sent.append(piece) or piece)
    for name in ("a", "b"):
        run.add_request(request(name, 0.0, 7, 8))
    rows = [("a", Kind.NEW, 0, 7), ("b", Kind.NEW, 0, 7)]
    submit(run, plan(rows, new_blocks={"a": ([1, 5],), "b": ([2, 3],)}))
    assert len(sent) == 2
    rows = [("a", Kind.RUNNING, 7, 1), ("b", Kind.RUNNING, 7, 1)]
    submit(run, plan(rows))
    assert len(sent) == 3
    rows = [("a", Kind.RUNNING, 8, 1), ("b", Kind.RUNNING, 8, 1)]
    submit(run, plan(rows, new_blocks={"a": ([4],), "b": ([6],)}))
    assert len(sent) == 5


@pytest.mark.parametrize("lens", [[1, 1], [2, 2], [2, 1], [1, 2]])
@pytest.mark.parametrize("most_split", [0, 32])
def test_padding_of_a_captured_step_changes_nothing(
    lens: list[int], most_split: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What a graph replays, call by call: decodes, some with a draft, padded to eight tokens."""
    monkeypatch.setattr(graph_keys, "MAX_SPLIT_TOKENS", most_split)
    splits = max(lens) == 1 or most_split > 0
    on = machine(num_draft_tokens=1)
    seen = recorded_logits(on)
    run = executor(on)
    for name, blocks in (("a", [1, 5, 9]), ("b", [2, 3, 4])):
        run.add_request(request(name, 0.0, 7, 8))
        submit(run, plan([(name, Kind.NEW, 0, 7)], new_blocks={name: (blocks,)}))
    of = on.rows.of
    batch = build_batch([of["b"], of["a"]], [7, 7], lens, lens)
    key = GraphKeys(4, 16, 64, on.path).of(batch)
    assert key is not None
    assert key.max_query_len == (1 if splits else max(lens))
    padded_key = key._replace(num_rows=8, num_tokens=8, num_decodes=8 if splits else 0)
    before = on.caches[0][0].clone()
    padded = on.forward.logits(*captured(on, padded_key, batch), None)
    written = (on.caches[0][0] != before) & ~(on.caches[0][0].isnan() & before.isnan())
    second = zip([(4, 0), (9, 0)], lens, strict=True)
    expected = {(5, 3), (3, 3)} | {place for place, count in second if count == 2}
    assert {tuple(place[:2]) for place in written.nonzero().tolist()} == expected
    on.runner.run(batch)
    torch.testing.assert_close(padded[: sum(lens)], seen[-1])


def test_padding_of_a_captured_mixed_step_changes_nothing() -> None:
    """A chunk that yields no token, and a decode: five tokens of two requests, padded."""
    on = machine()
    seen = recorded_logits(on)
    run = executor(on)
    for name, blocks in (("a", [1, 5, 9]), ("b", [2, 3, 4])):
        run.add_request(request(name, 0.0, 7, 8))
        new = [(name, Kind.NEW, 0, 7 if name == "a" else 2)]
        submit(run, plan(new, new_blocks={name: (blocks,)}))
    of = on.rows.of
    batch = build_batch([of["b"], of["a"]], [2, 7], [4, 1], [0, 1])
    caches = [(k.clone(), v.clone()) for k, v in on.caches]
    padded = on.forward.logits(*captured(on, StepShape(4, 16, 4, 0, 16, 64), batch), None)
    written = [(k.clone(), v.clone()) for k, v in on.caches]
    for (k, v), before in zip(on.caches, caches, strict=True):
        k.copy_(before[0])
        v.copy_(before[1])
    on.runner.run(batch)
    torch.testing.assert_close(padded[:1], seen[-1])
    assert padded.shape[0] == 4
    for here, there in zip(written, on.caches, strict=True):
        torch.testing.assert_close(here, there, equal_nan=True)


@pytest.mark.parametrize(
    ("num_tokens", "num_logits", "start", "size", "length"),
    [
        ([5, 1, 1], [1, 1, 1], 0, 16, 4096),
        ([5, 1, 1], [1, 1, 1], 4090, 16, 4096),
        ([5, 1, 1], [1, 1, 1], 4092, 16, 9000),
        ([1, 1], [1, 0], 0, 16, 4096),
        ([17], [0], 0, 32, 4096),
        ([300, 20], [1, 1], 0, 320, 4096),
        ([1985], [1], 0, 2048, 4096),
    ],
)
def test_graphs_of_mixed_steps(
    num_tokens: list[int], num_logits: list[int], start: int, size: int, length: int
) -> None:
    keys = GraphKeys(4, 3000, 9000, AttentionPath("auto", "nhd", "varlen"))
    count = len(num_tokens)
    batch = build_batch(range(count), [start] + [0] * (count - 1), num_tokens, num_logits)
    key = StepShape(4, size, 4, 0, size, length)
    assert keys.of(batch) == key
    assert key in list(keys.beforehand())


def test_steps_without_a_graph() -> None:
    path = AttentionPath("auto", "nhd", "varlen")
    keys = GraphKeys(4, 3000, 9000, path)
    assert keys.of(build_batch([0], [0], [2049], [1])) is None, "too many tokens"
    assert keys.of(build_batch(range(5), [0] * 5, [2] * 5, [1] * 5)) is None, "too many requests"
    assert keys.of(build_batch([0], [0], [9], [5])) is None, "too many logits"
    split = GraphKeys(4, 3000, 9000, path._replace(mixed="split"))
    assert split.of(build_batch([0, 1], [0, 0], [2, 1], [1, 1])) is None, "in two calls"
    assert split.of(build_batch([0, 1], [0, 0], [1, 1], [1, 1])) == StepShape(
        2, 2, None, 2, 1, 9000
    )


@pytest.mark.parametrize(
    ("num_tokens", "num_logits", "key"),
    [
        ([1, 1, 1], None, (4, 4, None, 4, 1)),
        ([3], None, (3, 3, None, 3, 1)),
        ([1, 3, 1], None, (6, 6, None, 6, 1)),
        ([3] * 10 + [2], None, (16, 48, None, 0, 3)),
        ([3] * 16, None, (16, 48, None, 0, 3)),
        ([3] * 15 + [5], [3] * 15 + [1], (16, 64, 48, 0, 64)),
    ],
)
def test_graphs_of_decodes_with_drafts(
    num_tokens: list[int], num_logits: list[int] | None, key: tuple[Any, ...]
) -> None:
    keys = GraphKeys(16, 3000, 4096, AttentionPath("auto", "nhd", "varlen", 2))
    count = len(num_tokens)
    batch = build_batch(range(count), [7] * count, num_tokens, num_logits or num_tokens)
    assert keys.of(batch) == StepShape(*key, 4096)
    assert StepShape(*key, 4096) in list(keys.beforehand())
