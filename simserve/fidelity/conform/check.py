"""Conformance: simulate a recorded case, or replay a step log, and compare what was recorded."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from simserve.cost.formula import FormulaCost
from simserve.engine.admission import Admission
from simserve.engine.inbox import Abort, Inbox, Reset
from simserve.engine.loop import EngineParts
from simserve.engine.simulation import simulate
from simserve.errors import TraceError
from simserve.executor.drafts import MadeUpDrafter
from simserve.executor.simulated import SimulatedExecutor
from simserve.fidelity.conform.case_record import CaseRecord
from simserve.fidelity.conform.cases import Case, case_requests, check_case_keys
from simserve.fidelity.logs.document import load_document
from simserve.fidelity.logs.vllm_log import StepLog, is_vllm_log, parse_vllm_log
from simserve.fidelity.replay.endings import check_lengths, open_ends
from simserve.fidelity.replay.log_run import check_replay
from simserve.fidelity.replay.plans import PlanDifference
from simserve.kv.groups import FullAttention, Group, SlidingWindow
from simserve.kv.manager import PagedKVCacheManager
from simserve.sched.params import SchedulerParams
from simserve.sched.vllm import VllmScheduler
from simserve.sched.vllm_async import VllmAsyncScheduler
from simserve.workload.source import OpenLoop

__all__ = ["Conformance", "Difference", "check_case", "simulate_case"]


@dataclass(frozen=True, slots=True)
class Difference:
    """Where a simulation first departs from a record."""

    where: str
    """`step 12`, `request 7` or `summary`."""
    key: str
    expected: Any
    got: Any

    def __str__(self) -> str:
        return f"{self.where}, {self.key}: expected {_short(self.expected)}, got {_short(self.got)}"


@dataclass(frozen=True, slots=True)
class Conformance:
    """The outcome for one case."""

    name: str
    num_steps: int
    num_requests: int
    difference: Difference | PlanDifference | None


def check_case(path: Path) -> Conformance:
    """Simulate the case, or replay the step log, in `path` and compare.

    Raises:
        TraceError: the file is neither, or a log that does not tell what is to be compared.
    """
    document = load_document(path)
    if is_vllm_log(document):
        return _check_log(path, document)
    case = check_case_keys(path, document)
    # One step more than was recorded is a difference already.
    got = simulate_case(case, most_steps=len(case["steps"]) + 1)
    return Conformance(
        str(case.get("name", path.name)),
        len(case["steps"]),
        len(case["requests"]),
        _first_difference(case, got),
    )


def _check_log(path: Path, document: Any) -> Conformance:
    """Compare every plan of a step log, its measured times fed back."""
    log = parse_vllm_log(path, document)
    check_lengths(log)
    _, difference = check_replay(log)
    return Conformance(log.name, len(log.steps), len(log.requests), _known(log, difference))


def _known(log: StepLog, difference: PlanDifference | None) -> PlanDifference | None:
    """A difference, unless it lies beyond what was recorded.

    Raises:
        TraceError: it may come from a request of which the log does not tell what ended it.
    """
    unknown = open_ends(log)
    if difference is None or not unknown:
        return difference
    step = difference.step
    if step >= len(log.steps):
        return None
    if there := [i for i in unknown if log.added_s[i] <= log.steps.start_s[step]]:
        raise TraceError(
            f"{log.path}: requests[{there[0]}]: times: {unknown[there[0]]}, so it was aborted at a "
            f"time that is not known: {step} steps are equal, those from step {step} on cannot be "
            "compared"
        )
    return difference


def simulate_case(case: Case, most_steps: int | None = None) -> Case:
    """What the simulation makes of a case's `config` and `workload`: steps, requests, summary.

    With `most_steps` it ends there at the latest.
    """
    config, workload = case["config"], case["workload"]
    kv = _kv_manager(config)
    scheduler_class = VllmAsyncScheduler if config["async_scheduling"] else VllmScheduler
    scheduler = scheduler_class(_params(config), kv)
    requests = case_requests(case)
    record = CaseRecord(config, requests, scheduler, kv)
    source = OpenLoop(requests, len(requests))
    parts = EngineParts(
        workload=source,
        inbox=Inbox(
            source,
            [Abort(time_s, str(request)) for time_s, request in workload.get("aborts", ())],
            [Reset(time_s) for time_s in workload.get("resets", ())],
        ),
        scheduler=scheduler,
        kv=kv,
        executor=SimulatedExecutor(FormulaCost(*config["cost"]), _drafter(config)),
        recorder=record,
        admission=Admission(config["max_model_len"], kv, as_engine=True),
        max_model_len=config["max_model_len"],
        max_steps=min(config["max_steps"], most_steps or config["max_steps"]),
        observer=record,
    )
    outcome = simulate(parts, async_scheduling=config["async_scheduling"])
    return record.finish(outcome.status, outcome.now_s)


def _params(config: dict[str, Any]) -> SchedulerParams:
    threshold = config["long_prefill_token_threshold"]
    if config["max_num_partial_prefills"] > 1 and threshold == 0:
        threshold = int(config["max_model_len"] * 0.04)
    return SchedulerParams(
        max_num_batched_tokens=config["max_num_batched_tokens"],
        max_num_seqs=config["max_num_seqs"],
        max_model_len=config["max_model_len"],
        long_prefill_token_threshold=threshold,
        enable_chunked_prefill=config["enable_chunked_prefill"],
        policy=config["policy"],
        num_lookahead_tokens=config["spec"]["num"] if _is_eagle(config) else 0,
    )


def _kv_manager(config: dict[str, Any]) -> PagedKVCacheManager:
    groups: list[Group] = [
        FullAttention() if group["type"] == "full" else SlidingWindow(group["window"])
        for group in config["kv_groups"] or [{"type": "full"}]
    ]
    return PagedKVCacheManager(
        num_gpu_blocks=config["num_gpu_blocks"],
        block_size=config["block_size"],
        max_model_len=config["max_model_len"],
        enable_prefix_caching=config["enable_prefix_caching"],
        groups=groups,
        drop_last_hit=_is_eagle(config),
    )


def _drafter(config: dict[str, Any]) -> MadeUpDrafter | None:
    spec = config["spec"]
    if spec is None:
        return None
    k = spec["num"]

    def linear(a: int, b: int) -> Any:
        return lambda request_id, so_far: (int(request_id) * a + so_far * b) % (k + 1)

    return MadeUpDrafter(
        method=spec["method"],
        num_speculative_tokens=k,
        accepted=linear(*spec["accept"]),
        draft_len=linear(*spec.get("draft_len", (0, 0))),
        max_model_len=config["max_model_len"],
    )


def _is_eagle(config: dict[str, Any]) -> bool:
    return bool(config["spec"]) and config["spec"]["method"] == "eagle"


def _first_difference(expected: Case, got: Case) -> Difference | None:
    for name, rows in (("step", "steps"), ("request", "requests")):
        for i, (want, have) in enumerate(zip(expected[rows], got[rows], strict=False)):
            where = f"{name} {want.get('id', i) if rows == 'requests' else i}"
            if difference := _differing_key(where, want, have):
                return difference
        if len(expected[rows]) != len(got[rows]):
            return Difference(rows, "count", len(expected[rows]), len(got[rows]))
    return _differing_key("summary", expected["summary"], got["summary"])


def _differing_key(where: str, want: dict[str, Any], have: dict[str, Any]) -> Difference | None:
    for key in sorted({*want, *have}):
        if want.get(key) != have.get(key) or (key in want) != (key in have):
            return Difference(where, key, want.get(key, "nothing"), have.get(key, "nothing"))
    return None


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 200 else text[:197] + "..."
