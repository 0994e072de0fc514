"""Cosines and sines of the rotary embedding, with Llama 3.1's scaling."""

from __future__ import annotations

import math

import torch

from simserve.executor.real.decoder_shape import DecoderShape, Llama3Scaling

__all__ = ["inverse_frequencies", "rope_table"]


def inverse_frequencies(shape: DecoderShape) -> torch.Tensor:
    """Radians that each pair of dimensions turns per position: `[head_dim / 2]` float32, CPU.

    theta^(−2i / head_dim) (Su et al., "RoFormer", 2021), scaled where the shape says so.
    """
    size = shape.model.head_dim
    exponents = torch.arange(0, size, 2, dtype=torch.float32) / size
    frequencies = 1.0 / shape.rope_theta**exponents
    if shape.rope_scaling is None:
        return frequencies
    return _stretch(frequencies, shape.rope_scaling)


def _stretch(frequencies: torch.Tensor, scaling: Llama3Scaling) -> torch.Tensor:
    """Slow frequencies divided by `factor`, fast ones kept, a linear blend between.

    What counts is how often a frequency turns within the original context: at most
    `low_freq_factor` times is slow, at least `high_freq_factor` times is fast.
    (Dubey et al., "The Llama 3 Herd of Models", 2024; the formula is that of the model's release.)
    """
    turns = scaling.original_max_position_embeddings * frequencies / (2 * math.pi)
    span = scaling.high_freq_factor - scaling.low_freq_factor
    kept = ((turns - scaling.low_freq_factor) / span).clamp(0, 1)
    return frequencies * (kept + (1 - kept) / scaling.factor)


def rope_table(shape: DecoderShape, max_position: int) -> torch.Tensor:
    """`[max_position, head_dim]` float32 on the CPU: a position's cosines, then its sines.

    Angles are float32 products, as in the engines that these models are served with.
    """
    positions = torch.arange(max_position, dtype=torch.float32)
    angles = torch.outer(positions, inverse_frequencies(shape))
    return torch.cat((angles.cos(), angles.sin()), dim=-1)
