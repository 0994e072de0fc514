"""What Triton's compiler tells kernels apart by, recorded instead of launching them.

Triton is imported in the functions alone: its library is decorated when it is first imported, and
this module may be imported before a test has said that kernels are interpreted.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

import pytest

__all__ = ["recorded_keys"]


@contextmanager
def recorded_keys(monkeypatch: pytest.MonkeyPatch) -> Iterator[set[str]]:
    """Collect the keys of all launches within the block; nothing is computed by them.

    The compiler makes a key of dtypes, of integers that are 1 or multiples of 16, of pointers that
    are, of constants and of the launch's options. Its own code does that here.
    """
    from triton.runtime.interpreter import InterpretedFunction

    found: set[str] = set()

    def run(kernel: Any, *args: Any, grid: Any, warmup: bool, **options: Any) -> None:
        bound, specialization, rest = _binder(kernel)(*args, **options)
        named = dict(zip(bound, specialization, strict=True))
        found.add(f"{kernel.fn.__name__}: {named} {rest}")

    with monkeypatch.context() as patch:
        patch.setattr(InterpretedFunction, "run", run)
        yield found


@cache
def _binder(kernel: Any) -> Any:
    from triton.backends.compiler import GPUTarget
    from triton.compiler.compiler import make_backend
    from triton.runtime.jit import JITFunction, create_function_from_signature

    compiled = JITFunction(kernel.fn, **kernel.kwargs)
    backend = make_backend(GPUTarget("cuda", 90, 32))
    return create_function_from_signature(compiled.signature, compiled.params, backend)
