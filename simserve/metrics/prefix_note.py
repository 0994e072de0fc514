"""Why a prefix cache that was on never hit: what the prompts themselves allow."""

from __future__ import annotations

from simserve.segments import split_blocks
from simserve.types import TraceRequest
from simserve.workload.prefix_tree import apart

__all__ = ["SharingProbe"]


class SharingProbe:
    """Remembers the first full block of every prompt: a hit has to begin there.

    Only hashes are kept, and only until the first hit; that is all a note needs. If it is known
    that no two prompts begin alike (not `shares_prefixes`), not even those.
    """

    def __init__(self, block_size: int, shares_prefixes: bool) -> None:
        self._block_size = block_size
        self._shares_prefixes = shares_prefixes
        self._seen: dict[int, int] = {}
        """Identity of the first prompt with each content."""
        self._others: set[int] = set()
        """Identities of later ones that differ from it."""
        self._any_long = False
        self._same_content = False
        self._same_identity = False

    def see(self, request: TraceRequest, prompt_len: int) -> None:
        """Take in a prompt. Its last token is always computed, so it must exceed one block."""
        if prompt_len <= self._block_size:
            return
        self._any_long = True
        if not self._shares_prefixes:
            return
        content = self._content(request)
        identity = self._identity(request, content)
        first = self._seen.get(content)
        if first is None:
            self._seen[content] = identity
            return
        self._same_content = True
        if first == identity or identity in self._others:
            self._same_identity = True
        else:
            self._others.add(identity)

    def _identity(self, request: TraceRequest, content: int) -> int:
        """Hash of all that a first block's key is made of."""
        items = tuple(
            [
                (item.identifier, item.offset)
                for item in request.mm_items
                if item.offset < self._block_size
            ]
        )
        if request.cache_salt is None and request.lora_id is None and not items:
            return content
        return hash((content, request.cache_salt, apart(request.lora_id), items))

    def _content(self, request: TraceRequest) -> int:
        """Hash of the tokens of the first block, which the prompt has in full."""
        pieces = next(split_blocks(request.prompt, self._block_size))
        return hash(
            tuple(
                segment[offset : offset + length]
                if isinstance(segment, tuple)
                else (apart(segment), offset, length)
                for segment, offset, length in pieces
            )
        )

    def note(self, num_lookups: int, num_evicted: int) -> str:
        """A sentence on why no lookup hit."""
        size = self._block_size
        if not num_lookups:
            return "No hits: no prompt was looked up in the prefix cache."
        if not self._any_long:
            return f"No hits: no prompt is longer than one block of {size} tokens."
        if not self._same_content:
            return f"No hits: no two prompts begin with a common full block of {size} tokens."
        if not self._same_identity:
            return (
                "No hits: prompts with a common first block differ in cache salt, LoRA or "
                "multimodal items."
            )
        if num_evicted:
            return (
                f"No hits: prompts share a first block, but {num_evicted} cached blocks were "
                "evicted; the shared ones were gone when they were asked for again."
            )
        return (
            "No hits: prompts share a first block, but it was not in the cache when the later "
            "one was admitted."
        )
