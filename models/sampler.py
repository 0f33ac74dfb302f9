"""Logits to tokens: penalties, filters, one uniform number a row, log-probabilities.

A row's token depends on its own logits, parameters, seed and token index alone. Probabilities
become integer weights, whose sums are exact in any order: so neither the other rows of a batch nor
the way a device adds can move a border between two tokens.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from lorakeet.models.penalties import Penalties, TokenCounts, build_penalties
from lorakeet.models.transfer import upload

_GREEDY_BELOW = 1e-5  # at such a temperature all but exact ties is greedy, in float32
_MOST_SELECTED = 1024
_WEIGHT_ONE = 2.0**40  # weight of the likeliest token; 2^22 tokens of it still fit an int64


@dataclass(frozen=True, kw_only=True)
class SamplingRow:
    """How the next token of one sequence is chosen. Defaults change nothing."""

    seed: int = 0
    token_index: int = 0  # tokens of the sequence generated so far
    temperature: float = 1.0  # 0: greedy
    top_k: int = 0  # 0: off
    top_p: float = 1.0
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    banned_ids: Sequence[int] = ()  # never chosen: stop tokens, until min_tokens are there
    prompt_ids: Sequence[int] = ()  # read for repetition_penalty only
    output_ids: Sequence[int] = ()  # read for the three penalties only
    num_logprobs: int | None = None  # alternatives to report; 0: only the chosen token

    @property
    def biases(self) -> dict[int, float]:
        return with_bans(self.logit_bias, self.banned_ids)


def with_bans(biases: Mapping[int, float], banned_ids: Iterable[int]) -> dict[int, float]:
    """Biases of tokens by their ids, with those of tokens that are never chosen."""
    return dict(biases) | dict.fromkeys(banned_ids, -np.inf)


@dataclass(frozen=True)
class LogitEdits:
    """One value for each of N (row, token id) pairs."""

    rows: Tensor  # (N,) int64
    ids: Tensor  # (N,) int64
    values: Tensor  # (N,) float32


@dataclass(frozen=True, kw_only=True)
class SamplingBatch:
    """Parameters of L rows on the device; None where no row uses the feature."""

    penalties: Penalties | None
    offsets: LogitEdits | None  # biases, bans: values of the same pair add up
    num_logprobs: int | None  # the most any row wants; None: no row wants any
    temperatures: Tensor | None = None  # (L, 1) float32; None: every row is greedy
    uniforms: Tensor | None = None  # (L, 1) float64 in [0, 1); None: every row is greedy
    greedy: Tensor | None = None  # (L,) bool; None: all rows alike
    num_ordered: int = 0  # top-k and top-p look at so many of the likeliest tokens; 0: neither used
    top_k: Tensor | None = None  # (L, 1) int64, 1 to vocab
    top_p: Tensor | None = None  # (L, 1) float64
    min_p: Tensor | None = None  # (L, 1) float32


@dataclass(frozen=True)
class SamplerOutput:
    """L rows, on the logits' device. A failed row's other values mean nothing."""

    token_ids: Tensor  # (L,) int64
    failed: Tensor  # (L,) bool: NaN or infinity in its logits, or no token left to choose
    logprobs: Tensor | None = None  # (L,) float32, of the chosen token under the model itself
    top_ids: Tensor | None = None  # (L, K) int64, likeliest first
    top_logprobs: Tensor | None = None  # (L, K) float32


def uniform(seeds: NDArray[np.uint64], indices: NDArray[np.uint64]) -> NDArray[np.float64]:
    """One number in [0, 1) for each (seed, index), the same at any time and place.

    SplitMix64 (Steele, Lea, Flood: Fast Splittable Pseudorandom Number Generators, 2014) read as a
    counter-based generator; the seed is mixed first, so that near seeds start far apart.
    """
    gamma = np.uint64(0x9E3779B97F4A7C15)
    bits = _mix(_mix(seeds + gamma) + (indices + np.uint64(1)) * gamma)
    return (bits >> np.uint64(11)).astype(np.float64) * 2.0**-53


def _mix(z: NDArray[np.uint64]) -> NDArray[np.uint64]:
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return z ^ (z >> np.uint64(31))


@dataclass(frozen=True, kw_only=True)
class SamplingColumns:
    """What every row has, as `SamplingRow` says it: (L,) each, on the host."""

    seed: NDArray[np.uint64]
    token_index: NDArray[np.int64]
    temperature: NDArray[np.float64]
    top_k: NDArray[np.int64]
    top_p: NDArray[np.float64]
    min_p: NDArray[np.float64]


def build(
    rows: Sequence[SamplingRow],
    vocab_size: int,
    device: torch.device | str = "cpu",
    counts: TokenCounts | None = None,
) -> SamplingBatch:
    """Collect the rows' parameters. Token ids outside the vocabulary are ignored.

    `counts`: memory for the rows' tokens; left out, it is taken here.
    """
    columns = SamplingColumns(
        seed=np.array([row.seed % 2**64 for row in rows], np.uint64),
        token_index=np.array([row.token_index for row in rows]),
        temperature=np.array([row.temperature for row in rows]),
        top_k=np.array([row.top_k for row in rows]),
        top_p=np.array([row.top_p for row in rows]),
        min_p=np.array([row.min_p for row in rows]),
    )
    counts = counts or TokenCounts(len(rows), vocab_size, device)
    for index, row in enumerate(rows):
        counts.start(index, row.prompt_ids, row.output_ids)
    indices = np.arange(len(rows))
    values = [[row.repetition_penalty, row.presence_penalty, row.frequency_penalty] for row in rows]
    penalties = build_penalties(counts, indices, indices, np.array(values).T)
    wanted = [row.num_logprobs for row in rows if row.num_logprobs is not None]
    num_logprobs = max(wanted) if wanted else None
    biases = {index: row.biases for index, row in enumerate(rows)}
    return build_columns(columns, penalties, biases, num_logprobs, vocab_size, device)


def build_columns(
    columns: SamplingColumns,
    penalties: Penalties | None,
    biases: Mapping[int, Mapping[int, float]],
    num_logprobs: int | None,
    vocab_size: int,
    device: torch.device | str = "cpu",
) -> SamplingBatch:
    """The same from columns. `biases`: by row, of tokens by their ids; -inf: never chosen."""
    assert vocab_size <= 2**22
    edits = SamplingBatch(
        penalties=penalties,
        offsets=_offsets(biases, vocab_size, device),
        num_logprobs=num_logprobs,
    )
    greedy = columns.temperature < _GREEDY_BELOW
    if greedy.all():
        return edits
    top_k = np.where((columns.top_k > 0) & ~greedy, columns.top_k, vocab_size).clip(max=vocab_size)
    top_p, min_p = np.where(greedy, 1.0, columns.top_p), np.where(greedy, 0.0, columns.min_p)
    filters = (top_k < vocab_size) | (top_p < 1.0)
    values = [
        columns.temperature.clip(min=_GREEDY_BELOW),
        uniform(columns.seed, columns.token_index.astype(np.uint64)),
        greedy,
        top_k,
        top_p,
        min_p,
    ]
    # float64 holds them all exactly, so that one copy moves them
    on_device = upload(np.stack(values).astype(np.float64), device)[:, :, None]
    return replace(
        edits,
        temperatures=on_device[0].float(),
        uniforms=on_device[1],
        greedy=on_device[2, :, 0].bool() if greedy.any() else None,
        num_ordered=int(top_k[filters].max(initial=0)),  # all, for top-p without top-k
        top_k=on_device[3].long() if (top_k != vocab_size).any() else None,
        top_p=on_device[4] if (top_p != 1.0).any() else None,
        min_p=on_device[5].float() if (min_p != 0.0).any() else None,
    )


def _offsets(
    biases: Mapping[int, Mapping[int, float]], vocab_size: int, device: torch.device | str
) -> LogitEdits | None:
    rows, ids, values = [], [], []
    for row, own in biases.items():
        rows += [row] * len(own)
        ids += [*own]
        values += [*own.values()]
    all_ids = np.array(ids, np.int64)
    inside = (all_ids >= 0) & (all_ids < vocab_size)  # an id outside would write elsewhere
    if not inside.any():
        return None
    parts = np.array(rows, np.int64), all_ids, np.array(values, np.float32)
    return LogitEdits(*(upload(part[inside], device) for part in parts))


def sample(logits: Tensor, batch: SamplingBatch) -> SamplerOutput:
    """One token for each row of `logits` (L, vocab), which stay as they are. Never syncs.

    Order: repetition penalty, other penalties, biases and bans, temperature, top-k, top-p, min-p.
    Tokens tied at a filter's border are all kept. Log-probabilities are those of the logits as they
    came.
    """
    edited = edit_logits(logits, batch)
    best, token_ids = edited.max(dim=1)  # NaN wins
    failed = best - best != 0  # not finite, in two kernels instead of five
    if batch.temperatures is not None and batch.uniforms is not None:
        scaled = edited.float().sub(best[:, None]).div_(batch.temperatures)
        weights = filter_weights(scaled.masked_fill_(failed[:, None], 0.0), batch)
        drawn = _draw(weights, batch.uniforms)
        token_ids = drawn if batch.greedy is None else torch.where(batch.greedy, token_ids, drawn)
    if batch.num_logprobs is None:
        return SamplerOutput(token_ids, failed)
    return SamplerOutput(token_ids, failed, *score(logits, token_ids, batch.num_logprobs))


def score(logits: Tensor, targets: Tensor, num_top: int) -> tuple[Tensor, Tensor, Tensor]:
    """Log-probabilities of `targets` (N,) under `logits` (N, vocab), and the likeliest tokens.

    Returns float32 (N,), int64 ids (N, K) and float32 (N, K), K = min(num_top, vocab).
    """
    logits = logits.float()
    best = logits.amax(dim=1, keepdim=True)
    log_total = (logits - best).exp_().sum(dim=1, keepdim=True).log_()
    top, top_ids = logits.topk(min(num_top, logits.shape[1]), dim=1)
    # the maximum is taken off first: logits of 1e4 would leave float32 no digits for the rest
    chosen = logits.gather(1, targets[:, None]) - best - log_total
    return chosen[:, 0], top_ids, top - best - log_total


def edit_logits(logits: Tensor, batch: SamplingBatch) -> Tensor:
    """`logits` (L, vocab) with penalties, biases and bans: in float32, if any row has some."""
    if batch.penalties is not None:
        logits = batch.penalties.apply(logits.float())
    if (edits := batch.offsets) is not None:
        places = edits.rows, edits.ids
        logits = logits.float().index_put(places, edits.values, accumulate=True)
    return logits


def _weights(scaled: Tensor) -> Tensor:
    """Probabilities up to a factor, as int64, of logits whose maximum is 0."""
    return (scaled.exp() * _WEIGHT_ONE).long()


def filter_weights(scaled: Tensor, batch: SamplingBatch) -> Tensor:
    """Weights (L, vocab) int64 of logits whose maximum is 0, with zeros for what top-k, top-p and
    min-p cut off."""
    weights = _weights(scaled)
    if batch.num_ordered:
        ordered = _likeliest(scaled, batch.num_ordered)
        if batch.top_k is not None:
            border = ordered.gather(1, batch.top_k.clamp(max=batch.num_ordered) - 1)
            border.masked_fill_(batch.top_k > batch.num_ordered, -torch.inf)  # no row's filter
            weights.masked_fill_(scaled < border, 0)
        if batch.top_p is not None:
            mass = _weights(ordered)
            sums = mass.cumsum(dim=1)
            limit = (batch.top_p * weights.sum(dim=1, keepdim=True)).ceil().long().clamp(min=1)
            # a token stays while those before it fall short of the limit; so do all that tie with
            # it, even past the ordered ones
            num_kept = (sums - mass < limit).sum(dim=1, keepdim=True)
            border = ordered.gather(1, num_kept - 1)
            border.masked_fill_(batch.top_p >= 1, -torch.inf)
            weights.masked_fill_(scaled < border, 0)
    if batch.min_p is not None:
        weights.masked_fill_(scaled < batch.min_p.log(), 0)
    return weights


def _likeliest(scaled: Tensor, count: int) -> Tensor:
    """At least the largest `count` values of each row, in descending order. To sort all takes many
    times as long as to select few, and less memory than to select many."""
    if count <= min(_MOST_SELECTED, scaled.shape[1]):
        return scaled.topk(count, dim=1).values
    return scaled.sort(dim=1, descending=True).values


def _draw(weights: Tensor, uniforms: Tensor) -> Tensor:
    """Inverse of the cumulative distribution at `uniforms` (L, 1): token ids (L,)."""
    sums = weights.cumsum(dim=1)
    total = sums[:, -1:]
    target = (uniforms * total).long().minimum(total - 1)
    return torch.searchsorted(sums, target, right=True)[:, 0]
