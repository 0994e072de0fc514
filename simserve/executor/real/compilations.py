"""Counts the kernel variants that Triton compiles or loads: such a step is slow once."""

from __future__ import annotations

from typing import Any, ClassVar

__all__ = ["Compilations"]


class Compilations:
    """How many variants have come up so far, if Triton is there and tells.

    Triton takes one hook: all who count share it.
    """

    count: ClassVar[int] = 0

    def __init__(self) -> None:
        try:
            from triton import knobs
        except ImportError:  # no triton, or one from before it had this hook
            return
        knobs.runtime.jit_post_compile_hook = Compilations._compiled

    @classmethod
    def _compiled(cls, **facts: Any) -> None:
        cls.count += 1
