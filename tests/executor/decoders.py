"""Tiny decoders and a contiguous attention for the tests of the real executor."""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

__all__ = ["FAMILIES", "TINY", "ContiguousAttention", "tiny_config"]

TINY: dict[str, Any] = {
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "vocab_size": 97,
    "max_position_embeddings": 256,
    "rms_norm_eps": 1e-5,
}
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {"model_type": "llama", "rope_theta": 500.0, "rope_scaling": LLAMA3},
    "llama-biases-tied": {
        "model_type": "llama",
        "attention_bias": True,
        "mlp_bias": True,
        "tie_word_embeddings": True,
    },
    "mistral": {"model_type": "mistral", "sliding_window": 8, "rope_theta": 1e4},
    "qwen2": {"model_type": "qwen2", "rope_theta": 1e6, "tie_word_embeddings": True},
    "qwen3": {"model_type": "qwen3", "rope_theta": 1e6, "head_dim": 32},
}


def tiny_config(family: str, **changes: Any) -> dict[str, Any]:
    """The config.json of a tiny model of one of FAMILIES."""
    config = {"tie_word_embeddings": False, **TINY, **FAMILIES[family], **changes}
    return copy.deepcopy(config)


class ContiguousAttention:
    """Causal attention of one sequence, in plain torch; keeps the keys and values it has seen."""

    def __init__(self, sliding_window: int | None = None) -> None:
        self.window = sliding_window
        self.seen: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}

    def __call__(
        self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor
    ) -> torch.Tensor:
        import torch

        if layer in self.seen:
            k, v = torch.cat((self.seen[layer][0], k)), torch.cat((self.seen[layer][1], v))
        self.seen[layer] = k.clone(), v.clone()
        group = q.shape[1] // k.shape[1]
        keys, values = (x.repeat_interleave(group, dim=1) for x in (k, v))
        scores = torch.einsum("qhd,khd->hqk", q, keys) * q.shape[-1] ** -0.5
        own = torch.arange(len(k) - len(q), len(k), device=q.device)[:, None]
        distance = own - torch.arange(len(k), device=q.device)[None, :]
        hidden = distance < 0
        if self.window is not None:
            hidden = hidden | (distance >= self.window)
        weights = scores.masked_fill(hidden, float("-inf")).softmax(-1)
        return torch.einsum("hqk,khd->qhd", weights, values)
