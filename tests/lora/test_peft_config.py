"""adapter_config.json, field by field, and PEFT's own pattern lookup as the oracle."""

import json
import math
from typing import Any

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st
from peft import LoraConfig
from peft.utils.other import get_pattern_key

from lorakeet.lora.adapter import AdapterError
from lorakeet.lora.peft_config import PeftConfig, Scaling, parse_config

PATH = "model.layers.1.self_attn.q_proj"


def parse(**fields: Any) -> PeftConfig:
    config = {"peft_type": "LORA", "r": 8, "lora_alpha": 16} | fields
    return parse_config(json.dumps({k: v for k, v in config.items() if v is not ...}).encode())


def scaling(config: PeftConfig, path: str = PATH) -> Scaling:
    return config.resolve([path])[path]


def test_scale_is_alpha_over_rank() -> None:
    assert scaling(parse(r=16, lora_alpha=32)).scale == 2


def test_rslora_divides_by_the_root() -> None:
    assert scaling(parse(r=16, lora_alpha=32, use_rslora=True)).scale == 8


def test_rslora_takes_the_root_of_the_modules_own_rank() -> None:
    config = parse(use_rslora=True, rank_pattern={"q_proj": 4}, alpha_pattern={"q_proj": 3})
    assert scaling(config) == Scaling(4, 3.0, 1.5)
    assert scaling(config, "model.layers.1.self_attn.k_proj").scale == 16 / math.sqrt(8)


@pytest.mark.parametrize("field", ["r", "lora_alpha", "use_rslora", "rank_pattern"])
def test_missing_fields_have_peft_defaults(field: str) -> None:
    default = LoraConfig()
    expected = {"r": 8, "lora_alpha": 16, "use_rslora": False, "rank_pattern": {}}
    expected[field] = getattr(default, field)
    config = parse(**{field: ...})
    assert (config.r, config.lora_alpha, config.use_rslora) == (
        expected["r"],
        expected["lora_alpha"],
        expected["use_rslora"],
    )
    assert config.rank_pattern == ()


@pytest.mark.parametrize("field", ["target_modules", "bias", "base_model_name_or_path"])
def test_fields_that_need_not_be_there(field: str) -> None:
    assert parse(**{field: ...}) == parse()


def test_peft_type_must_be_there() -> None:
    with pytest.raises(AdapterError, match="peft_type is missing"):
        parse(peft_type=...)


@pytest.mark.parametrize("alpha", [0, -16, 12.5, 16])
def test_any_finite_alpha_is_divided(alpha: float) -> None:
    assert scaling(parse(lora_alpha=alpha)).scale == alpha / 8


@pytest.mark.parametrize("alpha", ["16", None, True, [16], math.nan, math.inf, 10**400])
def test_other_alphas_are_refused(alpha: Any) -> None:
    with pytest.raises(AdapterError, match="lora_alpha must be"):
        parse(lora_alpha=alpha)
    with pytest.raises(AdapterError, match=r"alpha_pattern 'q_proj' must be"):
        parse(alpha_pattern={"q_proj": alpha})


@pytest.mark.parametrize("rank", [0, -1, 8.0, "8", None, True])
def test_ranks_are_positive_integers(rank: Any) -> None:
    with pytest.raises(AdapterError, match="r must be a positive integer"):
        parse(r=rank)
    with pytest.raises(AdapterError, match=r"rank_pattern 'q_proj' must be a positive integer"):
        parse(rank_pattern={"q_proj": rank})


@pytest.mark.parametrize("value", [None, False, 0, "", [], {}])
def test_unknown_field_without_a_value_is_ignored(value: Any) -> None:
    assert parse(new_thing=value, use_dora=value) == parse()


@pytest.mark.parametrize("value", [{"x": 1}, True, 1, "on", ["x"]])
def test_unknown_field_with_a_value_is_refused(value: Any) -> None:
    with pytest.raises(AdapterError, match="'new_thing' is not supported"):
        parse(new_thing=value)


def test_everything_that_peft_writes_for_a_plain_lora_is_understood() -> None:
    fields = LoraConfig(r=8, lora_alpha=16, target_modules="all-linear").to_dict()
    assert parse(**fields, runtime_config={"ephemeral_gpu_offload": True}) == parse()


@pytest.mark.parametrize(
    "fields",
    [
        {"use_dora": "true"},
        {"modules_to_save": ["norm"]},
        {"modules_to_save": "lm_head"},
        {"trainable_token_indices": [1, 1]},
        {"trainable_token_indices": {"q_proj": [1]}},
        {"alora_invocation_tokens": ["a"]},
        {"layer_replication": [[0, 2], [1, 3]]},
        {"target_parameters": ["mlp.experts.gate_up_proj"]},
        {"use_qalora": True},
        {"use_bdlora": {"nblocks": 2}},
        {"lora_bias": True, "use_dora": True},
        {"kasa_config": {"beta": 0.1}},
        {"monteclora_config": {"num_samples": 2}},
        {"arrow_config": {"top_k": 3}},
        {"velora_config": {"num_groups": 2}},
        {"init_lora_weights": "pissa_niter_4"},
        {"init_lora_weights": "olora"},
        {"init_lora_weights": ["gaussian"]},
        {"init_lora_weights": "loftq"},
        {"bias": "some"},
        {"peft_type": "IA3"},
        {"peft_type": ["LORA"]},
        {"use_rslora": "false"},
        {"rank_pattern": ["q_proj"]},
    ],
)
def test_other_kinds_are_refused_by_name(fields: dict[str, Any]) -> None:
    with pytest.raises(AdapterError, match=next(iter(fields))):
        parse(**fields)


@pytest.mark.parametrize("init", ["pissa", "pissa_niter_4", "olora", "corda", "lora_ga"])
def test_how_to_convert_is_said(init: str) -> None:
    with pytest.raises(AdapterError, match="path_initial_model_for_weight_conversion"):
        parse(init_lora_weights=init)


@pytest.mark.parametrize("init", [True, False, None, "gaussian", "eva", "orthogonal", "mica"])
def test_start_values_that_leave_the_base_alone(init: Any) -> None:
    assert parse(init_lora_weights=init) == parse()


@pytest.mark.parametrize(
    "data",
    [b"", b"null", b"[]", b"7", b"{", b'{"r": 8', b"\xff\xfe{}", b"[" * 100_000, b"9" * 10_000],
)
def test_what_is_no_config_is_refused(data: bytes) -> None:
    with pytest.raises(AdapterError, match=r"^adapter_config\.json"):
        parse_config(data)


def test_messages_are_short_whatever_the_file_holds() -> None:
    for fields in ({"x" * 10**6: 1}, {"r": "x" * 10**6}, {"alpha_pattern": {"x" * 10**6: 1}}):
        with pytest.raises(AdapterError) as caught:
            parse(**fields)
        assert len(str(caught.value)) < 400


# --- patterns ---

_PATHS = [
    f"{prefix}layers.{layer}.{module}"
    for prefix in ("model.", "model.language_model.")
    for layer in (1, 2, 11, 12)
    for module in ("self_attn.q_proj", "self_attn.o_proj", "mlp.down_proj", "mlp.gate_up_proj")
] + ["model.embed_tokens", "lm_head"]

_PARTS = st.sampled_from(
    r"layers 1 11 2 q_proj _proj self_attn mlp model lm_head down proj".split()
    + r". \. .* (q|o)_proj [12] ^ $ | \d+ (?:1|2)".split()
)
_KEYS = st.lists(_PARTS, min_size=1, max_size=6).map("".join) | st.sampled_from(_PATHS)


@given(st.dictionaries(_KEYS, st.integers(1, 99), max_size=4), st.sampled_from(_PATHS))
def test_lookup_is_pefts(pattern: dict[str, int], path: str) -> None:
    assume(all(key.count("*") + key.count("+") + key.count("(") < 3 for key in pattern))
    config = parse(rank_pattern=pattern, alpha_pattern=pattern)
    found = pattern.get(get_pattern_key(list(pattern), path))
    resolved = scaling(config, path)
    assert resolved.rank == (8 if found is None else found)
    assert resolved.alpha == (16 if found is None else found)


def test_first_key_wins_and_matches_at_a_dot() -> None:
    config = parse(rank_pattern={"layers.1.self_attn.q_proj": 32, "q_proj": 4, "self_attn.*": 2})
    assert scaling(config).rank == 32
    assert scaling(config, "model.layers.11.self_attn.q_proj").rank == 4
    assert scaling(config, "model.layers.11.self_attn.k_proj").rank == 2
    assert scaling(config, "model.layers.11.cross_self_attn.k_proj").rank == 8


@pytest.mark.parametrize("key", ["(a+)+b", "(.*)*", "(.|.){99}x", ".*" * 9, "a?" * 99, "x" * 999])
def test_patterns_that_could_match_for_ever_are_refused(key: str) -> None:
    with pytest.raises(AdapterError, match=r"rank_pattern .* is too complex"):
        parse(rank_pattern={key: 8})


def test_invalid_pattern_is_refused() -> None:
    with pytest.raises(AdapterError, match=r"alpha_pattern '\[a' is no valid pattern"):
        parse(alpha_pattern={"[a": 8})
