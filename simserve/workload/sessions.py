"""Multi-turn sessions: turns that contain the turns before them, made up or found in a trace.

A session is a list of requests. Its first waits for nobody; each other one has a `parent` earlier
in the list. How turns become requests over time is a matter of the workload source.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from simserve.errors import TraceError
from simserve.segments import Segments
from simserve.types import TraceRequest
from simserve.workload.arrivals import ArrivalProcess
from simserve.workload.lengths import Length
from simserve.workload.streams import Stream, generator
from simserve.workload.synthetic import SharedPrefix, prefix_choice

__all__ = [
    "Session",
    "SyntheticSessions",
    "generate_sessions",
    "group_sessions",
    "in_arrival_order",
]

Session = Sequence[TraceRequest]


@dataclass(frozen=True, slots=True, kw_only=True)
class SyntheticSessions:
    """Multi-turn conversations.

    `arrival` places the first turns. The prompt of each further turn is the whole previous
    prompt, the previous output, then `prompt_len` new tokens.
    """

    num_sessions: int
    arrival: ArrivalProcess
    num_turns: Length
    prompt_len: Length
    """New tokens of each turn; the first turn's come after the shared prefix, if there is one."""
    output_len: Length
    think_time_s: float = 0.0
    """Time between the end of a turn and the start of the next: its mean, if it varies."""
    think_time: Literal["constant", "exponential"] = "constant"
    shared_prefix: SharedPrefix | None = None
    seed: int = 0

    def __post_init__(self) -> None:
        if self.num_sessions < 1:
            raise ValueError(f"num_sessions must be at least 1, got {self.num_sessions}")
        if not 0 <= self.think_time_s < np.inf:
            raise ValueError(f"think_time_s must be at least 0 and finite, got {self.think_time_s}")
        if self.think_time not in ("constant", "exponential"):
            raise ValueError(f"think_time must be constant or exponential, got '{self.think_time}'")
        if self.seed < 0:
            raise ValueError(f"seed must be at least 0, got {self.seed}")
        prefix = self.shared_prefix
        if prefix is not None and prefix.prompts_per_group is not None:
            grouped = prefix.num_groups * prefix.prompts_per_group
            if grouped != self.num_sessions:
                raise ValueError(
                    f"num_sessions is {self.num_sessions}, but num_groups * prompts_per_group "
                    f"is {grouped}"
                )

    def turns(self) -> NDArray[np.int64]:
        """Number of turns of each session, shape [num_sessions]; their sum is that of requests."""
        return self.num_turns.draw(generator(self.seed, Stream.NUM_TURNS), self.num_sessions)


def generate_sessions(spec: SyntheticSessions) -> Iterator[list[TraceRequest]]:
    """The sessions in order of their first turns, made as they are asked for.

    Turn j of session i is called `s<i>/t<j>`, its new tokens are the segment `s<i>/t<j>/user`.
    `arrival_s` of a later turn is its earliest start: think times after the first turn's arrival.
    """
    turns = spec.turns()
    groups, prefixes = prefix_choice(spec.shared_prefix, spec.seed, spec.num_sessions)
    prompt_rng, output_rng, think_rng = (
        generator(spec.seed, stream)
        for stream in (Stream.PROMPT_LEN, Stream.OUTPUT_LEN, Stream.THINK_TIME)
    )
    first = 0
    for times_s in spec.arrival.times(generator(spec.seed, Stream.ARRIVALS), spec.num_sessions):
        chunk = slice(first, first + len(times_s))
        total = int(turns[chunk].sum())
        prompt_lens = spec.prompt_len.draw(prompt_rng, total).tolist()
        output_lens = spec.output_len.draw(output_rng, total).tolist()
        thinks_s = np.full(total, spec.think_time_s)
        if spec.think_time == "exponential":
            thinks_s = think_rng.exponential(spec.think_time_s, total)
        steps = iter(zip(prompt_lens, output_lens, thinks_s.tolist(), strict=True))
        heads = zip(turns[chunk].tolist(), groups[chunk].tolist(), times_s.tolist(), strict=True)
        for i, (count, group, arrival_s) in enumerate(heads, first):
            drawn = [next(steps) for _ in range(count)]
            yield _session(f"s{i}", arrival_s, prefixes[group], drawn)
        first = chunk.stop


def _session(
    name: str, arrival_s: float, prefix: Segments, drawn: Iterable[tuple[int, int, float]]
) -> list[TraceRequest]:
    """One session from its turns' (new tokens, output tokens, think time before the turn)."""
    session: list[TraceRequest] = []
    history, parent = prefix, None
    for turn, (prompt_len, output_len, think_time_s) in enumerate(drawn):
        request_id = f"{name}/t{turn}"
        wait_s = think_time_s if turn else 0.0
        arrival_s += wait_s
        request = TraceRequest(
            request_id=request_id,
            arrival_s=arrival_s,
            prompt=(*history, (f"{request_id}/user", prompt_len)),
            output_len=output_len,
            session=name,
            turn=turn,
            parent=parent,
            think_time_s=wait_s,
        )
        session.append(request)
        history, parent = request.prompt + request.output_parts, request_id
    return session


def in_arrival_order(sessions: Iterable[Session]) -> Iterator[TraceRequest]:
    """All turns of sessions by `arrival_s` (open loop), holding only the sessions that overlap.

    Sessions come in the order of their first turns; ties keep the order of the sessions.
    """
    ahead: list[tuple[float, int, TraceRequest]] = []
    count = 0
    for session in sessions:
        while ahead and ahead[0][0] < session[0].arrival_s:
            yield heapq.heappop(ahead)[2]
        for request in session:
            heapq.heappush(ahead, (request.arrival_s, count, request))
            count += 1
    while ahead:
        yield heapq.heappop(ahead)[2]


def group_sessions(requests: Iterable[TraceRequest]) -> Iterator[list[TraceRequest]]:
    """Bring the turns of each session of a trace together; sessions by first arrival.

    Reads the whole trace. A request whose parent is not in the trace (cut off, or dropped by a
    transform) begins a session of its own.

    Raises:
        TraceError: two requests share an id, or requests are each other's parents.
    """
    by_id: dict[str, TraceRequest] = {}
    children: dict[str, list[TraceRequest]] = {}
    for request in requests:
        if by_id.setdefault(request.request_id, request) is not request:
            raise TraceError(f"request '{request.request_id}': request_id: occurs twice")
        if request.parent is not None:
            children.setdefault(request.parent, []).append(request)
    roots = [r for r in by_id.values() if r.parent is None or r.parent not in by_id]
    num_grouped = 0
    for root in sorted(roots, key=lambda request: request.arrival_s):
        session = [root]
        for request in session:
            session += children.pop(request.request_id, ())
        num_grouped += len(session)
        yield session
    if num_grouped < len(by_id):
        name = next(iter(children))
        raise TraceError(f"request '{name}': parent: requests wait for each other in a circle")
