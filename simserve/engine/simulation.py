"""Runs an engine to its end. The only place that makes a SimPy environment."""

from __future__ import annotations

import gc
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from inspect import unwrap
from typing import NamedTuple

import simpy

from simserve.engine.loop import Engine, EngineParts
from simserve.engine.loop_async import AsyncEngine
from simserve.errors import counted

__all__ = ["Outcome", "Progress", "ctrl_c_calls", "simulate"]

Progress = Callable[[float, int, int | None], object]
"""Called after each step with the simulated time (s), requests done, and requests in all."""


class Outcome(NamedTuple):
    """How a simulation ended."""

    status: str
    """completed, interrupted (Ctrl-C), deadlock, livelock or max_steps."""
    now_s: float
    num_steps: int
    complaint: str
    """For a deadlock or livelock: who waits for what. Else empty."""


def simulate(
    parts: EngineParts, *, async_scheduling: bool = False, progress: Progress | None = None
) -> Outcome:
    """Run until nothing is left to do, nothing can be done any more, or Ctrl-C.

    Ctrl-C ends the simulation after the step in progress, with a consistent record.
    """
    env = simpy.Environment()
    engine = (AsyncEngine if async_scheduling else Engine)(env, parts, progress)
    with ctrl_c_calls(engine.interrupt), _rare_garbage_collection():
        env.run(engine.process)
    parts.recorder.ended(engine.status, engine.now, parts.scheduler.unfinished())
    stalled = engine.status in ("deadlock", "livelock")
    return Outcome(
        engine.status, engine.now, engine.num_steps, _complaint(engine, parts) if stalled else ""
    )


def _complaint(engine: Engine, parts: EngineParts) -> str:
    unfinished = parts.scheduler.unfinished()
    names = ", ".join(
        f"{r.request_id} ({r.status.name.lower()}, {r.num_computed_tokens} of {r.num_tokens} "
        "tokens computed)"
        for r in unfinished[:5]
    )
    return (
        f"{engine.status} at {engine.now:.6f} s: {counted(len(unfinished), 'request')} can never "
        f"make progress: {names}{', …' if len(unfinished) > 5 else ''}. {_cause(engine, parts)}"
    )


def _cause(engine: Engine, parts: EngineParts) -> str:
    kv, unfinished = parts.kv, parts.scheduler.unfinished()
    free = (
        f"{kv.num_free_blocks} of {kv.num_gpu_blocks - 1} usable KV blocks of {kv.block_size} "
        "tokens are free"
    )
    if engine.status == "deadlock" and all(map(kv.can_hold_all, unfinished)):
        kind = type(unwrap(parts.scheduler))  # type: ignore[arg-type]
        return (
            f"{free}, enough for each of them, but {kind.__module__}:{kind.__qualname__} has "
            "planned nothing: its schedule() leaves them waiting for ever."
        )
    return f"{free}. Give the KV cache more blocks (kv_cache.num_gpu_blocks)."


@contextmanager
def _rare_garbage_collection() -> Iterator[None]:
    """A simulation makes many objects and few cycles; looking for them takes a tenth of it."""
    before = gc.get_threshold()
    gc.set_threshold(100_000, 50, 100)
    try:
        yield
    finally:
        gc.set_threshold(*before)


@contextmanager
def ctrl_c_calls(action: Callable[[], None]) -> Iterator[None]:
    """While it lasts, Ctrl-C calls `action` instead of raising (in the main thread)."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGINT, lambda *_: action())
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
