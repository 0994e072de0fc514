"""What the requests of a step would take if they shared nothing."""

from __future__ import annotations

from simserve.types import StepRun

__all__ = ["unshared_blocks"]


def unshared_blocks(run: StepRun, block_size: int) -> int:
    """Blocks that the requests of the last step of a run would fill if they shared none."""
    plan, count = run
    blocks = 0
    for start, num_tokens in zip(plan.starts, plan.num_tokens, strict=True):
        blocks -= -(start + count * num_tokens) // block_size
    return blocks
