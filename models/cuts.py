"""What each rank of a process group holds of a model's dimensions, for its weights and for LoRA's.

| layer                            | cut along                                                    |
|----------------------------------|--------------------------------------------------------------|
| embedding, output head           | the vocabulary, padded to a multiple of the group's size     |
| q, k, v                          | the output, each by its own heads; where there are fewer KV  |
|                                  | heads than ranks, several ranks hold the same one            |
| gate, up                         | the output                                                   |
| o, down                          | the input                                                    |
"""

from dataclasses import dataclass

from torch import Tensor
from torch.nn.functional import pad

from lorakeet.models.config import ModelConfig, UnsupportedModelError
from lorakeet.models.process_group import ProcessGroup


@dataclass(frozen=True)
class Cut:
    """A rank's part of a dimension: `size` places from `start` on, of `whole`.

    Of a dimension that does not divide evenly, the last parts reach past its end: that is padding.
    """

    whole: int
    start: int
    size: int

    @staticmethod
    def none(size: int) -> "Cut":
        """All of it."""
        return Cut(size, 0, size)

    @property
    def is_whole(self) -> bool:
        return self.size == self.whole

    @property
    def places(self) -> slice:
        """In the whole, without padding."""
        return slice(min(self.start, self.whole), min(self.start + self.size, self.whole))

    def take(self, values: Tensor) -> Tensor:
        """This part of (whole, …), with zeros as padding: (size, …)."""
        part = values[self.places]
        missing = self.size - len(part)
        return pad(part, (*(0, 0) * (values.ndim - 1), 0, missing)) if missing else part


@dataclass(frozen=True)
class ModelCuts:
    q: Cut
    kv: Cut  # of k and of v
    mlp: Cut
    vocab: Cut


def cut_model(config: ModelConfig, group: ProcessGroup) -> ModelCuts:
    """Raises UnsupportedModelError where the heads or the MLP cannot be dealt out to the ranks."""
    heads, kv_heads = config.num_attention_heads, config.num_key_value_heads
    sizes = {"num_attention_heads": heads, "intermediate_size": config.intermediate_size}
    for name, size in sizes.items():
        if size % group.size:
            raise UnsupportedModelError(f"{name} ({size}) cannot be cut into {group.size} parts.")
    if kv_heads % group.size and group.size % kv_heads:
        raise UnsupportedModelError(
            f"num_key_value_heads ({kv_heads}) cannot be dealt out to {group.size} ranks."
        )
    own_kv_heads = max(1, kv_heads // group.size)
    first_kv_head = group.rank * kv_heads // group.size
    size = config.head_dim
    return ModelCuts(
        q=_even(config.q_size, group),
        kv=Cut(config.kv_size, first_kv_head * size, own_kv_heads * size),
        mlp=_even(config.intermediate_size, group),
        vocab=_even(config.vocab_size, group),
    )


def _even(whole: int, group: ProcessGroup) -> Cut:
    size = -(-whole // group.size)
    return Cut(whole, group.rank * size, size)
