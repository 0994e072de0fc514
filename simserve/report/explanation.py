"""One request's time in words: a paragraph, a bar along the clock, and a line a part."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np

from simserve.errors import RunDirectoryError, did_you_mean
from simserve.metrics.arrow import column
from simserve.metrics.result import RunResult
from simserve.report.blame import Culprit, Ledger
from simserve.report.division import Divider, Division, Floats, Ints, Part

__all__ = ["Explanation", "explain", "slowest"]

BAR_WIDTH = 72
SEEN = 0.01
"""A part of at least this share has a cell of the bar."""
NAMED = 3
"""Culprits that are named; the others are counted."""
LISTED_CHUNKS = 6
TIMES = {1: "once", 2: "twice"}

GLYPHS = {
    Part.ARRIVING: ("·", "waited for a step to end"),
    Part.QUEUED: ("░", "in the queue"),
    Part.PREFILL: ("█", "prefill"),
    Part.HELD: ("-", "admitted, no tokens"),
    Part.PREEMPTED: ("x", "preempted"),
    Part.RECOMPUTED: ("▓", "prefill after preemption"),
    Part.DECODE: ("=", "decode"),
    Part.STALLED: ("!", "decode stalled"),
}

STOPS = {
    "budget": "the step's token budget was spent",
    "max_num_seqs": "max_num_seqs requests were running",
    "blocks": "too few KV blocks were free",
    "preemption": "somebody had just been preempted",
    "empty": "its turn had not come",
}
"""Why nobody more was admitted, for the words of the steps table."""


@dataclass(frozen=True, slots=True)
class Explanation:
    """What happened to one request."""

    request_id: str
    paragraph: str
    division: Division

    @property
    def bar(self) -> str:
        """The request's time from left to right, in a glyph a cell. Parts have cells in proportion
        to their time, and each of at least a percent has one."""
        starts, ends = self.division.start_s, self.division.end_s
        if not len(starts):
            return ""
        edges = np.linspace(starts[0], ends[-1], BAR_WIDTH + 1)
        cells = []
        for left, right in pairwise(edges):
            overlap = np.clip(np.minimum(ends, right) - np.maximum(starts, left), 0.0, None)
            cells.append(np.bincount(self.division.parts, overlap, minlength=len(Part)))
        return "".join(GLYPHS[Part(part)][0] for part in _shown(np.stack(cells)))

    @property
    def rows(self) -> list[tuple[str, str, float, float]]:
        """Glyph, name, milliseconds and share of every part that took time, in order."""
        total = float(self.division.duration_s.sum())
        found = [(part, self.division.seconds(part)) for part in Part]
        return [
            (*GLYPHS[part], 1000.0 * seconds, seconds / total)
            for part, seconds in found
            if seconds > 0
        ]


def explain(result: RunResult, request_id: str, where: str = "the run") -> Explanation:
    """Say where the time of a request went.

    Raises:
        RunDirectoryError: `where` has no such request.
    """
    ids: list[str] = result.requests_table["request_id"].to_pylist()
    if request_id not in ids:
        near = did_you_mean(request_id, ids) or f"; its {len(ids):,} requests begin with {ids[:3]}"
        raise RunDirectoryError(f"{where}: has no request '{request_id}'{near}")
    row = ids.index(request_id)
    divider = Divider(result)
    teller = _Teller(result, divider, row, ids)
    return Explanation(request_id, " ".join(teller.sentences()), teller.division)


def slowest(result: RunResult, metric: str, where: str = "the run") -> str:
    """The id of the request with the largest `ttft` or `e2el`, the first of equals.

    Raises:
        RunDirectoryError: no request of `where` has one.
    """
    values = column(result.requests_table, f"{metric}_ms")
    if np.isnan(values).all():
        raise RunDirectoryError(f"{where}: no request got as far as its {metric.upper()}")
    name: str = result.requests_table["request_id"][int(np.nanargmax(values))].as_py()
    return name


class _Teller:
    """Finds the words for one request."""

    def __init__(self, result: RunResult, divider: Divider, row: int, ids: Sequence[str]) -> None:
        self.facts: dict[str, Any] = result.requests_table.slice(row, 1).to_pylist()[0]
        self.division = divider.divide(row)
        self._divider = divider
        self._ledger = Ledger(divider) if divider.knows_chunks else None
        self._row = row
        self._ids = ids
        self._stops: list[str] = result.steps_table["admission_stop"].to_pylist()

    def sentences(self) -> Iterator[str]:
        """The paragraph, part by part."""
        yield from self._head()
        yield from self._queue()
        yield from self._prefill()
        yield from self._preemptions()
        yield from self._decode()
        if self._ledger is None:
            yield (
                "This run directory does not tell in which steps prompts were computed: run it "
                "again to see each chunk, and who stalled whom."
            )

    def _head(self) -> Iterator[str]:
        facts = self.facts
        kind = f" ({facts['class']})" if facts["class"] else ""
        cached = facts["cached_tokens"]
        found = f", {cached:,} of them found in the prefix cache" if cached else ""
        yield (
            f"{facts['request_id']}{kind} brought a prompt of {facts['input_length']:,} tokens"
            f"{found}, at {facts['arrival_time_s']:.3f} s."
        )
        if facts["status"] == "rejected":
            yield f"It was rejected: {facts['error']}."
        elif facts["e2el_ms"] is not None and facts["status"] == "completed":
            tokens = "1 token" if (n := facts["output_length"]) == 1 else f"{n:,} tokens"
            yield (
                f"It got {tokens} in {_ms(facts['e2el_ms'] / 1000)}, "
                f"the first after {_ms(facts['ttft_ms'] / 1000)}."
            )
        else:
            yield f"At the end of the run it was {facts['status']}."

    def _queue(self) -> Iterator[str]:
        arriving, queued = (self.division.seconds(part) for part in (Part.ARRIVING, Part.QUEUED))
        if arriving:
            yield f"A step was running when it came, and went on for {_ms(arriving)}."
        if not queued:
            if self.facts["scheduled_s"] is not None:
                yield "It did not have to queue."
            return
        piece = int(np.flatnonzero(self.division.parts == Part.QUEUED)[0])
        start, end = self.division.start_s[piece], self.division.end_s[piece]
        ends = self._divider.end_s
        steps = np.arange(
            np.searchsorted(ends, start, side="right"), np.searchsorted(ends, end, side="right")
        )
        waited = np.diff(ends[steps], prepend=start)
        yield f"It queued for {_ms(queued)}{self._why(steps, waited)}."
        prompts = self._behind(steps, waited, "Meanwhile prompts were computed: that of ")
        if prompts:
            yield f"{prompts}."

    def _why(self, steps: Ints, waited: Floats) -> str:
        """What ended admission in these steps."""
        shares: dict[str, float] = {}
        for step, seconds in zip(steps.tolist(), waited.tolist(), strict=True):
            shares[self._stops[step]] = shares.get(self._stops[step], 0.0) + seconds
        total = sum(shares.values()) or 1.0
        reasons = [
            f"{STOPS.get(stop, stop)} ({100 * seconds / total:.0f} % of the time)"
            for stop, seconds in sorted(shares.items(), key=lambda item: (-item[1], item[0]))
            if seconds / total >= 0.01
        ]
        if len(reasons) == 1:
            reasons = [reasons[0].rpartition(" (")[0]]
        return f": {', '.join(reasons)}" if reasons else ""

    def _prefill(self) -> Iterator[str]:
        is_chunk = self.division.parts == Part.PREFILL
        if is_chunk.any():
            seconds = _ms(self.division.seconds(Part.PREFILL))
            chunks = self.division.num_tokens[is_chunk].tolist()
            if min(chunks) < 0:
                yield f"Its prompt took {seconds}."
            elif len(chunks) == 1:
                yield f"Its prompt was computed in one step of {seconds}."
            else:
                listed = [f"{count:,}" for count in chunks[:LISTED_CHUNKS]]
                listed += ["…"] if len(chunks) > LISTED_CHUNKS else []
                yield (
                    f"Its prompt was computed in {len(chunks)} chunks ({', '.join(listed)} tokens) "
                    f"in steps that took {seconds}."
                )
        held = self.division.parts == Part.HELD
        if held.any():
            steps, lost = self.division.step[held], self.division.duration_s[held]
            yield (
                f"In {len(steps)} steps ({_ms(float(lost.sum()))}) it got no tokens although it "
                f"was admitted{self._behind(steps, lost, ', behind the prompt of ')}."
            )

    def _preemptions(self) -> Iterator[str]:
        count = self.facts["num_preemptions"]
        if not count:
            return
        out, after = (self.division.seconds(p) for p in (Part.PREEMPTED, Part.RECOMPUTED))
        facts = [f"was preempted {TIMES.get(count, f'{count} times')}"]
        facts += [f"stayed out for {_ms(out)}"] if out else []
        facts += [f"then spent {_ms(after)} in steps with chunks of it"] if after else []
        recomputed = self.facts["recomputed_tokens"]
        again = f"; {recomputed:,} tokens were computed a second time" if recomputed else ""
        yield f"It {_joined(facts)}{again}."

    def _decode(self) -> Iterator[str]:
        decode = self.division.seconds(Part.DECODE)
        if not decode:
            return
        is_decode = self.division.parts == Part.DECODE
        num_steps = int(is_decode.sum())
        yield f"Decoding took {_ms(decode)} in {num_steps:,} steps."
        stalled = self.division.parts == Part.STALLED
        if stalled.any():
            steps, lost = self.division.step[stalled], self.division.duration_s[stalled]
            yield (
                f"{len(steps):,} of them took {_ms(float(lost.sum()))} longer than a step that "
                "only decodes, because they also computed prompts"
                f"{self._behind(steps, lost, ': that of ')}."
            )
            worst = int(np.argmax(lost))
            yield (
                f"The worst one cost {_ms(float(lost[worst]))}, at "
                f"{self._divider.end_s[steps[worst]]:.3f} s."
            )

    def _behind(self, steps: Ints, seconds: Floats, before: str) -> str:
        """Who computed prompts in these steps, and what each cost; nothing if nobody did."""
        if self._ledger is None:
            return ""
        found = self._ledger.culprits(steps, seconds, self._row)
        if not found:
            return ""
        named = [self._named(culprit) for culprit in found[:NAMED]]
        rest = found[NAMED:]
        if rest:
            lost = _ms(sum(culprit.seconds for culprit in rest))
            named.append(f"{len(rest):,} more ({lost})")
        return before + _joined(named)

    def _named(self, culprit: Culprit) -> str:
        name = self._ids[culprit.row]
        return f"{name} ({culprit.num_tokens:,} tokens, {_ms(culprit.seconds)})"


def _shown(seconds: Floats) -> list[int]:
    """Which part each cell shows, of `seconds` of shape [cells, parts].

    Of the parts in a cell it is the one that lacks most. What a cell does not show is owed, or many
    short pieces between longer ones would never be seen.
    """
    shown, owed = [], np.zeros(seconds.shape[1])
    for cell in seconds:
        owed += cell
        shown.append(int(np.argmax(np.where(cell > 0.0, owed, -np.inf))))
        owed[shown[-1]] -= cell.sum()
    totals = seconds.sum(axis=0)
    for part in np.flatnonzero(totals >= SEEN * totals.sum()).tolist():
        if part not in shown:
            _give_cell(shown, part, seconds[:, part])
    return shown


def _give_cell(shown: list[int], part: int, seconds: Floats) -> None:
    """Show a part where it has most time, or next to it, but in nobody's only cell."""
    middle = float(np.average(np.arange(len(seconds)), weights=seconds))
    spare = [place for place, other in enumerate(shown) if shown.count(other) > 1]
    place = max(spare, key=lambda one: (seconds[one], -abs(one - middle)))
    shown[place] = part


def _joined(texts: Sequence[str]) -> str:
    """Texts as a list in a sentence.

    >>> _joined(["a"]), _joined(["a", "b", "c"])
    ('a', 'a, b and c')
    """
    return " and ".join(filter(None, (", ".join(texts[:-1]), texts[-1])))


def _ms(seconds: float) -> str:
    """Milliseconds to three digits, the zeros at their end too.

    >>> _ms(0.0015), _ms(0.05), _ms(0.09996), _ms(1.2345)
    ('1.50 ms', '50.0 ms', '100 ms', '1,234 ms')
    """
    value = 1000.0 * seconds
    text = f"{value:,.0f}" if value >= 100 else f"{value:#.3g}".rstrip(".")
    return f"{text} ms"
