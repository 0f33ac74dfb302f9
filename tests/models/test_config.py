"""config.json → ModelConfig: both generations of files; a refusal for all that would go wrong."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import LlamaConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from lorakeet.models.config import (
    RopeConfig,
    UnsupportedModelError,
    load_config,
    parse_config,
)
from lorakeet.models.rope import inverse_frequencies
from support.models import KINDS, tiny_model

LLAMA: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 320,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-5,
    "hidden_act": "silu",
}
LLAMA3 = {
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 128,
}


def of(architecture: str, **values: Any) -> dict[str, Any]:
    return LLAMA | {"architectures": [architecture]} | values


class TestFiles:
    @pytest.mark.parametrize("kind", KINDS)
    def test_what_transformers_writes(self, tmp_path: Path, kind: str) -> None:
        config = load_config(tiny_model(tmp_path, kind))
        assert (config.vocab_size, config.hidden_size, config.num_hidden_layers) == (320, 64, 3)
        assert config.head_dim == {"qwen3": 32, "odd_head_dim": 24}.get(kind, 16)
        assert (config.q_size, config.kv_size) == (4 * config.head_dim, 2 * config.head_dim)
        assert config.qkv_bias is (kind in ("llama_bias", "qwen2", "qwen2_window"))
        assert config.o_bias is config.mlp_bias is (kind == "llama_bias")
        assert config.qk_norm is (kind == "qwen3")
        assert config.tie_word_embeddings is (kind == "llama_tied")
        assert config.dtype == "float32"
        windows = {"mistral": (8, 8, 8), "qwen2_window": (None, 8, 8)}
        assert config.sliding_windows == windows.get(kind, (None, None, None))
        expected = kind.removeprefix("rope_") if kind.startswith("rope_") else "default"
        assert config.rope.kind == expected

    @pytest.mark.parametrize("scaling", [{"rope_type": "llama3"}, {"type": "llama3"}])
    def test_old_and_new_form_of_rope(self, scaling: dict[str, str]) -> None:
        old = parse_config(LLAMA | {"rope_theta": 5e5, "rope_scaling": LLAMA3 | scaling})
        new = {"rope_type": "llama3", "rope_theta": 5e5} | LLAMA3
        assert old == parse_config(LLAMA | {"rope_parameters": new})
        assert old.rope == RopeConfig("llama3", 5e5, 8.0, 128, 1.0, 4.0)

    def test_old_form_without_scaling(self) -> None:
        config = parse_config(LLAMA | {"rope_theta": 1e6, "rope_scaling": None})
        assert config.rope == RopeConfig(theta=1e6)
        assert parse_config(LLAMA).rope == RopeConfig(theta=1e4)

    def test_dtype_has_two_names(self) -> None:
        assert parse_config(LLAMA | {"torch_dtype": "bfloat16"}).dtype == "bfloat16"
        assert parse_config(LLAMA | {"dtype": "float16"}).dtype == "float16"
        assert parse_config(LLAMA).dtype is None

    def test_what_is_left_out_is_as_in_transformers(self) -> None:
        bare = {key: value for key, value in LLAMA.items() if key != "num_key_value_heads"}
        assert parse_config(bare).num_key_value_heads == 4
        assert parse_config(bare | {"num_key_value_heads": None}).num_key_value_heads == 4
        assert parse_config(of("MistralForCausalLM")).sliding_windows == (4096,) * 3
        assert parse_config(of("MistralForCausalLM", sliding_window=None)).sliding_windows == (
            (None,) * 3
        )
        assert parse_config(of("Qwen3ForCausalLM")).head_dim == 128
        assert parse_config(LLAMA | {"head_dim": None}).head_dim == 16

    def test_architecture_may_be_missing(self) -> None:
        config = parse_config(LLAMA | {"architectures": None, "model_type": "mistral"})
        assert config.architecture == "MistralForCausalLM"

    def test_qwen_windows(self) -> None:
        window = {"use_sliding_window": True, "sliding_window": 8}
        types = ["sliding_attention", "full_attention", "sliding_attention"]
        named = parse_config(of("Qwen2ForCausalLM", layer_types=types, **window))
        assert named.sliding_windows == (8, None, 8)
        counted = parse_config(of("Qwen3ForCausalLM", max_window_layers=2, **window))
        assert counted.sliding_windows == (None, None, 8)
        off = window | {"use_sliding_window": False}
        assert parse_config(of("Qwen2ForCausalLM", **off)).sliding_windows == (None,) * 3


REFUSED: dict[str, dict[str, Any]] = {
    "GPT2LMHeadModel": of("GPT2LMHeadModel"),
    "MixtralForCausalLM": of("MixtralForCausalLM"),
    "mamba": LLAMA | {"architectures": [], "model_type": "mamba"},
    "gptq": LLAMA | {"quantization_config": {"quant_method": "gptq", "bits": 4}},
    "num_experts": of("Qwen3ForCausalLM", num_experts=8),
    "gelu": LLAMA | {"hidden_act": "gelu"},
    "longrope": LLAMA | {"rope_scaling": {"rope_type": "longrope", "factor": 4.0}},
    "mrope": LLAMA | {"rope_scaling": {"type": "mrope", "mrope_section": [1, 2]}},
    "differ by layer": LLAMA | {"rope_parameters": {"full_attention": {"rope_type": "default"}}},
    "part of a head": LLAMA | {"partial_rotary_factor": 0.5},
    "factor": LLAMA | {"rope_scaling": {"rope_type": "linear"}},
    "low_freq_factor": LLAMA | {"rope_scaling": {"rope_type": "llama3", "factor": 8.0}},
    "sliding_window": LLAMA | {"sliding_window": 128},
    "layer_types": of(
        "Qwen2ForCausalLM", use_sliding_window=True, layer_types=["linear_attention"] * 3
    ),
    "vocab_size": {key: value for key, value in LLAMA.items() if key != "vocab_size"},
    "hidden_size": LLAMA | {"hidden_size": 0},
    "num_hidden_layers": LLAMA | {"num_hidden_layers": "3"},
    "intermediate_size": LLAMA | {"intermediate_size": 96.5},
    "do not divide": LLAMA | {"num_key_value_heads": 3},
    "size 15": LLAMA | {"head_dim": 15},
    "rms_norm_eps": LLAMA | {"rms_norm_eps": float("nan")},
}


class TestRefusals:
    @pytest.mark.parametrize("named", REFUSED)
    def test_names_what_it_refuses(self, named: str) -> None:
        with pytest.raises(UnsupportedModelError, match=named) as refusal:
            parse_config(REFUSED[named])
        assert str(refusal.value).endswith(".")

    @pytest.mark.parametrize("content", [None, "", "{", "[]", "null", b"\xff\xfe{}"])
    def test_unreadable_file(self, tmp_path: Path, content: str | bytes | None) -> None:
        if content is not None:
            data = content if isinstance(content, bytes) else content.encode()
            (tmp_path / "config.json").write_bytes(data)
        with pytest.raises(UnsupportedModelError, match=r"config\.json"):
            load_config(tmp_path)

    def test_the_base_is_accepted(self, tmp_path: Path) -> None:
        """So the refusals above are for what each changes."""
        (tmp_path / "config.json").write_text(json.dumps(LLAMA))
        assert load_config(tmp_path) == parse_config(LLAMA)


floats = st.floats(1.0, 64.0)


@st.composite
def rope_parameters(draw: st.DrawFn) -> dict[str, Any]:
    kind = draw(st.sampled_from(["linear", "dynamic", "llama3", "yarn"]))
    values: dict[str, Any] = {
        "rope_type": kind,
        "rope_theta": draw(st.sampled_from([1e4, 5e5, 1e6])),
        "factor": draw(floats),
    }
    if kind in ("llama3", "yarn"):
        values["original_max_position_embeddings"] = draw(st.sampled_from([64, 2048, 8192]))
    if kind == "llama3":
        values["low_freq_factor"] = draw(st.floats(0.5, 2.0))
        values["high_freq_factor"] = draw(st.floats(3.0, 8.0))
    if kind == "yarn":
        optional = {
            "beta_fast": st.floats(16.0, 64.0),
            "beta_slow": st.floats(0.5, 2.0),
            "attention_factor": st.floats(0.5, 2.0),
            "mscale": st.floats(0.5, 1.5),
            "mscale_all_dim": st.floats(0.5, 1.5),
            "truncate": st.booleans(),
        }
        values |= draw(st.fixed_dictionaries({}, optional=optional))
    return values


@settings(max_examples=150, deadline=None)
@given(rope_parameters(), st.sampled_from([8, 16, 24, 64, 128]))
def test_frequencies_as_in_transformers(values: dict[str, Any], head_dim: int) -> None:
    shape = LLAMA | {"head_dim": head_dim, "max_position_embeddings": 16384}
    theirs = LlamaConfig(**{key: value for key, value in shape.items() if key != "architectures"})
    theirs.rope_parameters = dict(values)
    expected, attention_factor = ROPE_INIT_FUNCTIONS[values["rope_type"]](theirs)
    rope = parse_config(shape | {"rope_parameters": values}).rope
    torch.testing.assert_close(inverse_frequencies(rope, head_dim), expected, rtol=1e-5, atol=0)
    assert rope.attention_factor == pytest.approx(attention_factor)
