"""Which token ids a request has: its prompt, and the output that the trace dictates."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from simserve.errors import TraceError
from simserve.segments import tokens
from simserve.types import TraceRequest

__all__ = ["TokenIds"]


class TokenIds:
    """Token ids of the requests that wait or run.

    Args:
        vocab_size: ids are below it.
        replay: the output is known beforehand, as the trace has it; else only what was kept.
    """

    def __init__(self, vocab_size: int, replay: bool) -> None:
        self._vocab_size = vocab_size
        self._replay = replay
        self._ids: dict[str, NDArray[np.int32]] = {}

    def add(self, request: TraceRequest) -> None:
        """Make the ids of a request that was taken in.

        Raises:
            TraceError: a literal id is not in the vocabulary.
        """
        parts = request.prompt + (request.output_parts if self._replay else ())
        try:
            ids = tokens(parts, self._vocab_size)
        except ValueError as error:
            raise TraceError(
                f"request {request.request_id}: {error}; the real executor needs literal token ids "
                "of the model's vocabulary: use the model whose tokens they are, or a trace "
                "without them"
            ) from None
        self._ids[request.request_id] = ids.astype(np.int32)

    def ids(self, request_id: str) -> NDArray[np.int32]:
        """All ids that are known of a request, from its first token."""
        return self._ids[request_id]

    def keep(self, request_id: str, ids: NDArray[np.int32]) -> None:
        """What `ids` answers from now on: the tokens a request had when it lost its place."""
        self._ids[request_id] = ids

    def forget(self, request_id: str) -> None:
        """The request has ended."""
        self._ids.pop(request_id, None)
