"""What a configuration takes of each GPU, by arithmetic: nothing is loaded, no GPU is needed.

    python benchmarks/memory.py configs/llama-3.1-70b-tp8.yaml --gpu 80GiB

The model is one whose shape is in benchmarks/shapes.py, or a folder with a config.json. The lines
are rank 0's, which alone has token counts. CUDA graphs and the working memory of the largest pass
are measured at the server's start; here they are an allowance. The last line: what is left for the
KV cache over what may be used.
"""

import argparse
from dataclasses import dataclass
from pathlib import Path

import torch
from shapes import SHAPES

from lorakeet.configs.settings import Settings, SettingsError, load, parse_size
from lorakeet.lora.pool import bytes_per_row
from lorakeet.lora.specs import group_specs
from lorakeet.models.config import ModelConfig, UnsupportedModelError, load_config, parse_config
from lorakeet.models.kv_cache import kv_block_bytes
from lorakeet.models.llama import LlamaForCausalLM
from lorakeet.models.penalties import TokenCounts
from lorakeet.models.process_group import ProcessGroup
from lorakeet.models.weights import resolve_dtype
from lorakeet.server.engine.memory import ADDED_TOKENS

GiB = 2**30


@dataclass(frozen=True)
class RankMemory:
    """Bytes on one rank's GPU."""

    usable: int  # the allowed share of all
    weights: int
    adapter_pool: int
    adapter_vocabularies: int
    token_counts: int  # of penalties
    allowance: int  # CUDA graphs, and the working memory of a pass
    row: int  # one rank row of an adapter, all modules
    token: int  # keys and values of one token

    @property
    def kv_cache(self) -> int:
        pools = self.adapter_pool + self.adapter_vocabularies
        return self.usable - self.weights - pools - self.token_counts - self.allowance

    @property
    def rows(self) -> int:
        """Rank rows of the pool."""
        return self.adapter_pool // self.row

    @property
    def tokens(self) -> int:
        """That the KV cache holds."""
        return max(0, self.kv_cache) // self.token


def model_config(name: str) -> ModelConfig:
    return parse_config(SHAPES[name]) if name in SHAPES else load_config(Path(name))


def rank_memory(settings: Settings, rank: int, gpu: int, allowance: int) -> RankMemory:
    """`gpu`: bytes of each GPU. Raises UnsupportedModelError for a model that cannot be cut so,
    SettingsError for settings that leave open what is asked."""
    if settings.model is None or settings.lora_memory is None:
        raise SettingsError("only for settings that name a model and lora_memory")
    group = ProcessGroup(rank, settings.tensor_parallel_size)
    config = model_config(settings.model)
    dtype = resolve_dtype(config, torch.device("cuda"), settings.dtype)
    with torch.device("meta"):
        model = LlamaForCausalLM(config, group).to(dtype)
    row = bytes_per_row(group_specs(config, group), dtype)
    num_counted = 0 if rank else settings.max_num_seqs  # rank 0 alone samples
    block = kv_block_bytes(config, settings.block_size, dtype, group)
    return RankMemory(
        usable=int(gpu * settings.gpu_memory_utilization),
        weights=sum(tensor.nbytes for tensor in (*model.parameters(), *model.buffers())),
        adapter_pool=settings.lora_memory // row * row,
        adapter_vocabularies=settings.lora_vocabulary_memory or gpu // 32,
        token_counts=TokenCounts(num_counted, config.vocab_size + ADDED_TOKENS, "meta").nbytes,
        allowance=allowance,
        row=row,
        token=block // settings.block_size,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("config", type=Path)
    parser.add_argument("--gpu", type=parse_size, default=80 * GiB, help="memory of each GPU")
    parser.add_argument("--allowance", type=parse_size, default=6 * GiB, help="graphs and passes")
    arguments = parser.parse_args()
    settings = load(arguments.config)
    try:
        found = rank_memory(settings, 0, arguments.gpu, arguments.allowance)
    except (SettingsError, UnsupportedModelError) as error:
        parser.exit(1, f"{arguments.config}: {error}\n")
    print(f"{settings.model}, each of {settings.tensor_parallel_size} ranks:")
    parts = "weights", "adapter_pool", "adapter_vocabularies", "token_counts", "allowance"
    for part in (*parts, "kv_cache"):
        print(f"  {part.replace('_', ' '):22}{getattr(found, part) / GiB:8.2f} GiB")
    print(f"  {'unused':22}{(arguments.gpu - found.usable) / GiB:8.2f} GiB")
    row, token = found.row / 2**20, found.token / 2**10
    adapters = found.rows // settings.max_lora_rank
    print(f"An adapter takes {row:.2f} MiB for each rank that it has;")
    print(f"  the pool holds {found.rows}: {adapters} adapters of the largest rank.")
    print(f"A token takes {token:.0f} KiB of KV cache; there is room for {found.tokens}.")
    print(f"KV cache over what may be used: {found.kv_cache / found.usable:.2f}")


if __name__ == "__main__":
    main()
