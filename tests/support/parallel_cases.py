"""Models and adapters for tensor parallelism: made once, with PEFT's scores, and run by ranks."""

from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import torch
from torch import Tensor

from lorakeet.lora.adapter import Slot
from lorakeet.lora.backend import make_backend
from lorakeet.lora.base_weights import BaseWeights
from lorakeet.lora.batch import HEAD, LoRAForwardBatch, body_groups, build_lora_batch
from lorakeet.lora.layers import wrap_model
from lorakeet.lora.peft_files import read_adapter
from lorakeet.lora.pool import AdapterPool, bytes_per_row
from lorakeet.lora.row_tables import table_width
from lorakeet.lora.specs import group_specs
from lorakeet.models.batch import ForwardBatch
from lorakeet.models.norm import RMSNorm
from lorakeet.models.process_group import ProcessGroup
from lorakeet.models.weights import DtypeName, load_model
from support.passes import Passes, epilogues
from support.ranks import CountingGroup

Blend = tuple[tuple[str, float], ...]  # adapters by name, and their weights

_MAX_RANK = 64
_WORKERS = ThreadPoolExecutor(4)  # ranks start without PEFT, so not those of support.deltas


@dataclass(frozen=True)
class ModelCase:
    """A model on disk, its adapters by name, and one prompt for each of them and for the base."""

    name: str
    folder: Path
    adapters: Mapping[str, Path]
    blends: Mapping[str, Blend]
    prompts: Mapping[str, list[int]]


def make_prompts(names: Sequence[str], vocab_size: int) -> dict[str, list[int]]:
    """Of all lengths; every third is long enough for what is done with many rows of one adapter."""
    random = Random(0)
    lengths = [random.randint(34, 40) if i % 3 == 0 else random.randint(3, 12) for i in range(99)]
    return {
        name: [random.randrange(vocab_size) for _ in range(length)]
        for name, length in zip(names, lengths, strict=False)
    }


def run_cases(
    group: ProcessGroup,
    cases: Sequence[ModelCase],
    results: Path,
    device: str = "cpu",
    dtype: DtypeName = "float32",
) -> None:
    """What a rank does: the log-probabilities of every prompt, to `results`/RANK.pt.

    On "cuda" the device is the current one.
    """
    with torch.device(device):
        found: dict[str, Any] = {
            "epilogue": _add_norm(group).cpu(),
            "collectives": {k: v.cpu() for k, v in _call_collectives(group).items()},
        }
    for case in cases:
        found[case.name] = _run_case(group, case, device, dtype)
    torch.save(found, results / f"{group.rank}.pt")


def _run_case(
    group: ProcessGroup, case: ModelCase, device: str, dtype: DtypeName
) -> dict[str, Any]:
    model = load_model(case.folder, device, dtype, group=group)
    specs = group_specs(model.config, group)
    adapters = {
        name: read_adapter(
            folder,
            specs,
            max_rank=_MAX_RANK,
            dtype=model.dtype,
            workers=_WORKERS,
            base_weights=BaseWeights(model),
        )
        for name, folder in case.adapters.items()
    }
    num_rows = sum(adapter.num_rows for adapter in adapters.values())
    width = table_width(2 * _MAX_RANK)
    num_slots = 1 + len(adapters) + len(case.blends)
    pool = AdapterPool(specs, num_slots, num_rows, width, model.dtype, device)
    rows = list(range(num_rows))
    Random(1).shuffle(rows)
    slots = {name: Slot(index) for index, name in enumerate([*adapters, *case.blends], start=1)}
    for name, adapter in adapters.items():
        pool.write(slots[name], [rows.pop() for _ in range(adapter.num_rows)], adapter).result()
    for name, parts in case.blends.items():
        listed = [(slots[part], adapters[part].num_rows, weight) for part, weight in parts]
        pool.write_blend(slots[name], listed)
    num_tokens = sum(map(len, case.prompts.values()))
    wrap_model(model, pool, make_backend(pool, num_tokens, len(slots)))
    passes = Passes(model, num_blocks=1024)
    calls = []
    for chunks in _chunks(case.prompts):
        ordered = sorted(chunks.items(), key=lambda item: len(item[1]) != 1)  # as Passes does
        own = [slots.get(name, Slot(0)) for name, tokens in ordered for _ in tokens]
        before = len(group.calls) if isinstance(group, CountingGroup) else 0
        passes.run(chunks, lambda batch, own=own: _with_lora(batch, own, pool))  # type: ignore[misc]
        calls.append(group.calls[before:] if isinstance(group, CountingGroup) else [])
    sizes = {
        name: adapter.vocabulary.size
        for name, adapter in adapters.items()
        if adapter.vocabulary is not None
    }
    vocab_size = model.config.vocab_size
    return {
        "logprobs": {
            name: torch.log_softmax(logits.float().cpu(), dim=-1)[:, : sizes.get(name, vocab_size)]
            for name, logits in passes.logits.items()
        },
        "columns": {name: logits.shape[1] for name, logits in passes.logits.items()},
        "calls": calls,
        "row_bytes": bytes_per_row(specs, torch.float32),
        "weight_bytes": sum(weight.numel() * 4 for weight in model.parameters()),
        "digests": {name: adapter.digest for name, adapter in adapters.items()},
        "num_rows": {name: adapter.num_rows for name, adapter in adapters.items()},
    }


def _chunks(prompts: Mapping[str, list[int]]) -> list[dict[str, list[int]]]:
    """All but two tokens of each prompt, then one and one, as in decode; then the base alone."""
    adapted = {name: tokens for name, tokens in prompts.items() if name != "base alone"}
    return [
        {name: tokens[:-2] for name, tokens in adapted.items()},
        {name: tokens[-2:-1] for name, tokens in adapted.items()},
        {name: tokens[-1:] for name, tokens in adapted.items()},
        {"base alone": prompts["base alone"]},
    ]


def _with_lora(batch: ForwardBatch, slots: Sequence[Slot], pool: AdapterPool) -> LoRAForwardBatch:
    rows = np.array(slots, np.int32)
    values = {name: getattr(batch, name) for name in ForwardBatch.__dataclass_fields__}
    return LoRAForwardBatch(
        **values,
        lora=build_lora_batch(rows, pool, body_groups(pool)),
        logits_lora=build_lora_batch(rows, pool, [HEAD]),
        own_embeddings=pool.vocabularies.for_embedding(rows),
        logits_vocabulary=pool.vocabularies.for_head(rows),
    )


def _add_norm(group: ProcessGroup) -> Tensor:
    """The norm and the sum of ones and a row-parallel layer's output in parts, as on CUDA."""
    norm = RMSNorm(4, eps=0.0).bfloat16()
    norm.weight.data.fill_(2.0)
    residual = torch.ones(5, 4, dtype=torch.bfloat16)
    y = torch.full((2, 5, 4), 1.5 * (group.rank + 1))
    return torch.stack(epilogues(torch.bfloat16, group).add_norm(residual, norm, y))


def _call_collectives(group: ProcessGroup) -> dict[str, Tensor]:
    """Of a tensor whose values are those of one rank each."""
    results = {}
    for dtype in (torch.float32, torch.bfloat16):
        own = torch.arange(6.0).view(2, 3).to(dtype) + 10 * group.rank
        results[f"sum {dtype}"] = group.all_reduce(own.clone())
        results[f"sum of columns {dtype}"] = group.all_reduce(own.clone()[:, 1:])
        for dim in (0, 1):
            results[f"gather {dim} {dtype}"] = group.all_gather(own, dim)
        results[f"broadcast {dtype}"] = group.broadcast(own.clone(), group.size - 1)
    return results
