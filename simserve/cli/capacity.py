"""`simserve capacity`: how many KV blocks a model leaves on a GPU, term by term."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from simserve.kv.capacity import Capacity
    from simserve.types import ModelShape

__all__ = ["capacity"]


def _limit(meaning: str) -> Any:
    """A count, bounded as in configurations."""
    return typer.Option(min=1, max=10**9, help=meaning)


def capacity(
    model: Annotated[
        str, typer.Option(help="Preset, or the path of a Hugging Face config.json.")
    ] = "llama-3.1-8b",
    gpu: Annotated[str, typer.Option(help="Preset of a GPU.")] = "h200",
    dtype: Annotated[str, typer.Option(help="Of the weights; auto: the model's.")] = "auto",
    kv_cache_dtype: Annotated[str, typer.Option(help="auto: that of the weights.")] = "auto",
    block_size: Annotated[int, typer.Option(help="Tokens per block.")] = 16,
    gpu_memory_utilization: Annotated[float, typer.Option(help="Share of the GPU to use.")] = 0.9,
    max_num_batched_tokens: Annotated[
        int | None, _limit("Token budget of a step. Default: as `run` has it.")
    ] = None,
    max_num_seqs: Annotated[
        int | None, _limit("Most requests in a step. Default: as `run` has it.")
    ] = None,
    max_model_len: Annotated[
        int | None, _limit("Check that a request of so many tokens fits.")
    ] = None,
    draft_model: Annotated[
        str | None, typer.Option(help="Of speculative decoding: preset or path, as --model.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Print KV bytes per token, and the KV blocks left on a GPU beside weights and buffers."""
    from simserve.config.presets import load_gpu
    from simserve.config.resolve import with_defaults
    from simserve.config.scheduler import Scheduler
    from simserve.kv.capacity import fit_kv_cache

    shape = _shape(model, dtype)
    given = Scheduler(
        max_num_batched_tokens=max_num_batched_tokens,
        max_num_seqs=max_num_seqs,
        max_model_len=max_model_len,
    )
    on_gpu = load_gpu(gpu)
    limits = with_defaults(given, shape, on_gpu)
    assert limits.max_num_batched_tokens is not None
    assert limits.max_num_seqs is not None
    result = fit_kv_cache(
        shape,
        on_gpu,
        kv_cache_dtype=kv_cache_dtype,
        block_size=block_size,
        gpu_memory_utilization=gpu_memory_utilization,
        max_num_batched_tokens=limits.max_num_batched_tokens,
        max_num_seqs=limits.max_num_seqs,
        max_model_len=max_model_len,
        draft=_shape(draft_model, dtype) if draft_model else None,
    )
    if as_json:
        print(json.dumps(_fields(result), indent=2))
    else:
        _print_table(
            result,
            f"{shape.num_hidden_layers} layers, {shape.num_key_value_heads} KV "
            f"heads, head_dim {shape.head_dim}",
            f"max_num_batched_tokens {limits.max_num_batched_tokens:,}, "
            f"max_num_seqs {limits.max_num_seqs:,}",
        )


def _shape(model: str, dtype: str) -> ModelShape:
    """Of a preset, or a file or folder."""
    from dataclasses import replace

    from simserve.config.model_spec import is_path
    from simserve.config.presets import load_model

    shape = load_model({"config": model} if is_path(model) else model)
    return shape if dtype == "auto" else replace(shape, dtype=dtype)


def _fields(result: Capacity) -> dict[str, str | int]:
    from dataclasses import asdict

    usable = {
        "num_usable_blocks": result.num_usable_blocks,
        "num_usable_tokens": result.num_usable_tokens,
    }
    return {**asdict(result), **usable}


def _print_table(result: Capacity, shape: str, limits: str) -> None:
    from rich.console import Console
    from rich.table import Table

    gib = 1024**3
    table = Table(title=f"{result.model} on {result.gpu}")
    table.add_column("")
    table.add_column("GiB", justify="right")
    rows = {
        "GPU memory": result.gpu_memory_bytes,
        "budget (gpu_memory_utilization)": result.budget_bytes,
        "− weights": result.weight_bytes,
        "− activations": result.activation_bytes,
        "− CUDA graphs": result.cuda_graph_bytes,
        "− partition buffers": result.partition_bytes,
        "− alignment": result.alignment_bytes,
        "− KV scales": result.kv_scale_bytes,
        "= KV cache": result.kv_cache_bytes,
        "unused": result.unused_bytes,
    }
    for label, num_bytes in rows.items():
        table.add_row(label, f"{num_bytes / gib:.3f}")
    per_token = result.kv_bytes_per_token
    lines = (
        f"These figures hold for {shape}, weights in {result.dtype}, KV in {result.kv_dtype}, "
        f"{limits}.",
        f"KV cache: {per_token:,} bytes a token ({per_token / 1024:g} KiB), "
        f"{per_token * 32768 / gib:.2f} GiB for 32,768 tokens",
        f"num_gpu_blocks: {result.num_gpu_blocks:,} of {result.block_size} tokens, the null block "
        f"included; usable: {result.num_usable_blocks:,} blocks, "
        f"{result.num_usable_tokens:,} tokens",
    )
    console = Console()
    console.print(table)
    for line in lines:
        console.print(line, highlight=False, soft_wrap=True)
