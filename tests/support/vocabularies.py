"""Adapters with rows of embedding and head of their own, made by PEFT, and PEFT as their oracle."""

import copy
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, PeftModel, get_peft_model
from tokenizers import AddedToken
from torch import Tensor, nn

from support.adapters import base_model, randomise
from support.models import TOKENIZER_SIZE, VOCAB_SIZE, tiny_tokenizer

GROWN, SHRUNK = VOCAB_SIZE + 4, TOKENIZER_SIZE + 4  # as `resize_token_embeddings` leaves them
ADDED = tuple(range(VOCAB_SIZE, GROWN))
ENDS = ("embed_tokens", "lm_head")


@dataclass(frozen=True)
class VocabularyKind:
    """What an adapter trains, in a model whose vocabulary was resized before."""

    config: dict[str, Any]
    size: int = VOCAB_SIZE


def _kind(size: int = VOCAB_SIZE, targets: Sequence[str] = (), **config: Any) -> VocabularyKind:
    return VocabularyKind({"target_modules": ["q_proj", *targets], **config}, size)


KINDS: dict[str, VocabularyKind] = {
    "head": _kind(modules_to_save=["lm_head"]),
    "embedding": _kind(modules_to_save=["embed_tokens"]),
    "both": _kind(modules_to_save=[*ENDS]),
    "both_tied": _kind(modules_to_save=["embed_tokens"], ensure_weight_tying=True),
    "tokens": _kind(trainable_token_indices=[3, 7, 250]),
    "tokens_and_lora_head": _kind(targets=["lm_head"], trainable_token_indices=[3, 7]),
    "tokens_of_each": _kind(trainable_token_indices={"embed_tokens": [3, 7], "lm_head": [3, 9]}),
    "resized": _kind(GROWN),
    "resized_both": _kind(GROWN, modules_to_save=[*ENDS]),
    "resized_embedding": _kind(GROWN, modules_to_save=["embed_tokens"]),
    "resized_lora": _kind(GROWN, targets=ENDS),
    "resized_dora_head": _kind(
        GROWN, targets=["lm_head"], use_dora=True, modules_to_save=["embed_tokens"]
    ),
    "resized_tokens": _kind(GROWN, trainable_token_indices=[3, *ADDED]),
    "shrunk": _kind(SHRUNK, modules_to_save=[*ENDS]),
    "shrunk_lora": _kind(SHRUNK, targets=ENDS),
}


def make_vocabulary_adapter(
    folder: Path, model: Path, kind: VocabularyKind, seed: int = 0, loud: Sequence[int] = ()
) -> Path:
    """Everything that is trained is random. Tokens in `loud` are likely: their head rows are long,
    whether they are trained or not."""
    peft_model = get_peft_model(
        _resized(model, kind.size),
        LoraConfig(r=4, task_type="CAUSAL_LM", **kind.config),
    )
    generator = torch.Generator().manual_seed(seed)
    randomise(peft_model, generator)
    with torch.no_grad():
        for name, parameter in peft_model.named_parameters():
            added = parameter[VOCAB_SIZE:] if parameter.shape[0] == GROWN else parameter[:0]
            if parameter.ndim == 2 and added.shape[1:] == (64,):
                added.copy_(0.4 * torch.randn(added.shape, generator=generator))
            if "lm_head" in name and parameter.shape == (kind.size, 64):
                parameter[list(loud)] *= 4
    peft_model.save_pretrained(str(folder))
    return folder


def vocabulary_logprobs(
    model: Path, adapter: Path, kind: VocabularyKind, token_ids: list[int]
) -> Tensor:
    """float32 log-softmax (len, adapter's vocabulary) of one prompt."""
    loaded = PeftModel.from_pretrained(_resized(model, kind.size), str(adapter)).eval()
    with torch.inference_mode():
        logits = loaded(torch.tensor([token_ids])).logits[0]
    return torch.log_softmax(logits.float(), dim=-1)


def add_tokens(folder: Path, *tokens: str, start: int = VOCAB_SIZE) -> Path:
    """Put the model's tokenizer with more tokens, from id `start` on, into an adapter's folder."""
    tokenizer = tiny_tokenizer()
    fillers = [f"<|unused{i}|>" for i in range(start - len(tokenizer))]
    tokenizer.add_tokens([AddedToken(text, special=False) for text in (*fillers, *tokens)])
    tokenizer.backend_tokenizer.save(str(folder / "tokenizer.json"))
    return folder


def _resized(model: Path, size: int) -> nn.Module:
    base = copy.deepcopy(base_model(model))
    if size != VOCAB_SIZE:
        with torch.random.fork_rng(devices=[]):  # new rows are drawn from the global generator
            torch.manual_seed(0)
            base.resize_token_embeddings(size, mean_resizing=False)  # type: ignore[operator]
    return base
