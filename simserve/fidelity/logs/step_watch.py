"""Watches an executor: what each of its steps computed and how long it took, as columns."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from simserve.cost.dealing import Dealer, Dealt
from simserve.cost.features import extract
from simserve.cost.heat import Heat
from simserve.cost.step_model import Sheet
from simserve.cost.step_work import padded, step_work
from simserve.fidelity.logs.observations import COLUMNS, Observations
from simserve.protocols import Executor
from simserve.types import StepPlan, StepResult, StepRun, TraceRequest, seconds_at

__all__ = ["PARTS", "MeasuredSteps", "StepWatch"]

PARTS = ("schedule_s", "update_s", "prepare_s", "forward_s", "sample_s", "sync_s")


@dataclass(frozen=True, slots=True)
class MeasuredSteps:
    """Steps of the real executor."""

    steps: Observations
    host_s: NDArray[np.float64]
    """What of a step is neither the scheduler's nor the forward pass; shape [steps]."""
    heat: NDArray[np.float64]
    """Tokens per second of the latest steps with prefills, as `Heat` has them; shape [steps]."""

    def __len__(self) -> int:
        return len(self.steps)

    @property
    def forward_s(self) -> NDArray[np.float64]:
        """What kernels took of each step; shape [steps]."""
        return self.steps.duration_s - self.steps.engine_s - self.host_s

    def share_of_flops(self, sheet: Sheet) -> NDArray[np.float64] | None:
        """What `heat` was of the GPU's FLOP/s, shape [steps]; None: no step had any."""
        return self.heat * sheet.token_flops_s if self.heat.any() else None

    @classmethod
    def of(cls, columns: Mapping[str, Sequence[float]]) -> MeasuredSteps:
        """From one list a column, as `as_json` gives them."""
        unknown = [0.0] * len(columns["host_s"])
        columns = {"heat": unknown, "shared_kv_tokens": unknown, **columns}
        arrays = {name: np.array(columns[name], dtype=_dtype(name)) for name in COLUMNS}
        host_s = np.array(columns["host_s"], dtype=np.float64)
        heat = np.array(columns["heat"], dtype=np.float64)
        dealt = None
        if all(name in columns for name in Dealt._fields):
            dealt = Dealt(*(np.array(columns[n], dtype=np.float64) for n in Dealt._fields))
        return cls(Observations(**arrays, dealt=dealt), host_s, heat)

    def as_json(self) -> dict[str, list[float]]:
        """One list a column."""
        columns = {name: getattr(self.steps, name) for name in COLUMNS}
        if self.steps.dealt is not None:
            columns |= self.steps.dealt._asdict()
        return {name: column.tolist() for name, column in columns.items()} | {
            "host_s": self.host_s.tolist(),
            "heat": self.heat.tolist(),
        }


def _dtype(name: str) -> Any:
    return np.float64 if name.endswith("_s") else np.int64


class StepWatch:
    """Passes steps on to an executor and keeps them and their times (protocol `Executor`).

    They are counted when they are asked for: work between steps would take the host's caches, and
    its time is what is measured. Left out are steps in which something was compiled: they are slow
    once.

    Args:
        executor: runs the steps.
        sliding_window: of the model.
        num_warmup_steps: plans numbered below this are left out.
    """

    single_steps = True

    def __init__(
        self, executor: Executor, sliding_window: int | None, num_warmup_steps: int
    ) -> None:
        self._executor = executor
        self._window = sliding_window
        self._num_warmup_steps = num_warmup_steps
        self._dealer: Dealer | None = None
        self._graph_sizes: Sequence[int] = ()
        self._kept: list[tuple[StepPlan, dict[str, float], float]] = []
        """Of each step its plan, its parts and the heat before it."""
        self._heat = Heat()
        self._num_steps = 0

    def deal(self, dealer: Dealer, graph_sizes: Sequence[int]) -> None:
        """Keep also how attention is dealt out; decodes are padded to `graph_sizes`."""
        self._dealer, self._graph_sizes = dealer, graph_sizes

    def add_request(self, request: TraceRequest) -> None:
        """A request was taken in."""
        self._executor.add_request(request)

    def submit(self, run: StepRun, start_s: float) -> StepResult:
        """Run a step and keep it."""
        result = self._executor.submit(run, start_s)
        parts = {name: seconds_at(values, 0) for name, values in result.parts.items()}
        heat = self._heat.before(self._num_steps)
        if run.plan.step >= self._num_warmup_steps and not parts.get("first_shape"):
            self._kept.append((run.plan, parts, heat))
        tokens = run.plan.total_num_tokens
        if tokens > len(run.plan.request_ids):
            seconds = sum(parts.get(name, 0.0) for name in PARTS)
            self._heat.passed(self._num_steps, tokens, seconds)
        self._num_steps += 1
        return result

    def measured(self) -> MeasuredSteps:
        """All steps so far."""
        rows = [{**self._row(plan, parts), "heat": heat} for plan, parts, heat in self._kept]
        names = rows[0] if rows else [*COLUMNS, "host_s", "heat"]
        return MeasuredSteps.of({name: [row[name] for row in rows] for name in names})

    def _row(self, plan: StepPlan, parts: Mapping[str, float]) -> dict[str, float]:
        seconds = {name: parts.get(name, 0.0) for name in PARTS}
        run = StepRun(plan)
        counts = extract(run, self._window)
        work = step_work(run, counts, (), self._window)
        dealt: dict[str, float] = {}
        if self._dealer is not None:
            padded_tokens = padded(counts.num_tokens, self._graph_sizes)
            dealt = self._dealer.deal(run, padded_tokens)._asdict()
        return {
            "duration_s": sum(seconds.values()),
            "schedule_s": seconds["schedule_s"],
            "update_s": seconds["update_s"],
            # The virtual clock does not run between steps.
            "gap_s": 0.0,
            "gap_requests": 0,
            "gap_tokens": 0,
            "num_tokens": counts.num_tokens,
            "num_reqs": counts.num_reqs,
            "num_decodes": counts.num_decodes,
            "decode_kv_tokens": int(counts.decode_kv_tokens),
            "decode_kv_bound": int(work.decode_kv_bound),
            "num_prefills": counts.num_prefills,
            "prefill_tokens": counts.prefill_tokens,
            "prefill_pairs": int(counts.prefill_pairs),
            "prefill_kv_tokens": int(counts.prefill_kv_tokens),
            "longest_kv_tokens": int(work.longest_kv_tokens),
            "shared_kv_tokens": work.shared_kv_tokens,
            "num_new": work.num_new,
            "num_table_tokens": work.num_table_tokens,
            "host_s": seconds["prepare_s"] + seconds["sample_s"] + seconds["sync_s"],
            **dealt,
        }
