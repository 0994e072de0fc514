"""Fixtures of the kernel tests: on a CUDA GPU where there is one, else on the CPU, interpreted."""

from __future__ import annotations

import os
import secrets
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any

import numpy as np
import pytest

from tests.interpreter import hasten

if find_spec("torch") is not None:
    import torch

    # Before anything imports triton, whose own library is decorated at import.
    if not torch.cuda.is_available():
        os.environ["TRITON_INTERPRET"] = "1"

POISON = (2**31 - 1, -1)


def fresh_seed() -> int:
    """Return SIMSERVE_KERNEL_SEED, or a new number that all workers of a parallel run share."""
    chosen = os.environ.get("SIMSERVE_KERNEL_SEED")
    if chosen is not None:
        return int(chosen)
    run = os.environ.get("PYTEST_XDIST_TESTRUNUID")
    return secrets.randbelow(2**20) if run is None else zlib.crc32(run.encode()) % 2**20


@pytest.fixture(scope="session", params=[fresh_seed()], ids=lambda seed: f"seed{seed}")
def seed(request: pytest.FixtureRequest) -> int:
    """Fresh inputs in every run; the test's id says how to draw them again."""
    return int(request.param)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Pass over what the interpreter itself does with numpy."""
    ignored = "ignore:Conversion of an array with ndim > 0:DeprecationWarning"
    for item in items:
        if item.path.parent.name == "kernels":
            item.add_marker(pytest.mark.filterwarnings(ignored))


@pytest.fixture(scope="session")
def device() -> str:
    """Where tensors go: `cuda`, or `cpu` under Triton's interpreter."""
    if torch.cuda.is_available():
        return "cuda"
    mend_interpreter()
    hasten()
    return "cpu"


def mend_interpreter() -> None:
    """Let the interpreter treat bfloat16 as a GPU does.

    That of Triton 3.6 multiplies the bit patterns of bfloat16 matrices, and cuts float32 to
    bfloat16 instead of rounding it.
    """
    from triton.runtime import interpreter

    builder, tl = interpreter.InterpreterBuilder, interpreter.tl
    if hasattr(builder, "mended"):
        return
    create_dot, create_fp_trunc = builder.create_dot, builder.create_fp_trunc

    def dot(self: Any, a: Any, b: Any, *rest: Any) -> Any:
        if a.dtype.scalar == tl.bfloat16:
            a, b = (self.create_fp_ext(operand, tl.float32) for operand in (a, b))
        return create_dot(self, a, b, *rest)

    def truncate(self: Any, src: Any, dst_type: Any) -> Any:
        if (src.dtype.scalar, dst_type.scalar) != (tl.float32, tl.bfloat16):
            return create_fp_trunc(self, src, dst_type)
        rounded = torch.from_numpy(np.array(src.data)).bfloat16().view(torch.int16)
        return interpreter.TensorHandle(rounded.numpy().view(np.uint16), tl.bfloat16)

    builder.create_dot, builder.create_fp_trunc = dot, truncate
    builder.mended = True


@dataclass
class Paged:
    """A paged cache that holds NaN wherever no sequence owns the slot, and its tables."""

    q: Any
    k_cache: Any
    v_cache: Any
    block_table: Any
    seq_lens: Any

    @property
    def tensors(self) -> tuple[Any, ...]:
        """The first five arguments of every attention over the cache."""
        return self.q, self.k_cache, self.v_cache, self.block_table, self.seq_lens


@pytest.fixture
def paged(device: str, seed: int) -> Callable[..., Paged]:
    """Build random sequences in a poisoned cache: see `build` below."""

    def build(
        salt: int,
        seq_lens: list[int],
        *,
        num_tokens: int | None = None,
        num_heads: int = 4,
        num_kv_heads: int = 2,
        head_size: int = 64,
        block_size: int = 16,
        layout: str = "nhd",
        dtype: Any = torch.float32,
        kv_dtype: Any = None,
        k_scale: float = 1.0,
        v_scale: float = 1.0,
        hidden: int | None = None,
    ) -> Paged:
        """Write each sequence's K and V with the reference; leave NaN in every other slot.

        `num_tokens` rows of q, one a sequence if None. `hidden`: the last so many tokens of a
        sequence are kept, all before them poisoned, as blocks outside a sliding window may be.
        """
        from simserve_kernels import layouts, reference

        generator = torch.Generator().manual_seed(seed * 1000 + salt)
        counts = [-(-length // block_size) for length in seq_lens]
        num_blocks = sum(counts) + 3
        order = torch.randperm(num_blocks, generator=generator)
        table = torch.tensor(POISON, dtype=torch.int32).repeat(len(seq_lens), max(counts) + 2)
        table = table[:, : max(counts) + 2].clone()
        shape = layouts.CacheShape(num_blocks, block_size, num_kv_heads, head_size)
        caches = layouts.allocate_cache(shape, layout, kv_dtype or dtype, "cpu")
        for cache in caches:
            cache.copy_(torch.full(cache.shape, float("nan")))
        used = 0
        for i, length in enumerate(seq_lens):
            table[i, : counts[i]] = order[used : used + counts[i]]
            used += counts[i]
            token = torch.arange(length)
            slots = table[i].long()[token // block_size] * block_size + token % block_size
            if hidden is not None:
                slots[: max(0, length - hidden)] = -1
            k, v = torch.randn(2, length, num_kv_heads, head_size, generator=generator).to(dtype)
            scales = {"k_scale": k_scale, "v_scale": v_scale}
            reference.kv_write(k, v, *caches, slots, layout=layout, **scales)
        rows = len(seq_lens) if num_tokens is None else num_tokens
        q = torch.randn(rows, num_heads, head_size, generator=generator).to(dtype)
        lengths = torch.tensor(seq_lens, dtype=torch.int32)
        return Paged(*(x.to(device) for x in (q, *caches, table, lengths)))

    return build


@pytest.fixture
def assert_close() -> Callable[..., None]:
    """Compare ‖out − ref‖ / ‖ref‖ with the bound of a dtype; NaN never passes."""
    bounds = {torch.float32: 1e-5, torch.bfloat16: 5e-3, torch.float16: 5e-3}

    def check(out: Any, ref: Any, bound: float | None = None) -> None:
        limit = bounds[out.dtype] if bound is None else bound
        assert torch.isfinite(out).all()
        norm = ref.norm()
        assert norm > 0
        error = ((out.double() - ref.double()).norm() / norm).item()
        assert error <= limit, f"relative error {error:.2e}, allowed {limit:.0e}"

    return check
