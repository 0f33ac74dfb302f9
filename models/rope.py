"""Rotary position embedding (arXiv:2104.09864) with the scalings of Hugging Face's configs.

There is no table: angles are worked out from the positions, once a pass, so no length is a limit.

Dynamic NTK. Up to `max_position_embeddings` it is the plain embedding. Beyond, transformers takes
the frequencies for the longest length seen so far, over the whole batch, and leaves older keys as
they are. Here they follow each sequence by itself: all tokens of a pass take the frequencies for
the length that their sequence has after the pass. That is transformers' result for a prompt in
one pass and for each generated token; a prompt past the trained length that is computed in chunks
(or found in the prefix cache, or replayed in a graph, where a token is a sequence) keeps the keys
of its earlier, shorter lengths. (The server takes no sequence beyond the trained length.)
"""

import math

import torch
from torch import Tensor

from lorakeet.models.batch import ForwardBatch
from lorakeet.models.config import ModelConfig, RopeConfig


class RotaryEmbedding:
    """Angles of one pass. Not a module: casting the model must leave its frequencies float32."""

    def __init__(self, config: ModelConfig) -> None:
        self._rope = config.rope
        self._trained_length = config.max_position_embeddings
        self._dim = config.head_dim
        self._frequencies = inverse_frequencies(config.rope, config.head_dim)

    def cos_sin(self, batch: ForwardBatch) -> tuple[Tensor, Tensor]:
        """Cosines and sines for `rotate`: (T, 1, head_dim) float32 each."""
        if self._frequencies.device != batch.positions.device:  # once, before any graph capture
            self._frequencies = self._frequencies.to(batch.positions.device)
        frequencies = self._frequencies
        if self._rope.kind == "dynamic":
            frequencies = self._dynamic_frequencies(batch)
        angles = (batch.positions[:, None].float() * frequencies)[:, None]
        cos, sin = angles.cos(), angles.sin()
        cos, sin = torch.cat((cos, cos), dim=-1), torch.cat((-sin, sin), dim=-1)
        if self._rope.attention_factor != 1.0:
            cos, sin = cos * self._rope.attention_factor, sin * self._rope.attention_factor
        return cos, sin

    def _dynamic_frequencies(self, batch: ForwardBatch) -> Tensor:
        """(T, head_dim / 2): theta grows with the length of each token's sequence."""
        lengths = batch.context_lens.clamp(min=self._trained_length).float()
        factor = self._rope.factor
        growth = factor * lengths / self._trained_length - (factor - 1)
        # theta · growth^(d / (d - 2)) is theta^(-2i/d) · growth^(-2i / (d - 2)) for dimension i
        exponents = torch.arange(0, self._dim, 2, device=lengths.device) / (self._dim - 2)
        by_sequence = self._frequencies * growth[:, None] ** -exponents
        return torch.repeat_interleave(
            by_sequence, batch.query_starts.diff(), dim=0, output_size=len(batch.positions)
        )


def rotate(heads: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Turn each pair (i, i + head_dim / 2) by its angle. `heads`: (T, any, head_dim)."""
    swapped = heads.roll(heads.shape[-1] // 2, dims=-1)  # the sign is in `sin`
    return torch.addcmul(heads * cos, swapped, sin).to(heads.dtype)


def inverse_frequencies(rope: RopeConfig, head_dim: int) -> Tensor:
    """Angle by position of each pair: (head_dim / 2,) float32, on the CPU."""
    exponents = torch.arange(0, head_dim, 2, dtype=torch.float32, device="cpu") / head_dim
    plain = 1.0 / rope.theta**exponents
    match rope.kind:
        case "default" | "dynamic":
            return plain
        case "linear":
            return plain / rope.factor
        case "llama3":
            return _llama3(rope, plain)
        case "yarn":
            return _yarn(rope, plain, head_dim)


def _llama3(rope: RopeConfig, plain: Tensor) -> Tensor:
    """Llama 3.1: long waves are slowed by `factor`, short ones kept, a linear blend between."""
    turns = rope.original_max_position_embeddings * plain / (2 * math.pi)
    kept = (turns - rope.low_freq_factor) / (rope.high_freq_factor - rope.low_freq_factor)
    return torch.lerp(plain / rope.factor, plain, kept.clamp(0, 1))


def _yarn(rope: RopeConfig, plain: Tensor, head_dim: int) -> Tensor:
    """YaRN's NTK-by-parts (arXiv:2309.00071, section 3.2), the ramp over dimensions."""

    def dimension(turns: float) -> float:
        """The dimension that turns so often within the trained length."""
        wavelength = rope.original_max_position_embeddings / (2 * math.pi * turns)
        return head_dim * math.log(wavelength) / (2 * math.log(rope.theta))

    low, high = dimension(rope.beta_fast), dimension(rope.beta_slow)
    if rope.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, head_dim - 1)
    high = high if high != low else high + 0.001
    slowed = ((torch.arange(head_dim // 2, device="cpu") - low) / (high - low)).clamp(0, 1)
    return torch.lerp(plain, plain / rope.factor, slowed)
