"""LoRA adapters made by PEFT, and PEFT itself as the oracle of what they do."""

import copy
import json
import warnings
from collections.abc import Callable, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import AutoModelForCausalLM

from lorakeet.server.engine.adapter_entry import last_occurrence

ALL_LINEAR = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


def make_adapter(
    folder: Path,
    model_folder: Path,
    *,
    seed: int = 0,
    r: int = 8,
    lora_alpha: float = 16,
    target_modules: Sequence[str] | str = ALL_LINEAR,
    **lora_config: Any,
) -> Path:
    """Save a random LoRA of the model, through PEFT, as `folder`; equal seeds give equal tensors.

    Everything trainable is random: with PEFT's own start values B is zero and no test of parity
    could fail. Magnitudes of DoRA vary around the base's column norms, as after training: PEFT's
    random start would make them depend on all that was drawn before, and long.
    `lora_config` goes to PEFT's LoraConfig. Returns `folder`.
    """
    targets = target_modules if isinstance(target_modules, str) else list(target_modules)
    config = LoraConfig(
        r=r,
        lora_alpha=lora_alpha,
        target_modules=targets,
        task_type="CAUSAL_LM",
        **lora_config,
    )
    model = get_peft_model(copy.deepcopy(base_model(model_folder)), config)
    randomise(model, torch.Generator().manual_seed(seed))
    model.create_or_update_model_card = lambda folder: None  # nobody reads it
    model.save_pretrained(str(folder))
    return folder


def edit_config(folder: Path, **fields: Any) -> Path:
    """Set fields of an adapter's config; the value `...` takes a field out."""
    path = folder / "adapter_config.json"
    config = json.loads(path.read_text()) | fields
    path.write_text(json.dumps({key: value for key, value in config.items() if value is not ...}))
    return folder


def edit_tensors(folder: Path, change: Callable[[dict[str, Tensor]], dict[str, Tensor]]) -> Path:
    """Write `change(tensors)` in place of an adapter's tensors."""
    copies = {
        key: tensor.clone(memory_format=torch.contiguous_format)
        for key, tensor in change(tensors_of(folder)).items()
    }
    save_file(copies, folder / "adapter_model.safetensors")
    return folder


def tensors_of(folder: Path) -> dict[str, Tensor]:
    tensors: dict[str, Tensor] = load_file(folder / "adapter_model.safetensors")
    return tensors


def peft_logprobs(model_folder: Path, adapter: Path | None, token_ids: list[int]) -> Tensor:
    """float32 log-softmax (len, vocab) of one prompt; row i scores the token after position i."""
    with torch.inference_mode():
        logits = peft_model(model_folder, adapter)(torch.tensor([token_ids])).logits[0]
    return torch.log_softmax(logits.float(), dim=-1)


def alora_logprobs(
    model_folder: Path,
    adapter: Path,
    invocation: list[int],
    prompt: list[int],
    token_ids: list[int],
) -> Tensor:
    """As `peft_logprobs`, of an aLoRA. As PEFT's `generate` has it, the prompt alone says where the
    adapter starts."""
    start = last_occurrence(prompt, invocation)
    offsets = [None if start is None else len(token_ids) - start]
    with torch.inference_mode(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        output = peft_model(model_folder, adapter)(
            input_ids=torch.tensor([token_ids]), alora_offsets=offsets
        )
    return torch.log_softmax(output.logits[0].float(), dim=-1)


def peft_greedy(
    model_folder: Path, adapter: Path | None, prompt: list[int], num_tokens: int
) -> list[int]:
    """The `num_tokens` likeliest tokens after the prompt, one after the other, past any EOS."""
    token_ids = list(prompt)
    for _ in range(num_tokens):
        token_ids.append(int(peft_logprobs(model_folder, adapter, token_ids)[-1].argmax()))
    return token_ids[len(prompt) :]


def base_model(model_folder: Path) -> nn.Module:
    """The float32 model on the CPU, shared by all callers: copy it before changing it."""
    return _base_model(model_folder, folder_state(model_folder))


def peft_model(model_folder: Path, adapter: Path | None) -> nn.Module:
    """The model with one adapter (None: without), shared by all callers: not to be changed."""
    if adapter is None:
        return base_model(model_folder)
    return _peft_model(model_folder, folder_state(model_folder), adapter, folder_state(adapter))


FolderState = tuple[tuple[str, int, int], ...]  # a cached model is used only for unchanged files


def folder_state(folder: Path) -> FolderState:
    stats = [(path.name, path.stat()) for path in sorted(folder.iterdir()) if path.is_file()]
    return tuple((name, stat.st_size, stat.st_mtime_ns) for name, stat in stats)


@lru_cache(maxsize=8)
def _base_model(model_folder: Path, _: FolderState) -> nn.Module:
    model: nn.Module = AutoModelForCausalLM.from_pretrained(
        model_folder, dtype=torch.float32, attn_implementation="eager", local_files_only=True
    )
    return model.eval()


@lru_cache(maxsize=16)
def _peft_model(
    model_folder: Path, model_state: FolderState, adapter: Path, _: FolderState
) -> nn.Module:
    base = copy.deepcopy(_base_model(model_folder, model_state))
    model: nn.Module = PeftModel.from_pretrained(base, str(adapter), torch_device="cpu")
    return model.eval()


@torch.no_grad()
def randomise(model: nn.Module, generator: torch.Generator) -> None:
    """Draw everything trainable anew, so that A x is about as large as x and deltas are seen."""
    for name, parameter in model.named_parameters():
        if not parameter.requires_grad:
            continue
        noise = torch.randn(parameter.shape, generator=generator)
        if "lora_embedding_A" in name:
            parameter.copy_(noise)
        elif "lora_embedding_B" in name:
            parameter.copy_(0.1 * noise / parameter.shape[-1] ** 0.5)
        elif "lora_A" in name:
            parameter.copy_(noise / parameter.shape[-1] ** 0.5)
        elif "lora_B" in name and parameter.dim() == 2:
            parameter.copy_(0.3 * noise / parameter.shape[-1] ** 0.5)
        elif "lora_magnitude_vector" in name:
            parameter.mul_(1 + 0.3 * noise)
        else:  # biases, modules_to_save, trainable tokens
            parameter.add_(0.1 * noise)
