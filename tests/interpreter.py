"""Triton's interpreter without the work whose results it throws away."""

from __future__ import annotations

from typing import Any

__all__ = ["hasten"]


def hasten() -> None:
    """Make interpreted kernels several times as fast; what they compute stays the same.

    Triton 3.6 patches the whole of `triton.language` at each call of a device function, though one
    launch needs that once. And it computes every integer operation again in 64 bits, to look for an
    overflow that it reports in its debugging mode only, which nothing here turns on.
    """
    from triton.runtime import interpreter

    builder, patch = interpreter.interpreter_builder, interpreter._patch_lang
    if not builder.options.sanitize_overflow:
        return
    assert not builder.options.debug
    builder.options = interpreter.InterpreterOptions(sanitize_overflow=False)
    patched: set[tuple[int, ...]] = set()

    def patch_once(function: Any) -> Any:
        languages = (interpreter.tl, interpreter.tl.core)
        mine = tuple(i for i, x in enumerate(languages) if x in function.__globals__.values())
        if mine in patched:
            return interpreter._LangPatchScope()
        patched.add(mine)
        patch(function)
        return interpreter._LangPatchScope()

    interpreter._patch_lang = patch_once
