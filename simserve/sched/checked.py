"""Looks at every plan of a scheduler of the user's own, so that a wrong one is an error."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from simserve.errors import PluginError
from simserve.types import Request, StepOutput, StepPlan, StepResult

__all__ = ["checked"]

_HELD = "_held_by_checked"
"""Attribute of a scheduler: its requests by id. To ask it for all of them in every step would take
as long as its queue is."""


def checked(cls: type[Any]) -> type[Any]:
    """`cls`, with a look at each plan that it returns.

    A subclass, so that all else of it is as it was. Its `schedule()` and `update()` raise
    PluginError, naming the class, if `schedule()` returns no plan, schedules a request that it does
    not hold, one twice, or for no tokens or more than it lacks, or if `update()` returns no output.
    """
    name = f"{cls.__module__}:{cls.__qualname__}"

    def add_request(self: Any, request: Request) -> None:
        self.__dict__.setdefault(_HELD, {})[request.request_id] = request
        cls.add_request(self, request)

    def abort(self: Any, request_id: str) -> Request | None:
        self.__dict__.get(_HELD, {}).pop(request_id, None)
        request: Request | None = cls.abort(self, request_id)
        return request

    def schedule(self: Any) -> StepPlan:
        plan = cls.schedule(self)
        if fault := _fault(plan, self.__dict__.get(_HELD, {})):
            raise PluginError(f"{name}.schedule() {fault}")
        checked_plan: StepPlan = plan
        return checked_plan

    def update(self: Any, plan: StepPlan, result: StepResult) -> StepOutput:
        output = cls.update(self, plan, result)
        if not isinstance(output, StepOutput):
            raise PluginError(f"{name}.update() returned {output!r}, not a StepOutput")
        for request in output.finished:
            self.__dict__[_HELD].pop(request.request_id, None)
        return output

    names = {"__module__": cls.__module__, "__qualname__": cls.__qualname__}
    methods = {one.__name__: one for one in (add_request, abort, schedule, update)}
    with_looks: type[Any] = type(cls.__name__, (cls,), {**names, **methods, "__doc__": cls.__doc__})
    return with_looks


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
