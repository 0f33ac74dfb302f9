"""Where a model takes LoRA deltas."""

from collections.abc import Mapping

from lorakeet.lora.adapter import GroupSpec
from lorakeet.models.config import ModelConfig
from lorakeet.models.cuts import Cut, cut_model
from lorakeet.models.process_group import ALONE, ProcessGroup


def group_specs(config: ModelConfig, group: ProcessGroup = ALONE) -> tuple[GroupSpec, ...]:
    """The groups of a Llama-style decoder, in the order of its forward pass, as a rank has them.

    Where a layer's output is cut, so is B, and A is whole; where its input is cut, so is A, and B
    is whole. The embedding's two are whole: its delta is added to the sum over the ranks.
    """
    cuts, layers = cut_model(config, group), config.num_hidden_layers
    hidden, vocab = Cut.none(config.hidden_size), Cut.none(config.vocab_size)
    qkv = {"q_proj": cuts.q, "k_proj": cuts.kv, "v_proj": cuts.kv}
    gate_up = {"gate_proj": cuts.mlp, "up_proj": cuts.mlp}
    return (
        _spec("embed_tokens", 1, vocab, {"embed_tokens": hidden}),
        _spec("qkv_proj", layers, hidden, qkv),
        _spec("o_proj", layers, cuts.q, {"o_proj": hidden}),
        _spec("gate_up_proj", layers, hidden, gate_up),
        _spec("down_proj", layers, cuts.mlp, {"down_proj": hidden}),
        _spec("lm_head", 1, hidden, {"lm_head": cuts.vocab}),
    )


def _spec(name: str, num_layers: int, input_cut: Cut, slices: Mapping[str, Cut]) -> GroupSpec:
    cuts = tuple(slices.values())
    return GroupSpec(
        name,
        num_layers,
        input_cut.size,
        tuple(slices),
        slice_sizes=tuple(cut.size for cut in cuts),
        input_cut=None if input_cut.is_whole else input_cut,
        output_cuts=None if all(cut.is_whole for cut in cuts) else cuts,
    )
