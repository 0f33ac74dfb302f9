"""Trains the demo adapters with PEFT. Deterministic; uses a GPU if there is one.

    python configs/demo-adapters/train.py [pirate] [json] [headline] [--model FOLDER]

Needs the development dependencies (`pip install -e '.[dev]'`). Without --model the demo model is
fetched. Each adapter takes some minutes on two CPU cores.
"""

import argparse
import random
import shutil
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, get_peft_model
from tqdm import trange
from transformers import AutoModelForCausalLM, AutoTokenizer

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE))
import data  # noqa: E402

_ATTENTION = ["q_proj", "k_proj", "v_proj", "o_proj"]
_MLP = ["gate_proj", "up_proj", "down_proj"]


@dataclass(frozen=True)
class Recipe:
    """One adapter: its examples, its LoRA shape, how long it is trained."""

    examples: Callable[[], list[data.Example]]
    lora: dict[str, Any]
    steps: int = 100
    batch_size: int = 8
    learning_rate: float = 2e-3
    seed: int = field(default=0)


RECIPES = {
    "pirate": Recipe(data.pirate, {"r": 4, "lora_alpha": 8, "target_modules": _ATTENTION + _MLP}),
    "json": Recipe(data.extract_json, {"r": 8, "lora_alpha": 16, "target_modules": _ATTENTION}),
    "headline": Recipe(
        data.headline,
        {"r": 16, "lora_alpha": 16, "use_rslora": True, "target_modules": ["q_proj", "v_proj"]},
    ),
}


def encode(tokenizer: Any, example: data.Example) -> tuple[list[int], int]:
    """Token ids of the whole exchange, and how many of them are the prompt."""
    user = [{"role": "user", "content": example[0]}]
    prompt = tokenizer.apply_chat_template(user, tokenize=False, add_generation_prompt=True)
    ids = tokenizer(prompt + example[1] + "<|im_end|>\n", add_special_tokens=False).input_ids
    return ids, len(tokenizer(prompt, add_special_tokens=False).input_ids)


def collate(rows: list[tuple[list[int], int]], device: str) -> dict[str, torch.Tensor]:
    """Right-padded batch; only the answer's tokens count in the loss."""
    longest = max(len(ids) for ids, _ in rows)
    input_ids = torch.zeros(len(rows), longest, dtype=torch.long)
    labels = torch.full((len(rows), longest), -100)
    mask = torch.zeros(len(rows), longest, dtype=torch.long)
    for row, (ids, prompt) in enumerate(rows):
        input_ids[row, : len(ids)] = torch.tensor(ids)
        labels[row, prompt : len(ids)] = torch.tensor(ids[prompt:])
        mask[row, : len(ids)] = 1
    batch = {"input_ids": input_ids, "attention_mask": mask, "labels": labels}
    return {name: tensor.to(device) for name, tensor in batch.items()}


def train(name: str, recipe: Recipe, model_folder: str, device: str) -> None:
    torch.manual_seed(recipe.seed)
    shuffle = random.Random(recipe.seed)
    tokenizer = AutoTokenizer.from_pretrained(model_folder)
    base = AutoModelForCausalLM.from_pretrained(model_folder, dtype=torch.float32).to(device)
    config = LoraConfig(task_type="CAUSAL_LM", lora_dropout=0.0, **recipe.lora)
    model = get_peft_model(base, config)
    examples = [encode(tokenizer, example) for example in recipe.examples()]
    optimizer = torch.optim.AdamW(
        [p for p in model.parameters() if p.requires_grad],
        lr=recipe.learning_rate,
        weight_decay=0.0,
    )
    schedule = torch.optim.lr_scheduler.OneCycleLR(
        optimizer, recipe.learning_rate, total_steps=recipe.steps, pct_start=0.1
    )
    progress = trange(recipe.steps, desc=name)
    for _ in progress:
        loss = model(**collate(shuffle.sample(examples, recipe.batch_size), device)).loss
        loss.backward()
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        progress.set_postfix(loss=f"{loss.item():.3f}")
    save(model, name)


def save(model: Any, name: str) -> None:
    """Write the adapter in float16, without the card and paths that PEFT adds."""
    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.data = parameter.data.half()
    model.peft_config["default"].base_model_name_or_path = "HuggingFaceTB/SmolLM2-135M-Instruct"
    folder = HERE / name
    shutil.rmtree(folder, ignore_errors=True)
    model.save_pretrained(folder)
    (folder / "README.md").unlink(missing_ok=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", help="which adapters; none: all")
    parser.add_argument("--model", help="folder of SmolLM2-135M-Instruct; none: fetch it")
    arguments = parser.parse_args()
    for name in arguments.names or RECIPES:
        if name not in RECIPES:
            parser.error(f"there is no adapter {name!r}; choose from {', '.join(RECIPES)}")
    model_folder = arguments.model
    if model_folder is None:
        from lorakeet.server.demo import demo_model

        model_folder = str(demo_model())
    device = "cuda" if torch.cuda.is_available() else "cpu"
    for name in arguments.names or RECIPES:
        train(name, RECIPES[name], model_folder, device)


if __name__ == "__main__":
    main()
