"""Triton's interpreter without the work whose results it throws away."""

from __future__ import annotations

from collections.abc import Callable
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
    interpreter._get_np_dtype = remembered(interpreter._get_np_dtype)
    remember_types()


def remembered(numpy_type: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """The function, called once for every type of a tensor."""
    found: dict[str, Any] = {}

    def look_up(dtype: Any) -> Any:
        if dtype.name not in found:
            found[dtype.name] = numpy_type(dtype)
        return found[dtype.name]

    return look_up


def remember_types() -> None:
    """Describe each type of a tensor once.

    Triton 3.6 writes the names of a block's type and of its shape's type out for every tensor that
    an operation gives.
    """
    from triton.language import core

    describe_tuple, describe_block = core._type_for_tuple_values, core.block_type.__init__
    tuples: dict[tuple[int, ...], Any] = {}
    blocks: dict[tuple[str, Any, tuple[int, ...]], dict[str, Any]] = {}

    def numbers_of(values: Any) -> tuple[int, ...] | None:
        numbers = tuple(x.value if type(x) is core.constexpr else x for x in values)
        return numbers if all(type(x) is int for x in numbers) else None

    def tuple_type(values: Any, fields: Any = None) -> Any:
        numbers = numbers_of(values)
        if numbers is None or fields is not None:
            return describe_tuple(values, fields)
        if numbers not in tuples:
            tuples[numbers] = describe_tuple(values)
        return tuples[numbers]

    def block_type(self: Any, element_ty: Any, shape: Any) -> None:
        numbers = None if isinstance(shape, core.constexpr) else numbers_of(shape)
        if numbers is None or not isinstance(element_ty, core.dtype):
            describe_block(self, element_ty, shape)
            return
        key = element_ty.name, getattr(element_ty, "address_space", None), numbers
        if key not in blocks:
            describe_block(self, element_ty, shape)
            blocks[key] = vars(self).copy()
        vars(self).update(blocks[key])

    core._type_for_tuple_values, core.block_type.__init__ = tuple_type, block_type
