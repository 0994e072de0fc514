"""Speculative decoding in numbers, by vLLM's names: drafts, and what was accepted by position."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
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

    drafts: Counter[tuple[int, int]] = field(default_factory=Counter)
    """How many drafts had so many tokens verified, and so many of these accepted."""
    draft_s: float = 0.0
    """Time that making drafts took (seconds)."""

    def add(self, record: StepRecord) -> None:
        """Count a run of steps; with drafts it is one step."""
        seconds = record.result.parts.get("draft_s")
        if seconds is not None:
            self.draft_s += float(np.sum(seconds))
        plan = record.run.plan
        drafted = plan.draft_tokens
        if drafted:
            emitted = zip(plan.request_ids, record.result.num_emitted, strict=True)
            rows = [(name, count) for name, count in emitted if count and name in drafted]
            self.drafts.update([(len(drafted[name]), count - 1) for name, count in rows])

    @property
    def num_drafts(self) -> int:
        """Drafts that were verified."""
        return self.drafts.total()

    @property
    def draft_tokens_per_pos(self) -> list[int]:
        """Draft tokens that were verified, by their position in the draft."""
        return self._per_pos(lambda drafted, accepted: drafted)

    @property
    def reached_per_pos(self) -> list[int]:
        """Those of them before which all were accepted."""
        return self._per_pos(lambda drafted, accepted: min(drafted, accepted + 1))

    @property
    def accepted_per_pos(self) -> list[int]:
        """Those that were accepted."""
        return self._per_pos(lambda drafted, accepted: accepted)

    def _per_pos(self, upto: Callable[[int, int], int]) -> list[int]:
        """How many drafts come to each position, given up to which one each does."""
        longest = max((drafted for drafted, _ in self.drafts), default=0)
        return [
            sum(number for draft, number in self.drafts.items() if position < upto(*draft))
            for position in range(longest)
        ]

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
