"""Counts the kernel variants that Triton compiles or loads: such a step is slow once."""

from __future__ import annotations

from typing import Any

__all__ = ["Compilations"]


class Compilations:
    """How many variants have come up so far, if Triton is there and tells."""

    def __init__(self) -> None:
        self.count = 0
        try:
            from triton import knobs
        except ImportError:  # no triton, or one from before it had this hook
            return
        knobs.runtime.jit_post_compile_hook = self._compiled

    def _compiled(self, **facts: Any) -> None:
        self.count += 1
