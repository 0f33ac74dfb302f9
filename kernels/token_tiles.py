# mypy: allow-untyped-decorators
"""Large passes in tiles of tokens, in order of their slots: so a tile has few adapters' rows.

A tile of tokens meets those tiles of rank rows in which any of its tokens own one. All these pairs
are numbered: what the shrink leaves is one small matrix a pair.
"""

from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import triton
import triton.language as tl

from lorakeet.kernels.delta import Delta
from lorakeet.kernels.lora_tiles import precision
from lorakeet.kernels.rank_rows import RankRows
from lorakeet.kernels.sizes import FEW_TOKENS, cdiv

ROWS = 32  # rank rows of a tile
_PROGRAMS = 512  # what fills a GPU
_MOST_BLOCKS = 16


@dataclass(frozen=True)
class TokenTiles:
    """How a pass is cut."""

    tokens: int  # of a tile
    num_tiles: int  # of tokens
    row_programs: int  # of a shrink: they share the rank rows that a tile of tokens meets
    span: int  # the most tiles of rank rows in which one token can own rows
    num_pairs: int


@lru_cache
def cut(num_tokens: int, num_rows: int, width: int) -> TokenTiles:
    """A pass of so many tokens, with room for so many rows in its list, at most `width` a token.

    With few tokens, in small tiles: a large one would work through the rows of many adapters, one
    after the other, while most of a GPU has nothing to do.
    """
    tokens, row_programs = (16, 4) if num_tokens <= FEW_TOKENS else (64, 1)
    num_tiles, span = cdiv(num_tokens, tokens), cdiv(width, ROWS) + 1
    # slots come in order, so tiles share rows with their neighbours alone
    num_pairs = cdiv(num_rows, ROWS) + span * num_tiles
    return TokenTiles(tokens, num_tiles, row_programs, span, num_pairs)


def cut_of(rank_rows: RankRows) -> TokenTiles:
    return cut(rank_rows.order.shape[0], rank_rows.rows.shape[0], rank_rows.width)


def most_pairs(num_tokens: int, num_rows: int, width: int) -> int:
    """Of any pass with up to so many tokens, whose list has room for up to so many rows."""
    few = min(num_tokens, FEW_TOKENS)  # in small tiles, which may be more
    return max(cut(tokens, num_rows, width).num_pairs for tokens in (few, num_tokens))


def columns_at_once(rank_rows: RankRows, size: int, block: int) -> int:
    """Outputs of a program, in whole blocks: several, as long as the programs fill a GPU."""
    blocks = cut_of(rank_rows).num_tiles * cdiv(size, block) // _PROGRAMS
    return block * max(1, min(_MOST_BLOCKS, blocks))


def delta_args(delta: Delta) -> dict[str, Any]:
    """What the kernels that expand take of a delta, by name."""
    rank_rows, tiles = delta.rank_rows, cut_of(delta.rank_rows)
    assert delta.h.is_contiguous()
    assert delta.b.stride(1) == 1
    return {
        "h": delta.h,
        "b": delta.b,
        "order": rank_rows.order,
        "first": rank_rows.first,
        "last": rank_rows.last,
        "magnitudes": rank_rows.magnitudes,
        "rows": rank_rows.rows,
        "count_at": rank_rows.count,
        "num_tokens": rank_rows.order.shape[0],
        "span": tiles.span,
        "h_slice_stride": delta.h.stride(0),
        "b_row_stride": delta.b.stride(0),
        "SLICES": delta.h.shape[0],
        "PRECISION": precision(delta.b.dtype),
        "BLOCK_M": tiles.tokens,
        "BLOCK_R": ROWS,
    }


@triton.jit
def read_tile(  # type: ignore[no-untyped-def]
    tile, order, first, last, count_at, num_tokens, BLOCK_M: tl.constexpr, BLOCK_R: tl.constexpr
):
    """A tile's tokens (M,), which of them there are, their own rows, and the rows of the tile."""
    positions = tile * BLOCK_M + tl.arange(0, BLOCK_M)
    in_tile = positions < num_tokens
    tokens = tl.load(order + positions, mask=in_tile, other=0).to(tl.int64)
    own_first = tl.load(first + tokens, mask=in_tile, other=0)
    own_last = tl.load(last + tokens, mask=in_tile, other=0)
    own_last = tl.minimum(own_last, tl.load(count_at))  # 0: nobody has rows in this layer
    low = tl.min(tl.where(own_first < own_last, own_first, 2**30), 0)
    return tokens, in_tile, own_first, own_last, low // BLOCK_R * BLOCK_R, tl.max(own_last, 0)


@triton.jit
def scale_base(  # type: ignore[no-untyped-def]
    y, magnitudes, b, n, in_slice, b_row_stride
):
    """y (M, N) by 1 + the magnitudes of each token's adapter, where it has any: (M,) row or -1."""
    if tl.max(magnitudes, 0) >= 0:
        at = b + magnitudes.to(tl.int64)[:, None] * b_row_stride + n[None, :]
        mask = (magnitudes >= 0)[:, None] & in_slice[None, :]
        y += y * tl.load(at, mask=mask, other=0.0).to(tl.float32)
    return y


@triton.jit
def load_h(  # type: ignore[no-untyped-def]
    h_tile, near, BLOCK_M: tl.constexpr, BLOCK_R: tl.constexpr
):
    """A pair's h (M, R), for tokens (M,) that are `near`, and 0 for others."""
    place = tl.arange(0, BLOCK_M)[:, None] * BLOCK_R + tl.arange(0, BLOCK_R)[None, :]
    return tl.load(h_tile + place, mask=near[:, None], other=0.0)
