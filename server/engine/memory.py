"""How much memory each part gets: the adapter pool, the KV cache, and what a pass needs beside."""

import logging
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from lorakeet.configs.settings import Settings, SettingsError
from lorakeet.lora.adapter import MAX_EXTRA_ROWS, GroupSpec, TokenRows, Vocabulary
from lorakeet.lora.host_store import default_host_bytes
from lorakeet.lora.pool import bytes_per_row
from lorakeet.models.config import ModelConfig
from lorakeet.models.kv_cache import kv_block_bytes
from lorakeet.models.llama import LlamaForCausalLM
from lorakeet.models.process_group import ALONE, ProcessGroup
from lorakeet.models.sampler import SamplingRow
from lorakeet.server.engine.inputs import StepArrays
from lorakeet.server.engine.messages import MAX_BLEND
from lorakeet.server.engine.messages import MAX_LOGPROBS as MAX_LOGPROBS  # the runner too

logger = logging.getLogger(__name__)

MiB = 2**20

ADDED_TOKENS = 1024  # that an adapter may bring before penalties need more memory for them

# What takes the most. No top-k: it would spare top-p the sort of all tokens.
WORST_SAMPLING = SamplingRow(
    top_p=0.9,
    min_p=0.1,
    presence_penalty=1.0,
    frequency_penalty=1.0,
    repetition_penalty=1.1,
    num_logprobs=MAX_LOGPROBS,
)


@dataclass(frozen=True)
class CacheSize:
    """The KV cache that there is room for, and the longest sequence that fits it."""

    num_blocks: int
    max_model_len: int


def free_memory(device: torch.device, num_ranks: int = 1) -> int:
    """Bytes that nobody uses now on a GPU; on the CPU a rank's share of all that there are.

    What the page cache holds there can be had, and tensors take memory only once they are written.
    """
    if device.type == "cuda":
        torch.cuda.empty_cache()
        return torch.cuda.mem_get_info(device)[0]
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // num_ranks


def host_bytes(settings: Settings) -> int:
    """For one rank's part of the adapters in host memory."""
    total = settings.host_lora_memory or default_host_bytes()
    return total // settings.tensor_parallel_size


def pool_rows(
    settings: Settings, specs: Sequence[GroupSpec], dtype: torch.dtype, device: torch.device
) -> int:
    """Rank rows of the adapter pool: as many as `lora_memory` holds.

    Left out: enough for `max_loras` adapters of `max_lora_rank`, in at most a quarter of the free
    memory. Raises SettingsError when not even one adapter of the largest rank fits.
    """
    row_bytes = bytes_per_row(specs, dtype)
    if settings.lora_memory is not None:
        rows = settings.lora_memory // row_bytes
    else:
        wanted = settings.max_loras * (settings.max_lora_rank + MAX_EXTRA_ROWS)
        free = free_memory(device, settings.tensor_parallel_size)
        rows = min(wanted, free // 4 // row_bytes)
    if rows < settings.max_lora_rank:
        needed = -(-settings.max_lora_rank * row_bytes // MiB)
        raise SettingsError(
            f"lora_memory: an adapter of rank {settings.max_lora_rank} (max_lora_rank) takes"
            f" {needed} MiB; there is room for rank {rows}"
        )
    return rows


def vocabulary_bytes(
    settings: Settings, config: ModelConfig, dtype: torch.dtype, device: torch.device
) -> int:
    """For rows of embedding and head that adapters in slots have in place of the base's.

    Left out: enough for `max_loras` adapters that have all of them, in at most a part of the free
    memory: a 32nd of a GPU's, which is set aside; an eighth of a CPU's, taken as it is needed.
    """
    if settings.lora_vocabulary_memory is not None:
        return settings.lora_vocabulary_memory
    tables = 2 * config.vocab_size * (config.hidden_size * dtype.itemsize + 8)  # an id each
    share = 32 if device.type == "cuda" else 8
    free = free_memory(device, settings.tensor_parallel_size)
    return min(2 * settings.max_loras * tables, free // share)


def pool_slots(settings: Settings, num_rows: int) -> int:
    """Slots of the pool, slot 0 included: as many as the adapters of running blends can need, and
    more for idle ones of small rank. A slot itself takes next to no memory."""
    return 1 + settings.max_loras * (1 + MAX_BLEND) + num_rows // 8


def blend_rows(settings: Settings, num_rows: int) -> int:
    """Rows of the pool that the adapters of one blend may have together."""
    wanted = settings.max_blend_rank or 2 * settings.max_lora_rank
    return min(wanted + MAX_BLEND, num_rows)  # each may have a row of biases


def check_model_len(settings: Settings, config: ModelConfig) -> None:
    """Raise SettingsError for a `max_model_len` that the model has no positions for."""
    limit = config.max_position_embeddings
    if settings.max_model_len is not None and settings.max_model_len > limit:
        raise SettingsError(
            f"max_model_len: {settings.max_model_len}; the model's limit is {limit}"
        )


def cache_size(
    settings: Settings,
    config: ModelConfig,
    dtype: torch.dtype,
    memory: int,
    group: ProcessGroup = ALONE,
) -> CacheSize:
    """The cache in at most `memory` bytes of a rank, and never more blocks than all sequences could
    use.

    The longest sequence always fits: a `max_model_len` that was left out is lowered for it, one
    that was given and does not fit raises SettingsError.
    """
    block_size = settings.block_size
    block_bytes = kv_block_bytes(config, block_size, dtype, group)
    num_blocks = max(memory, 0) // block_bytes
    wanted = settings.max_model_len or config.max_position_embeddings
    max_model_len = min(wanted, num_blocks * block_size)
    if max_model_len < wanted:
        needed = -(-wanted // block_size) * block_bytes
        message = (
            f"a sequence of {wanted} tokens takes {needed // MiB} MiB of KV cache; there is room"
            f" for {max(memory, 0) // MiB} MiB (gpu_memory_utilization, on the CPU cpu_kv_memory)"
        )
        if settings.max_model_len is not None or max_model_len == 0:
            raise SettingsError(f"max_model_len: {message}")
        logger.warning("max_model_len is lowered to %d: %s", max_model_len, message)
    blocks_of_sequence = -(-max_model_len // block_size)
    return CacheSize(min(num_blocks, settings.max_num_seqs * blocks_of_sequence), max_model_len)


def kv_memory(settings: Settings, device: torch.device, worst_pass: Callable[[], None]) -> int:
    """Bytes for the KV cache once weights and adapter pool are there.

    On CUDA: the allowed share of all memory, less what is in use and what `worst_pass` needs.
    """
    if device.type != "cuda":
        return settings.cpu_kv_memory // settings.tensor_parallel_size
    free = free_memory(device)
    total = torch.cuda.mem_get_info(device)[1]
    before = torch.cuda.memory_allocated(device)
    torch.cuda.reset_peak_memory_stats(device)
    worst_pass()
    torch.cuda.synchronize(device)
    working = torch.cuda.max_memory_allocated(device) - before
    # what is not torch's (the context, libraries, loaded kernels) may have grown in the pass
    free = min(free, free_memory(device))
    used, allowed = total - free, int(total * settings.gpu_memory_utilization)
    logger.info(
        "of the GPU's %d MiB gpu_memory_utilization allows %d; %d are in use, other programs' too,"
        " and a pass needs up to %d more",
        *(part // MiB for part in (total, allowed, used, working)),
    )
    return allowed - used - working


def worst_vocabulary(model: LlamaForCausalLM) -> Vocabulary:
    """All rows of embedding and head, and a token more: in the model's own memory."""
    embed_tokens, lm_head = model.model.embed_tokens.weight, model.lm_head.weight
    ids = torch.arange(len(embed_tokens), device=embed_tokens.device)
    return Vocabulary(len(ids) + 1, TokenRows(ids, embed_tokens), TokenRows(ids, lm_head))


def worst_arrays(settings: Settings, config: ModelConfig) -> StepArrays:
    """A full pass: as many sequences as may run, at the greatest length, the last one a prefill.

    All its KV goes to, and comes from, block 0.
    """
    max_model_len = settings.max_model_len or config.max_position_embeddings
    num_tokens = settings.max_num_batched_tokens
    num_sequences = min(settings.max_num_seqs, num_tokens)
    counts = np.ones(num_sequences, np.int64)
    counts[-1] += num_tokens - num_sequences
    query_starts = np.concatenate([[0], np.cumsum(counts)])
    context_lens = np.maximum(counts, max_model_len)
    positions = np.repeat(context_lens - query_starts[1:], counts) + np.arange(num_tokens)
    return StepArrays(
        rows=np.arange(num_sequences),
        token_rows=np.repeat(np.arange(num_sequences), counts),
        token_ids=np.zeros(num_tokens, np.int64),
        positions=np.minimum(positions, config.max_position_embeddings - 1),
        kv_slots=np.arange(num_tokens) % settings.block_size,
        query_starts=query_starts,
        context_lens=context_lens,
    )
