"""Which logs are judged together, as repeats of one workload, and which cannot be judged."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from simserve.errors import TraceError
from simserve.fidelity.logs.vllm_log import StepLog
from simserve.fidelity.replay.endings import check_lengths, open_ends
from simserve.fidelity.replay.token_times import check_token_times

__all__ = ["check_can_be_judged", "group_repeats"]

_POOL_CHANGES = 0.01


def group_repeats(logs: Sequence[StepLog]) -> list[list[StepLog]]:
    """Logs of the same requests under the same settings are repeats of one workload.

    The pool may differ by what another process left free: up to 1 %.
    """
    groups: list[list[StepLog]] = []
    for log in logs:
        same = (group for group in groups if _is_repeat(log, group[0]))
        group = next(same, None)
        if group is None:
            groups.append([log])
        else:
            group.append(log)
    return groups


def _is_repeat(log: StepLog, first: StepLog) -> bool:
    blocks = first.config.num_gpu_blocks
    config = replace(log.config, num_gpu_blocks=blocks, not_read=first.config.not_read)
    return (
        abs(log.config.num_gpu_blocks - blocks) <= _POOL_CHANGES * blocks
        and config == first.config
        and (log.engine, log.gpu, log.model) == (first.engine, first.gpu, first.model)
        and log.requests == first.requests
    )


def check_can_be_judged(log: StepLog, *, by_host: bool) -> None:
    """Refuse a log of which it is not known what a simulation would have to do.

    A prompt that is too long gets no token from an engine, and none here. Any other request must
    have ended with a token, tokens must have come out in the steps that computed them, and with
    `by_host` the log must tell the host's speed.

    Raises:
        TraceError: names the log and what it lacks.
    """
    check_lengths(log)
    for i, why in open_ends(log).items():
        raise TraceError(
            f"{log.path}: requests[{i}]: times: {why} (the request was aborted, or the record ends "
            "before): what the engine would have done for it is not known; `simserve fit` takes "
            "such a log, validate needs the tokens of every request"
        )
    check_token_times(log)
    if by_host and not (log.steps.schedule_s.any() or log.steps.update_s.any()):
        raise TraceError(
            f"{log.path}: steps: all schedule() and update() times are 0, so they do not tell "
            "the host's speed: give it with --host-scale X"
        )
