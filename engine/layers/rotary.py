"""Rotary position embedding: frequencies, and the table of rotations for every position.

Rotations are complex numbers over neighboring pairs of a head. Files store heads in two halves instead, so
`interleave` puts weight rows into pair order once, at loading; attention scores do not notice.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from engine.models.config import ModelConfig, RopeScaling


def inverse_frequencies(config: ModelConfig) -> Tensor:
    """theta^(-2i/d) for each pair i (Su et al. 2021), stretched as the model says. float64 [head_dim / 2]."""
    pairs = torch.arange(0, config.head_dim, 2, dtype=torch.float64)
    frequencies = config.rope_theta ** (-pairs / config.head_dim)
    scaling = config.rope_scaling
    if scaling is None:
        return frequencies
    if scaling.kind == "linear":
        return frequencies / scaling.factor
    return _llama3(frequencies, scaling)


def _llama3(frequencies: Tensor, scaling: RopeScaling) -> Tensor:
    """Llama 3.1: wavelengths above original/low are stretched by factor, below original/high kept, blended between."""
    turns = scaling.original_max_position * frequencies / (2 * math.pi)
    keep = (turns - scaling.low_freq_factor) / (scaling.high_freq_factor - scaling.low_freq_factor)
    keep = keep.clamp(0.0, 1.0)
    return frequencies * (keep + (1 - keep) / scaling.factor)


def rotation_table(config: ModelConfig, num_positions: int) -> Tensor:
    """complex64 [num_positions, 1, head_dim / 2].

    Angles are products in float32, as in the implementations the models were trained with.
    """
    frequencies = inverse_frequencies(config).float()
    angles = torch.outer(torch.arange(num_positions, dtype=torch.float32), frequencies)
    return torch.polar(torch.ones_like(angles), angles).unsqueeze(1)


def interleave(rows: Tensor, head_dim: int) -> Tensor:
    """Reorder each head's rows from halves (x1, x2) to pairs. rows [heads * head_dim, ...]."""
    heads = rows.view(-1, 2, head_dim // 2, *rows.shape[1:])
    return heads.transpose(1, 2).reshape(rows.shape)
