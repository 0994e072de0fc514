"""Fits a profile to runs of the real executor, which timed its own parts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from simserve.cost.profile_file import Engine, ProfileFile
from simserve.errors import TraceError
from simserve.fidelity.fit.own_host import own_host
from simserve.fidelity.fit.profile import fit_profile
from simserve.fidelity.logs import executor_facts
from simserve.fidelity.logs.real_run import RunLog

__all__ = ["fit_runs"]


def fit_runs(
    fitted: Sequence[RunLog], held_out: Sequence[RunLog], *, name: str, model: str
) -> ProfileFile:
    """Fit a profile to real runs. What the executor times by itself is taken from there.

    Raises:
        TraceError: as `fit_profile` has it, or runs used different kernels.
    """
    paths = sorted({executor_facts.attention_path(run.facts) for run in fitted})
    if len(paths) > 1:
        raise TraceError(f"a profile is of one attention path, the runs are of {'; '.join(paths)}")
    plan = executor_facts.attention_plan(fitted[0].facts)
    for run in (*fitted, *held_out):
        if executor_facts.attention_plan(run.facts) != plan:
            raise TraceError(
                f"a profile is of one way of dealing attention out to the GPU; {run.name} has "
                f"another one than {fitted[0].name}"
            )
    schedulers = [run.loaded.config.scheduler for run in fitted]
    most_seqs = max(one.max_num_seqs or 1 for one in schedulers)
    most_tokens = max(one.max_num_batched_tokens or 1 for one in schedulers)
    host = own_host(*(run.measured for run in fitted))
    profile = fit_profile(
        [replace(run, kernels_s=run.measured.forward_s) for run in fitted],
        held_out,
        name=name,
        model=model,
        attention_path=paths[0],
        measured_on="; ".join(sorted({run.measured_on for run in fitted})),
        graphs=executor_facts.graphs(fitted[0].facts, most_seqs, most_tokens),
        attention_plan=plan,
        known=host,
    )
    rules = sorted({run.loaded.config.scheduler.compat for run in fitted})
    engine = Engine(
        name=profile.engine.name,
        timing_version=profile.engine.timing_version,
        decision_version=", ".join(rules),
    )
    return profile.model_copy(update={"engine": engine})
