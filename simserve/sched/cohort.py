"""The leading running requests that decode in step: one token each, in every step, till one ends.

Their counts follow from a common pace, so that a step of hundreds of them, or a run of such steps,
is decided without looking at any.
"""

from __future__ import annotations

from collections.abc import Sequence
from heapq import heappop, heappush

from simserve.protocols import Decodes, Grown
from simserve.types import Pace, Request, StepPlan

__all__ = ["Cohort"]


class Cohort:
    """Requests at the front of the running list, in its order. It is handed that list each time.

    Args:
        decodes: their blocks.
        max_model_len: most tokens of a request.
        ahead: 1 if a step is planned before the tokens of the one before are known, else 0.
    """

    def __init__(self, decodes: Decodes, max_model_len: int, ahead: int = 0) -> None:
        self._decodes = decodes
        self._ahead = ahead
        self._longest = max_model_len - ahead
        """With more tokens, a request would be passed over in the last of its steps."""
        self._pace = Pace()
        self.ids: list[str] = []
        """Their requests' ids."""
        self._offsets: list[int] = []
        """Computed tokens of each, less the steps scheduled."""
        self._ends: list[tuple[int, int, Request]] = []
        """Heap: (updates after which it ends, order of joining, request)."""
        self._num_joined = 0

    def __len__(self) -> int:
        return len(self.ids)

    def take_in(self, running: Sequence[Request]) -> None:
        """Let the next requests join, as far as they want one token and have not got them all."""
        pace, ahead = self._pace, self._ahead
        for request in running[len(self.ids) :]:
            num_tokens = request.num_tokens
            left = request.stop_len - num_tokens
            if num_tokens + ahead - request.num_computed_tokens != 1 or left < 1:
                return
            if ahead and (request.num_output_placeholders != 1 or request.stop_len > self._longest):
                return
            if not self._decodes.add(request):
                return
            self.ids.append(request.request_id)
            self._offsets.append(request.join(pace))
            heappush(self._ends, (pace.updated + left, self._num_joined, request))
            self._num_joined += 1

    def schedule(self, plan: StepPlan) -> bool:
        """Write the first rows of an empty plan; False, and nothing done, if blocks are lacking."""
        new_blocks = self._decodes.take_slots()
        if new_blocks is None:
            return False
        count, scheduled = len(self.ids), self._pace.scheduled
        plan.request_ids = self.ids.copy()
        plan.starts = [offset + scheduled for offset in self._offsets]
        plan.num_tokens = [1] * count
        plan.samples = [True] * count
        plan.new_blocks = new_blocks
        self._pace.scheduled = scheduled + 1
        return True

    def expect_token(self) -> None:
        """Each gets a placeholder for the token of the step scheduled last."""
        self._pace.placeholders += 1

    def update(self, running: list[Request]) -> list[Request]:
        """Each got its token. Those that now have all they wanted leave the running list, too."""
        pace, ends = self._pace, self._ends
        pace.updated += 1
        pace.placeholders -= self._ahead
        finished: list[Request] = []
        while ends and ends[0][0] <= pace.updated:
            request = heappop(ends)[2]
            place = self.ids.index(request.request_id)
            del self.ids[place], self._offsets[place], running[place]
            self._decodes.remove(request)
            request.leave()
            finished.append(request)
        return finished

    def steady_steps(self, head: Request | None) -> int:
        """For how many steps, the one scheduled last included, all go on and blocks last.

        `head` is a waiting request that found too few blocks.
        """
        left = self._ends[0][0] - self._pace.updated
        return 1 + self._decodes.steps_that_fit(left - 1, head) if left > 1 else 1

    def advance(self, count: int) -> Grown:
        """Pass over `count` steps: update and schedule again, each.

        Of steps planned ahead, the first is scheduled after an update that was made already.
        """
        grown = self._decodes.grow(count)
        self._pace.updated += count - self._ahead
        self._pace.scheduled += count
        self._pace.placeholders += self._ahead
        return grown

    def dissolve(self, running: Sequence[Request]) -> None:
        """Every request goes on by itself."""
        for request in running[: len(self.ids)]:
            self._decodes.remove(request)
            request.leave()
        self.ids.clear()
        self._offsets.clear()
        self._ends.clear()
