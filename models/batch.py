"""What one forward pass works on: an argument of every layer, never a global."""

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True, kw_only=True)
class ForwardBatch:
    """T tokens of S sequences, flat. The tokens of one sequence are adjacent, in order.

    The first `num_decodes` sequences have one token each in this pass: sequence i token i. In a
    batch that is padded, some of them have none, and context 0; so have some of the others; and
    tokens past the last of `query_starts` are nobody's. All tensors lie on the model's device.
    """

    token_ids: Tensor  # (T,) int64
    positions: Tensor  # (T,) int64, place of each token in its sequence
    kv_slots: Tensor  # (T,) int64, where its key and value go: block_id * block_size + offset
    query_starts: Tensor  # (S + 1,) int32, first token row of each sequence, then the end
    context_lens: Tensor  # (S,) int32, tokens of the sequence in the cache after this pass
    block_tables: Tensor  # (S, max_blocks) int32, KV block ids; padding is 0
    num_decodes: int
    max_context_len: int
