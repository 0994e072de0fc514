"""Which token ids a request has: its prompt, and its output as far as it is known beforehand."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from simserve.errors import TraceError
from simserve.segments import Part, segment_tokens
from simserve.types import TraceRequest

__all__ = ["TokenIds"]


class TokenIds:
    """Token ids of the requests that wait or run.

    Args:
        vocab_size: ids are below it.
        replay: the output is known beforehand, as the trace has it; else only what was `said`.
    """

    def __init__(self, vocab_size: int, replay: bool) -> None:
        self._vocab_size = vocab_size
        self._replay = replay
        self._ids: dict[str, NDArray[np.int32]] = {}
        self._said: dict[str, NDArray[np.int32]] = {}
        """Outputs of requests that have ended, by the segment that quotes them."""

    def add(self, request: TraceRequest) -> None:
        """Make the ids of a request that was taken in.

        A prompt that quotes the output of a request which has ended holds what that said; if it
        said less than the trace expected, what follows is made up, as the trace has it.

        Raises:
            TraceError: a literal id is not in the vocabulary.
        """
        parts = request.prompt + (request.output_parts if self._replay else ())
        try:
            ids = [self._part(part) for part in parts]
        except ValueError as error:
            raise TraceError(
                f"request {request.request_id}: {error}; the real executor needs literal token ids "
                "of the model's vocabulary: use the model whose tokens they are, or a trace "
                "without them"
            ) from None
        self._ids[request.request_id] = np.concatenate(ids)

    def _part(self, part: Part) -> NDArray[np.int32]:
        segment, length = part
        ids = segment_tokens(segment, length, self._vocab_size).astype(np.int32)
        said = self._said.get(segment) if isinstance(segment, str) else None
        if said is not None:
            said = said[:length]
            ids[: len(said)] = said
        return ids

    def ids(self, request_id: str) -> NDArray[np.int32]:
        """All ids that are known of a request beforehand, from its first token."""
        return self._ids[request_id]

    def said(self, request: TraceRequest, output: Sequence[int]) -> None:
        """What a request has put out, now that it has ended; later prompts may quote it."""
        segment, _ = request.output_parts[0]
        if isinstance(segment, str):
            self._said[segment] = np.array(output, dtype=np.int32)

    def forget(self, request_id: str) -> None:
        """The request has ended."""
        self._ids.pop(request_id, None)
