"""Folders as the usual trainers leave them: loaded with the numbers of PEFT, or refused."""

import copy
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from peft.tuners.lora.corda import preprocess_corda
from safetensors.torch import save_file

from lorakeet.lora.adapter import AdapterError
from support.adapters import base_model, edit_config, edit_tensors, make_adapter, tensors_of
from support.deltas import Tensors, assert_equals_peft, base_weights, deltas, read, renamed
from support.models import VOCAB_SIZE, tiny_model

PREFIX = "base_model.model."


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model(tmp_path_factory.mktemp("model") / "tiny")


@pytest.fixture(scope="module")
def good(tmp_path_factory: pytest.TempPathFactory, model: Path) -> Path:
    return make_adapter(tmp_path_factory.mktemp("good"), model, r=4)


@pytest.fixture
def folder(tmp_path: Path, good: Path) -> Path:
    return Path(shutil.copytree(good, tmp_path / "adapter"))


# --- what lies beside the adapter ---

BESIDE: dict[str, list[str]] = {
    "peft": ["README.md", ".gitattributes"],
    "unsloth": ["README.md", "tokenizer.model", "special_tokens_map.json", "chat_template.jinja"],
    "axolotl": ["config.json", "debug.log", "checkpoint-20/optimizer.pt", "tokens_state.json"],
    "llama_factory": [
        "all_results.json",
        "llamaboard_config.yaml",
        "trainer_log.jsonl",
        "training_args.bin",
        "training_loss.png",
        "value_head.safetensors",
        "vocab.json",
        "checkpoint-500/adapter_config.json",
        "checkpoint-500/adapter_model.safetensors",
        "checkpoint-500/rng_state_0.pth",
        "checkpoint-500/global_step500/mp_rank_00_model_states.pt",
    ],
    "torchtune": ["adapter_model.pt", "recipe_state.pt", "model-00001-of-00002.safetensors"],
}


@pytest.mark.parametrize("trainer", BESIDE)
def test_other_files_are_not_looked_at(folder: Path, model: Path, good: Path, trainer: str) -> None:
    """Not one of them could be read as what its name says."""
    for name in BESIDE[trainer]:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(b"\x80neither JSON nor weights")
    assert assert_equals_peft(folder, model).digest == read(good, model).digest


# --- configs ---


@pytest.mark.parametrize(
    "fields",
    [
        {  # Unsloth
            "auto_mapping": {"base_model_class": "LlamaForCausalLM", "unsloth_fixed": True},
            "base_model_name_or_path": "unsloth/tiny-bnb-4bit",
            "target_modules": r"(?:.*?(?:language|text).*?(?:self_attn|mlp).*?(?:q_proj|v_proj))",
            "task_type": None,
        },
        {"lora_dropout": 0.05, "modules_to_save": [], "loftq_config": None},  # LLaMA-Factory
        {"peft_version": "0.18.0.dev0@UNKNOWN", "corda_config": None, "eva_config": None},
    ],
)
def test_configs(folder: Path, model: Path, good: Path, fields: dict[str, Any]) -> None:
    edit_config(folder, **fields)
    assert read(folder, model).digest == read(good, model).digest


def test_torchtunes_config_has_a_few_fields(folder: Path, model: Path, good: Path) -> None:
    config = {
        "r": 4,
        "lora_alpha": 16,
        "target_modules": ["q_proj", "v_proj"],
        "peft_type": "LORA",
        "base_model_name_or_path": "meta-llama/Llama-3.2-1B",
    }
    (folder / "adapter_config.json").write_text(json.dumps(config))
    shutil.move(folder / "adapter_model.safetensors", folder / "adapter_model.tmp")
    torch.save(tensors_of(good), folder / "adapter_model.bin")
    assert read(folder, model).digest == read(good, model).digest


# --- names ---


@pytest.mark.parametrize(
    "change",
    [
        lambda k: k.replace(".weight", ".default.weight"),
        lambda k: f"_orig_mod.{k}",
        lambda k: k.replace("base_model.model.model.", "base_model.model._orig_mod.model."),
        lambda k: k.replace(".self_attn", "._fsdp_wrapped_module.self_attn"),
        lambda k: "_fsdp_wrapped_module." + k.replace(".mlp", "._fsdp_wrapped_module.mlp"),
        lambda k: k.replace(".mlp", "._fsdp_wrapped_module._checkpoint_wrapped_module.mlp"),
        lambda k: f"module.{k}",
        lambda k: "module." + k.replace(".weight", ".default.weight"),
        lambda k: k.replace("q_proj.", "q_proj._orig_mod."),
    ],
)
def test_names_with_wrappers(
    folder: Path, model: Path, good: Path, change: Callable[[str], str]
) -> None:
    edit_tensors(folder, renamed(change))
    adapter = read(folder, model)
    assert adapter.digest == read(good, model).digest
    assert deltas(adapter, model).keys() == deltas(read(good, model), model).keys()


def test_a_tensor_with_and_without_its_wrapper(folder: Path, model: Path) -> None:
    edit_tensors(folder, lambda tensors: tensors | {f"module.{k}": v for k, v in tensors.items()})
    with pytest.raises(AdapterError, match="there twice"):
        read(folder, model)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (  # torchtune's adapter_0, not its PEFT export
            lambda k: (
                k.removeprefix(f"{PREFIX}model.")
                .replace("self_attn", "attn")
                .replace("lora_A", "lora_a")
                .replace("lora_B", "lora_b")
            ),
            "torchtune's own names",
        ),
        (lambda k: k.replace("mlp.", "mlp.experts.0."), "experts of an MoE model"),
        (lambda k: k.replace("mlp.", "block_sparse_moe.experts.3."), "experts of an MoE model"),
        (lambda k: k.replace("self_attn.q_proj", "attention.wq"), "cannot be bound"),
    ],
)
def test_names_that_are_refused(
    folder: Path, model: Path, change: Callable[[str], str], reason: str
) -> None:
    edit_tensors(folder, renamed(change))
    with pytest.raises(AdapterError, match=reason):
        read(folder, model)


def test_shards_that_were_not_gathered(folder: Path, model: Path) -> None:
    """What DeepSpeed's stage 3 leaves of a parameter that lies elsewhere."""
    edit_tensors(folder, lambda tensors: {key: torch.zeros(0) for key in tensors})
    with pytest.raises(AdapterError, match="must have 2 dimensions, not 1"):
        read(folder, model)


# --- copies of the base model's weights ---


def base_copies(model: Path, layers: tuple[int, ...] = (0, 1, 2)) -> Tensors:
    names = {"self_attn": ["q_proj", "k_proj", "v_proj", "o_proj"]}
    names["mlp"] = ["gate_proj", "up_proj", "down_proj"]
    weights = base_weights(model)
    return {
        f"{PREFIX}model.layers.{layer}.{parent}.{name}.base_layer.weight": weights[
            f"layers.{layer}.{name}"
        ]
        for layer in layers
        for parent, leaves in names.items()
        for name in leaves
    }


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_copies_of_the_base_are_ignored(
    folder: Path, model: Path, good: Path, dtype: torch.dtype
) -> None:
    copies = {key: tensor.to(dtype) for key, tensor in base_copies(model).items()}
    ends = {
        f"{PREFIX}lm_head.weight": base_weights(model)["lm_head"],
        f"{PREFIX}model.embed_tokens.weight": base_weights(model)["embed_tokens"],
    }
    edit_tensors(folder, lambda tensors: tensors | copies | ends)
    assert read(folder, model).digest == read(good, model).digest


def test_copies_of_another_base_are_refused_by_name(folder: Path, model: Path) -> None:
    copies = base_copies(model, layers=(1,))
    (key,) = (key for key in copies if "up_proj" in key)
    copies[key] = copies[key].clone()
    copies[key][-1, -1] += 0.01
    edit_tensors(folder, lambda tensors: tensors | copies)
    with pytest.raises(AdapterError, match=r"layers\.1\.mlp\.up_proj: .* differ from the base"):
        read(folder, model)
    with pytest.raises(AdapterError, match="no model to compare"):
        read(folder, model, base_weights=None)


def test_copies_of_another_size_are_refused(folder: Path, model: Path) -> None:
    copies = {key: tensor[:, :-1] for key, tensor in base_copies(model).items()}
    edit_tensors(folder, lambda tensors: tensors | copies)
    with pytest.raises(AdapterError, match="the shape of the weight is"):
        read(folder, model)


def test_copies_alone_are_no_adapter(folder: Path, model: Path) -> None:
    edit_tensors(folder, lambda _: base_copies(model))
    with pytest.raises(AdapterError, match="no LoRA tensor"):
        read(folder, model)


# --- start values that change the base ---


@pytest.mark.parametrize("init", ["pissa", "pissa_niter_4", "olora", "corda"])
@pytest.mark.parametrize("use_rslora", [False, True])
def test_converted_by_peft_or_refused(
    tmp_path: Path, model: Path, init: str, use_rslora: bool
) -> None:
    """As PEFT's documentation says to save them: the start first, with `init_lora_weights` true."""
    config = LoraConfig(
        r=4,
        lora_alpha=8,
        target_modules=["q_proj", "down_proj"],
        init_lora_weights=init,
        use_rslora=use_rslora,
        task_type="CAUSAL_LM",
    )
    base = copy.deepcopy(base_model(model))
    if init == "corda":
        text = torch.arange(VOCAB_SIZE)[None]
        preprocess_corda(base, config, run_model=lambda: base(text))
    trained = get_peft_model(base, config)
    trained.peft_config["default"].init_lora_weights = True
    trained.save_pretrained(str(tmp_path / "start"))
    trained.peft_config["default"].init_lora_weights = init
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in trained.parameters():
            if parameter.requires_grad:
                parameter.add_(0.1 * torch.randn(parameter.shape, generator=generator))
    trained.save_pretrained(str(tmp_path / "raw"))
    trained.save_pretrained(
        str(tmp_path / "plain"), path_initial_model_for_weight_conversion=str(tmp_path / "start")
    )
    with pytest.raises(AdapterError, match=f"init_lora_weights '{init}'.*as plain LoRA"):
        read(tmp_path / "raw", model)
    assert assert_equals_peft(tmp_path / "plain", model).rank == 8
    adapter = deltas(read(tmp_path / "plain", model), model)
    for name, delta in adapter.items():
        if name.endswith(("q_proj", "down_proj")):
            module = trained.get_submodule(f"{PREFIX}{name}")
            merged = module.base_layer.weight + module.get_delta_weight("default")
            want = merged - base_model(model).get_parameter(f"{name}.weight")
            torch.testing.assert_close(delta, want.detach(), atol=1e-4, rtol=1e-4)


def test_mica_is_a_plain_lora(tmp_path: Path, model: Path) -> None:
    folder = edit_config(make_adapter(tmp_path, model), init_lora_weights="mica")
    assert_equals_peft(folder, model)


# --- other kinds ---


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"layer_replication": [[0, 2], [1, 3]]}, "layers used several times"),
        ({"use_qalora": True}, "QALoRA"),
        ({"target_parameters": ["mlp.experts.gate_up_proj"]}, "MoE experts"),
        ({"peft_type": "ADALORA"}, "peft_type must be 'LORA', not 'ADALORA'"),
        ({"peft_type": "LOHA"}, "'LOHA'"),
        ({"arrow_config": {"top_k": 2}}, "a router"),
    ],
)
def test_other_kinds_are_refused_by_name(
    folder: Path, model: Path, fields: dict[str, Any], reason: str
) -> None:
    with pytest.raises(AdapterError, match=reason):
        read(edit_config(folder, **fields), model)


def test_a_whole_models_file_is_no_adapter(folder: Path, model: Path) -> None:
    """Merged exports keep the adapter's config at times."""
    save_file(
        {name: weight.clone() for name, weight in base_model(model).state_dict().items()},
        folder / "adapter_model.safetensors",
    )
    with pytest.raises(AdapterError, match=r"cannot be bound to a module: .*norm"):
        read(folder, model)
