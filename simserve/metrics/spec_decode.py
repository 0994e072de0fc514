"""Speculative decoding in numbers, by vLLM's names: drafts, and what was accepted by position."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

from simserve.protocols import StepRecord

if TYPE_CHECKING:
    from simserve.metrics.options import Scalar

__all__ = ["SpecDecode"]


@dataclass(slots=True)
class SpecDecode:
    """Counts of all steps so far. A draft is all draft tokens of one request in one step."""

    num_drafts: int = 0
    draft_tokens_per_pos: list[int] = field(default_factory=list)
    """Draft tokens that were verified, by their position in the draft."""
    reached_per_pos: list[int] = field(default_factory=list)
    """Those of them before which all were accepted."""
    accepted_per_pos: list[int] = field(default_factory=list)
    draft_s: float = 0.0
    """Time that making drafts took (seconds)."""

    def add(self, record: StepRecord) -> None:
        """Count a run of steps; with drafts it is one step."""
        seconds = record.result.parts.get("draft_s")
        if seconds is not None:
            self.draft_s += float(np.sum(seconds))
        drafted = record.run.plan.draft_tokens
        if not drafted:
            return
        emitted = record.result.num_emitted
        for request_id, count in zip(record.run.plan.request_ids, emitted, strict=True):
            if request_id in drafted and count:
                self._count(len(drafted[request_id]), count - 1)

    def _count(self, num_drafted: int, num_accepted: int) -> None:
        self.num_drafts += 1
        reached = min(num_drafted, num_accepted + 1)
        for counts, upto in (
            (self.draft_tokens_per_pos, num_drafted),
            (self.reached_per_pos, reached),
            (self.accepted_per_pos, num_accepted),
        ):
            counts.extend([0] * (num_drafted - len(counts)))
            for position in range(upto):
                counts[position] += 1

    def summary(self, total_s: float) -> dict[str, Scalar]:
        """Keys of a run's summary; none if nothing was ever drafted.

        Args:
            total_s: time of all steps.
        """
        if not self.num_drafts:
            return {}
        drafted, accepted = sum(self.draft_tokens_per_pos), sum(self.accepted_per_pos)
        found: dict[str, Scalar] = {
            "spec_decode_num_drafts": self.num_drafts,
            "spec_decode_num_draft_tokens": drafted,
            "spec_decode_num_accepted_tokens": accepted,
            "spec_decode_mean_acceptance_length": 1 + accepted / self.num_drafts,
            "spec_decode_draft_acceptance_rate": accepted / drafted,
            "spec_decode_draft_share": self.draft_s / total_s if total_s else None,
        }
        every = [self.num_drafts] * len(self.accepted_per_pos)
        found |= self._by_position("spec_decode_acceptance_rate_pos", every)
        reached = self.reached_per_pos
        return found | self._by_position("spec_decode_conditional_acceptance_pos", reached)

    def _by_position(self, name: str, among: Sequence[int]) -> dict[str, Scalar]:
        pairs = zip(self.accepted_per_pos, among, strict=True)
        return {
            f"{name}_{position}": accepted / total if total else None
            for position, (accepted, total) in enumerate(pairs)
        }
