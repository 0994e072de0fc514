"""What small policies check at the start: their options, and limits that contradict them."""

from __future__ import annotations

from collections.abc import Mapping

from simserve.errors import ConfigError, Problem, did_you_mean
from simserve.sched.params import SchedulerParams

__all__ = ["read_int_options", "require_whole_prompts"]


def read_int_options(
    kind: str, params: SchedulerParams, known: Mapping[str, tuple[int, int]]
) -> dict[str, int]:
    """The whole numbers in `params.options`.

    Args:
        kind: name of the policy, for messages.
        params: what the scheduler was given.
        known: default and least value of each option.

    Raises:
        ConfigError: an option is unknown, not a whole number or too small; all of them at once.
    """
    values = {name: default for name, (default, _) in known.items()}
    problems = []
    for name, value in params.options.items():
        path = f"scheduler.options.{name}"
        if name not in known:
            there_are = ", ".join(known) or "none"
            message = f"{kind} has no such option{did_you_mean(name, known)}; it has {there_are}"
            problems.append(Problem(path=path, message=message))
        elif isinstance(value, bool) or not isinstance(value, int) or value < known[name][1]:
            message = f"must be a whole number of at least {known[name][1]}, got {value!r}"
            problems.append(Problem(path=path, message=message))
        else:
            values[name] = value
    if problems:
        raise ConfigError(problems)
    return values


def require_whole_prompts(kind: str, params: SchedulerParams) -> None:
    """Check the limits of a policy that computes every prompt in one step.

    Raises:
        ConfigError: a prompt could be longer than the budget, or a threshold would cut it.
    """
    problems = []
    if params.max_num_batched_tokens < params.max_model_len:
        message = (
            f"{kind} computes each prompt in one step, so {params.max_num_batched_tokens} must be "
            f"at least max_model_len ({params.max_model_len}): raise it, or lower max_model_len"
        )
        problems.append(Problem(path="scheduler.max_num_batched_tokens", message=message))
    if params.long_prefill_token_threshold:
        message = f"{kind} computes each prompt in one step: a threshold would cut it, leave it 0"
        problems.append(Problem(path="scheduler.long_prefill_token_threshold", message=message))
    if problems:
        raise ConfigError(problems)
