"""A scheduler of the user's own: a wrong plan is an error, and nobody else promises for it."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import takewhile
from typing import Any

from simserve.errors import PluginError
from simserve.protocols import Scheduler
from simserve.types import Request, StepOutput, StepPlan, StepResult

__all__ = ["checked", "promises_itself"]


def promises_itself(scheduler: Scheduler) -> bool:
    """Whether its `steady_steps` is of whoever wrote its decisions.

    A class that derives from one of the package's may decide otherwise than its base, whose promise
    of equal steps would then be wrong: it has to have a `steady_steps` of its own.
    """
    own = takewhile(lambda cls: not cls.__module__.startswith("simserve."), type(scheduler).__mro__)
    mine = [vars(cls) for cls in own]
    return not mine or any("steady_steps" in names for names in mine)


def checked(scheduler: Scheduler) -> Scheduler:
    """`scheduler`, from now on with a look at each plan that it returns.

    The same object, so that all else of it is as it was; the methods may be of its class or its
    own. `schedule()` and `update()` raise PluginError, naming the class, if `schedule()` returns no
    plan, schedules a request that it does not hold, one twice, or for no tokens or more than it
    lacks, or if `update()` returns no output.

    Raises:
        PluginError: the object takes no attributes.
    """
    cls = type(scheduler)
    name = f"{cls.__module__}:{cls.__qualname__}"
    own_add, own_abort = scheduler.add_request, scheduler.abort
    own_schedule, own_update = scheduler.schedule, scheduler.update
    held: dict[str, Request] = {}  # to ask for all requests takes as long as the queue is

    def add_request(request: Request) -> None:
        held[request.request_id] = request
        own_add(request)

    def abort(request_id: str) -> Request | None:
        held.pop(request_id, None)
        return own_abort(request_id)

    def schedule() -> StepPlan:
        plan = own_schedule()
        if fault := _fault(plan, held):
            raise PluginError(f"{name}.schedule() {fault}")
        return plan

    def update(plan: StepPlan, result: StepResult) -> StepOutput:
        output: Any = own_update(plan, result)
        if not isinstance(output, StepOutput):
            raise PluginError(f"{name}.update() returned {output!r}, not a StepOutput")
        for request in output.finished:
            held.pop(request.request_id, None)
        return output

    for method in (add_request, abort, schedule, update):
        try:
            setattr(scheduler, method.__name__, method)
        except AttributeError:
            raise PluginError(
                f"{name} lets nobody look at its plans: its {method.__name__} cannot be set on an "
                "object; leave __slots__ and frozen out, or let __slots__ hold '__dict__'"
            ) from None
    return scheduler


def _fault(plan: Any, held: Mapping[str, Request]) -> str:
    """What is wrong with a plan; empty: nothing."""
    if not isinstance(plan, StepPlan):
        return f"returned {plan!r}, not a StepPlan"
    where = f"(step {plan.step})"
    columns = (plan.request_ids, plan.starts, plan.num_tokens, plan.samples)
    if len({len(column) for column in columns}) > 1:
        return f"{where} returned columns of different lengths: a request must be in each"
    if len(set(plan.request_ids)) < len(plan.request_ids):
        twice = next(one for one in plan.request_ids if plan.request_ids.count(one) > 1)
        return f"{where} scheduled request '{twice}' twice: a request is in a step only once"
    rows = zip(plan.request_ids, plan.starts, plan.num_tokens, strict=True)
    for request_id, start, num_tokens in rows:
        request = held.get(request_id)
        if request is None:
            return f"{where} scheduled request '{request_id}', which has ended or never arrived"
        drafts = len(plan.draft_tokens.get(request_id, ()))
        lacked = request.num_tokens + request.num_output_placeholders + drafts - start
        if not 1 <= num_tokens <= lacked:
            return (
                f"{where} scheduled {num_tokens} tokens of request '{request_id}', which lacks "
                f"{lacked}: schedule from 1 to request.num_tokens - request.num_computed_tokens"
            )
    return ""
