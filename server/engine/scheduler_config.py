"""The limits that the scheduler keeps."""

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class SchedulerConfig:
    """Limits that every step keeps."""

    num_blocks: int
    block_size: int
    max_model_len: int
    max_num_seqs: int
    max_num_batched_tokens: int
    max_loras: int  # distinct adapters among running sequences
    num_slots: int  # rows of the pool's row table; slot 0 is none
    num_rows: int  # rank rows of the pool
    max_lora_rank: int
    vocabulary_bytes: int = 0  # for embedding and head rows of adapters in slots
    max_blend: int = 0  # adapters in one request's blend
    max_blend_rows: int = 0  # rank rows that they may have together
    enable_prefix_caching: bool = True
    # Unless a prompt is longer: decodes wait for the whole step. None: as many as may be.
    short_step_tokens: int | None = None
    adapter_wait_limit: float = 1.0  # seconds until a waiting adapter displaces another
    adapter_quantum: float = 1.0  # seconds that an adapter may run before it is displaced

    def __post_init__(self) -> None:
        """Raises ValueError when some request could never run."""
        if self.num_blocks * self.block_size < self.max_model_len:
            raise ValueError(
                f"the KV cache holds {self.num_blocks * self.block_size} tokens: too few for "
                f"one sequence of max_model_len {self.max_model_len}"
            )
        if min(self.max_num_seqs, self.max_num_batched_tokens, self.max_loras) < 1:
            raise ValueError("a step needs room for one sequence, one token and one adapter")
        if self.max_blend and (
            self.num_slots < 2 + self.max_blend or self.num_rows < self.max_blend_rows
        ):
            raise ValueError("a blend needs a slot, and the slots and rows of its adapters")
