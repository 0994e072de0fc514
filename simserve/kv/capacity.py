"""How many KV blocks fit on a GPU beside weights, activations, CUDA graphs and buffers.

The budget is the GPU's memory times gpu_memory_utilization; what lies outside that share (the CUDA
context, other processes) is not counted. Every term is a field of `Capacity`, so a figure can be
checked by hand; docs/cost-models.md gives the formulas.
"""

from __future__ import annotations

from dataclasses import dataclass

from simserve.errors import CapacityError, ConfigError
from simserve.shapes import dtype_bytes, kv_elements_per_token, num_parameters, resolve_kv_dtype
from simserve.types import GPU, ModelShape

__all__ = ["Capacity", "fit_kv_cache", "kv_bytes_per_token"]

GIB = 1024**3
ALLOCATION_BYTES = 2 * 1024**2
"""A large CUDA allocation is rounded up to this; each layer's KV tensor is one."""
MAX_GRAPH_TOKENS = 512
"""Largest batch that is captured as a CUDA graph (vLLM v0.11.0)."""
GRAPH_SIZES = 67
"""Captured batch sizes: 1, 2, 4, then every 8 up to 512."""
GRAPH_BYTES_PER_LAYER = 128 * 1024
"""Estimate of what one captured size keeps per layer (kernel nodes and their arguments)."""
PARTITION_TOKENS = 512
"""Context tokens that one partition of a split decode covers (PagedAttention V2)."""
MAX_PARTITIONS = 32
"""Most partitions of a row for which buffers are held (vLLM v0.11.0, FlashAttention 3)."""
SAMPLER_BYTES = 2 + 4 + 4 + 8 + 4
"""Per logit, in the sampler's warm-up with top-p: model dtype, float32, sorted copy, its int64
indices, probabilities."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Capacity:
    """Where a GPU's memory goes. The bytes add up to `budget_bytes`.

    Bytes are of both models where one drafts for the other; of activations they are the larger.
    """

    model: str
    gpu: str
    dtype: str
    kv_dtype: str
    block_size: int
    gpu_memory_bytes: int
    budget_bytes: int
    weight_bytes: int
    activation_bytes: int
    cuda_graph_bytes: int
    partition_bytes: int
    alignment_bytes: int
    kv_scale_bytes: int
    """One float32 scale for K and one for V per layer, if the KV dtype is an fp8 one."""
    kv_bytes_per_token: int
    num_gpu_blocks: int
    """Including block 0, the null block, which no request gets."""
    kv_cache_bytes: int
    unused_bytes: int
    """Too little for one more block."""

    @property
    def num_usable_blocks(self) -> int:
        """Blocks that requests can hold."""
        return self.num_gpu_blocks - 1

    @property
    def num_usable_tokens(self) -> int:
        """Tokens whose KV fits at the same time."""
        return self.num_usable_blocks * self.block_size


def kv_bytes_per_token(model: ModelShape, kv_cache_dtype: str = "auto") -> int:
    """2 * layers * KV heads * head dimension * bytes: K and V of one token in all layers.

    Scales of an fp8 cache are per layer, not per token, and therefore not in this figure.
    """
    return kv_elements_per_token(model) * dtype_bytes(resolve_kv_dtype(model, kv_cache_dtype))


def fit_kv_cache(
    model: ModelShape,
    gpu: GPU,
    *,
    kv_cache_dtype: str = "auto",
    block_size: int = 16,
    gpu_memory_utilization: float = 0.9,
    max_num_batched_tokens: int = 8192,
    max_num_seqs: int = 256,
    max_model_len: int | None = None,
    draft: ModelShape | None = None,
) -> Capacity:
    """The KV pool that one GPU has room for.

    num_gpu_blocks = floor(bytes left / bytes of a block in all layers), as the engine computes it.
    A block also holds what a `draft` model keeps of its tokens. `max_model_len` None: the model's,
    without the check that it fits.

    Raises:
        ConfigError: a parameter is out of range.
        CapacityError: the weights and buffers leave no room, or `max_model_len` tokens do not fit.
    """
    _check_parameters(block_size, gpu_memory_utilization, max_num_batched_tokens, max_num_seqs)
    kv_dtype = resolve_kv_dtype(model, kv_cache_dtype)
    memory = int(gpu.memory_gib * GIB)
    budget = int(memory * gpu_memory_utilization)
    sizes = (kv_dtype, max_num_batched_tokens, max_num_seqs, max_model_len)
    parts = _beside_the_pool(model, *sizes)
    per_token = kv_bytes_per_token(model, kv_cache_dtype)
    if draft is not None:
        for name, num_bytes in _beside_the_pool(draft, *sizes).items():
            both = (parts[name], num_bytes)
            parts[name] = max(both) if name == "activation_bytes" else sum(both)
        per_token += kv_bytes_per_token(draft, kv_dtype)
    left = budget - sum(parts.values())
    num_blocks = max(left, 0) // (block_size * per_token)
    kv_bytes = num_blocks * block_size * per_token
    capacity = Capacity(
        model=model.name,
        gpu=gpu.name,
        dtype=model.dtype,
        kv_dtype=kv_dtype,
        block_size=block_size,
        gpu_memory_bytes=memory,
        budget_bytes=budget,
        kv_bytes_per_token=per_token,
        num_gpu_blocks=num_blocks,
        kv_cache_bytes=kv_bytes,
        unused_bytes=left - kv_bytes,
        **parts,
    )
    _check_fits(capacity, max_model_len, draft)
    return capacity


def _beside_the_pool(
    model: ModelShape,
    kv_dtype: str,
    max_num_batched_tokens: int,
    max_num_seqs: int,
    max_model_len: int | None,
) -> dict[str, int]:
    """What a model takes beside its KV pool."""
    layers = model.num_hidden_layers
    graph_tokens = min(max_num_batched_tokens, MAX_GRAPH_TOKENS)
    return {
        "weight_bytes": num_parameters(model) * dtype_bytes(model.dtype),
        "activation_bytes": _activation_bytes(model, max_num_batched_tokens, max_num_seqs),
        "cuda_graph_bytes": _layer_activation_bytes(model, graph_tokens)
        + GRAPH_SIZES * layers * GRAPH_BYTES_PER_LAYER,
        "partition_bytes": _partition_bytes(
            model, min(max_num_seqs, MAX_GRAPH_TOKENS), max_model_len
        ),
        "alignment_bytes": layers * ALLOCATION_BYTES,
        "kv_scale_bytes": 2 * 4 * layers if dtype_bytes(kv_dtype) == 1 else 0,
    }


def _check_parameters(
    block_size: int, utilization: float, max_num_batched_tokens: int, max_num_seqs: int
) -> None:
    if not 0 < utilization <= 1:
        raise ConfigError(
            f"gpu_memory_utilization must be above 0 and at most 1, not {utilization}"
        )
    counts = {
        "block_size": block_size,
        "max_num_batched_tokens": max_num_batched_tokens,
        "max_num_seqs": max_num_seqs,
    }
    for name, value in counts.items():
        if value < 1:
            raise ConfigError(f"{name} must be at least 1, not {value}")


def _activation_bytes(model: ModelShape, max_num_batched_tokens: int, max_num_seqs: int) -> int:
    """Peak of a full batch: in a layer, or in the sampler, which runs after the layers."""
    sampler = max_num_seqs * model.vocab_size * SAMPLER_BYTES
    return max(_layer_activation_bytes(model, max_num_batched_tokens), sampler)


def _layer_activation_bytes(model: ModelShape, num_tokens: int) -> int:
    """Peak inside one layer: hidden states and residual, and the larger of attention (query, key,
    value, output) and MLP (gate and up, product; for experts also their inputs' copies)."""
    query = model.num_attention_heads * model.head_dim
    attention = 2 * query + 2 * model.num_key_value_heads * model.head_dim
    mlp = 3 * model.intermediate_size * model.num_experts_per_tok
    if model.num_experts > 1:
        mlp += model.hidden_size * model.num_experts_per_tok
    per_token = 2 * model.hidden_size + max(attention, mlp)
    return num_tokens * per_token * dtype_bytes(model.dtype)


def _partition_bytes(model: ModelShape, rows: int, max_model_len: int | None) -> int:
    """Buffers of split decodes: per row, head and partition a float32 output, maximum and sum."""
    length = max_model_len or model.max_position_embeddings
    partitions = min(-(-length // PARTITION_TOKENS), MAX_PARTITIONS)
    if partitions == 1:
        return 0
    return rows * model.num_attention_heads * partitions * (model.head_dim + 2) * 4


def _check_fits(capacity: Capacity, max_model_len: int | None, draft: ModelShape | None) -> None:
    c, who, of_draft, smaller = capacity, capacity.model, "", ""
    if draft is not None:
        draft_bytes = num_parameters(draft) * dtype_bytes(draft.dtype)
        who = f"{c.model} with the draft model {draft.name}"
        of_draft, smaller = f" ({draft_bytes / GIB:.2f} of it of the draft)", "a smaller draft, "
    needed = c.weight_bytes + c.activation_bytes + c.cuda_graph_bytes + c.partition_bytes
    terms = (
        f"{c.budget_bytes / GIB:.2f} GiB ({c.gpu_memory_bytes / GIB:.2f} GiB of {c.gpu} times "
        f"gpu_memory_utilization), weights {c.weight_bytes / GIB:.2f} GiB{of_draft} in {c.dtype}, "
        f"activations {c.activation_bytes / GIB:.2f} GiB, CUDA graphs and buffers "
        f"{(needed - c.weight_bytes - c.activation_bytes) / GIB:.2f} GiB"
    )
    if c.num_usable_blocks < 1:
        raise CapacityError(
            f"{who} leaves no room for a KV cache: the budget is {terms}; "
            f"take {smaller}a larger GPU, a smaller dtype, or a smaller max_num_batched_tokens"
        )
    if max_model_len is not None and max_model_len > c.num_usable_tokens:
        raise CapacityError(
            f"max_model_len {max_model_len} of {who} does not fit: the {c.kv_dtype} KV cache "
            f"holds {c.num_usable_tokens} tokens ({c.num_usable_blocks} blocks of {c.block_size}); "
            f"the budget is {terms}; lower max_model_len or raise gpu_memory_utilization"
        )
