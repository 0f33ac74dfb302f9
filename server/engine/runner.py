"""Executes a step on the model: slot loads, one forward pass, sampling."""

import logging
import math
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from lorakeet.configs.settings import Settings, SettingsError
from lorakeet.lora.adapter import Slot
from lorakeet.lora.backend import make_backend
from lorakeet.lora.batch import LoRAForwardBatch, build_lora_batch
from lorakeet.lora.host_store import HostStore
from lorakeet.lora.layers import wrap_model
from lorakeet.lora.pool import AdapterPool, PoolWrite, bytes_per_row
from lorakeet.lora.specs import group_specs
from lorakeet.models import sampler
from lorakeet.models.kv_cache import allocate_kv_cache, kv_block_bytes
from lorakeet.models.weights import load_model
from lorakeet.server.engine import memory
from lorakeet.server.engine.device_batch import build_batch, upload
from lorakeet.server.engine.inputs import Ints, SequenceRows, StepArrays
from lorakeet.server.engine.messages import TokenLogprob
from lorakeet.server.engine.sampling import NOT_FINITE, SamplingRows, read_samples, read_scores
from lorakeet.server.engine.step import (
    Sampled,
    ScheduledSequence,
    SequenceId,
    SlotLoad,
    Step,
    StepResult,
)

logger = logging.getLogger(__name__)

_SCORED_LOGITS = 2**25  # logits computed at a time when prompts are scored: 128 MiB of float32


@dataclass(frozen=True)
class _RunningLoad:
    slot: Slot
    write: PoolWrite
    started: float


def choose_device(settings: Settings) -> torch.device:
    """ "auto" is the GPU where there is one. Raises SettingsError for "cuda" without one."""
    has_cuda = torch.cuda.is_available()
    if settings.device == "cuda" and not has_cuda:
        raise SettingsError("device: there is no CUDA device that torch can use")
    return torch.device("cpu" if settings.device == "cpu" or not has_cuda else "cuda")


class Runner:
    """The model, the KV cache, the adapter pool, and the host store that it is filled from."""

    def __init__(self, settings: Settings, folder: Path) -> None:
        """`folder` holds the model's files. Raises SettingsError for what there is no room for,
        UnsupportedModelError and WeightsError."""
        self.settings = settings
        self.device = choose_device(settings)
        self.model = load_model(folder, self.device, settings.dtype, settings.load_format)
        self.config = self.model.config
        self.dtype = self.model.dtype
        memory.check_model_len(settings, self.config)
        specs = group_specs(self.config)
        self.host_store = HostStore(
            specs,
            max_rank=settings.max_lora_rank,
            dtype=self.dtype,
            pin_memory=self.device.type == "cuda",
            base_weights={
                "embed_tokens": self.model.model.embed_tokens.weight,
                "lm_head": self.model.lm_head.weight,
            },
            base_model=settings.model,
        )
        num_rows = memory.pool_rows(settings, specs, self.dtype, self.device)
        self.pool = AdapterPool(
            specs,
            memory.pool_slots(settings, num_rows),
            num_rows,
            settings.max_lora_rank,
            self.dtype,
            self.device,
        )
        wrap_model(self.model, self.pool, make_backend(self.device))
        self._loads: list[_RunningLoad] = []
        self._allocate_cache()

    def memory_by_part(self) -> dict[str, int]:
        """Bytes of weights, adapter pool and KV cache."""
        row_bytes = bytes_per_row(tuple(self.pool.specs.values()), self.dtype)
        block_bytes = kv_block_bytes(self.config, self.cache.block_size, self.dtype)
        return {
            "weights": sum(weight.nbytes for weight in self.model.parameters()),
            "adapter_pool": self.pool.num_rows * row_bytes,
            "kv_cache": self.cache.num_blocks * block_bytes,
        }

    @torch.inference_mode()
    def execute(self, step: Step) -> StepResult:
        """Do all that the step says. Non-finite logits are an error of their sequence alone.

        Slot copies run on beside the passes; a later result names them when they are complete.
        """
        for seq_id in step.released:
            self.rows.release(seq_id)
        for sequence in step.new:
            self.rows.add(sequence)
        load_errors = self._start_loads(step.loads)
        sampled, prompt_logprobs = self._forward(step.sequences) if step.sequences else ([], {})
        loaded = self._finished_loads()
        return StepResult(
            sampled=tuple(sampled),
            prompt_logprobs=prompt_logprobs,
            loaded=tuple(slot for slot, _ in loaded),
            load_seconds=tuple(seconds for _, seconds in loaded),
            load_errors=load_errors,
        )

    # --- adapters ---

    def _start_loads(self, loads: Sequence[SlotLoad]) -> dict[Slot, str]:
        errors = {}
        for load in loads:
            started = time.perf_counter()
            try:
                self.pool.clear(load.slot)
                write = self.pool.write(load.slot, load.rows, self.host_store.get(load.adapter_id))
            except (ValueError, RuntimeError) as error:  # torch raises RuntimeError, also for OOM
                logger.exception("adapter %d cannot be copied to its slot", load.adapter_id)
                errors[load.slot] = f"the adapter could not be copied to the device: {error}"
            else:
                self._loads.append(_RunningLoad(load.slot, write, started))
        return errors

    def _finished_loads(self) -> list[tuple[Slot, float]]:
        now = time.perf_counter()
        done = [(load.slot, now - load.started) for load in self._loads if load.write.done()]
        slots = {slot for slot, _ in done}
        self._loads = [load for load in self._loads if load.slot not in slots]
        return done

    # --- the pass ---

    def _forward(
        self, scheduled: Sequence[ScheduledSequence]
    ) -> tuple[list[Sampled], dict[SequenceId, list[TokenLogprob]]]:
        arrays = self.rows.arrays(scheduled)
        samples = np.array([sequence.samples for sequence in scheduled])
        sampling_rows = arrays.rows[samples]
        slots = self.rows.slots
        batch = build_batch(arrays, slots[arrays.token_rows], slots[sampling_rows], self.device)
        hidden = self.model(batch)
        sampled: list[Sampled] = []
        if sampling_rows.size:
            last_tokens = upload(arrays.query_starts[1:][samples] - 1, self.device)
            logits = self.model.compute_logits(hidden[last_tokens], batch)
            seq_ids = [sequence.seq_id for sequence in scheduled if sequence.samples]
            sampled = self._sample(logits, sampling_rows, seq_ids)
        scores = self._score_prompts(scheduled, arrays, batch, hidden)
        sampled += [
            Sampled(seq_id, 0, error=NOT_FINITE)
            for seq_id, logprobs in scores.items()
            if any(math.isnan(logprob.logprob) for logprob in logprobs)
        ]
        return sampled, scores

    def _sample(self, logits: Tensor, rows: Ints, seq_ids: Sequence[SequenceId]) -> list[Sampled]:
        """A token for each row, which it takes in at once."""
        choices, together = self.sampling.batch(rows.tolist())
        output = sampler.sample(logits, together)
        token_ids, sampled = read_samples(output, seq_ids, choices)
        self.rows.append_tokens(rows, token_ids)
        return sampled

    def _score_prompts(
        self,
        scheduled: Sequence[ScheduledSequence],
        arrays: StepArrays,
        batch: LoRAForwardBatch,
        hidden: Tensor,
    ) -> dict[SequenceId, list[TokenLogprob]]:
        """Scores of the prompt tokens that this pass predicts, of sequences that asked for them."""
        scores: dict[SequenceId, list[TokenLogprob]] = {}
        for index, sequence in enumerate(scheduled):
            row = int(arrays.rows[index])
            known = self.rows.sequences[row]
            num_top = known.sampling.prompt_logprobs
            stop = min(sequence.start + sequence.num_tokens, known.num_prompt_tokens - 1)
            if num_top is None or stop <= sequence.start:
                continue
            targets = self.rows.token_ids[row, sequence.start + 1 : stop + 1]
            first = int(arrays.query_starts[index])
            hidden_rows = hidden[first : first + len(targets)]
            slot = self.rows.slots[row]
            scores[sequence.seq_id] = self._score(hidden_rows, targets, slot, num_top, batch)
        return scores

    def _score(
        self,
        hidden: Tensor,
        targets: NDArray[np.int32],
        slot: np.int32,
        num_top: int,
        batch: LoRAForwardBatch,
    ) -> list[TokenLogprob]:
        """Rows of logits in chunks of bounded size, each with LoRA batch info of its own."""
        size = max(1, _SCORED_LOGITS // self.config.vocab_size)
        scores: list[TokenLogprob] = []
        for start in range(0, len(targets), size):
            chunk = targets[start : start + size].astype(np.int64)
            lora = build_lora_batch(np.full(len(chunk), slot), self.device)
            rows = hidden[start : start + len(chunk)]
            logits = self.model.compute_logits(rows, replace(batch, logits_lora=lora))
            scores += read_scores(
                chunk, *sampler.score(logits, upload(chunk, self.device), num_top)
            )
        return scores

    # --- memory ---

    def _allocate_cache(self) -> None:
        settings, block_size = self.settings, self.settings.block_size
        allocate = partial(
            allocate_kv_cache,
            self.config,
            block_size=block_size,
            dtype=self.dtype,
            device=self.device,
        )
        if self.device.type == "cuda":
            self.model.bind_kv_cache(allocate(1))  # all that the trial pass writes goes there
        available = memory.kv_memory(settings, self.device, self._worst_pass)
        size = memory.cache_size(settings, self.config, self.dtype, available)
        self.max_model_len = size.max_model_len
        self.cache = allocate(size.num_blocks)
        self.model.bind_kv_cache(self.cache)
        self.rows = SequenceRows(settings.max_num_seqs, self.max_model_len, block_size)
        self.sampling = SamplingRows(self.rows, self.config.vocab_size, self.device)
        for part, num_bytes in self.memory_by_part().items():
            logger.info("memory: %s %.2f GiB", part, num_bytes / 2**30)

    @torch.inference_mode()
    def _worst_pass(self) -> None:
        """The pass that needs the most memory: full, every token with an adapter, every way to
        sample in use, and a chunk of prompt scores."""
        settings = self.settings
        arrays = memory.worst_arrays(settings, self.config)
        slots = (np.arange(len(arrays.token_ids)) % settings.max_loras + 1).astype(np.int32)
        num_rows = len(arrays.context_lens)
        batch = build_batch(arrays, slots, slots[:num_rows], self.device)
        hidden = self.model(batch)
        logits = self.model.compute_logits(hidden[:num_rows], batch)
        choices = [memory.WORST_SAMPLING] * num_rows
        sampler.sample(logits, sampler.build(choices, logits.shape[1], self.device))
        del logits
        targets = np.zeros(len(hidden), np.int32)
        self._score(hidden, targets, slots[0], memory.MAX_LOGPROBS, batch)
