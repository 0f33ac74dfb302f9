"""Executes steps on the model: slot loads, one forward pass, sampling.

On CUDA `launch` does not wait for the pass: sampled tokens stay on the device as the next step's
input, and reach the host by a small copy that the step's result waits for.
"""

import logging
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from lorakeet.configs.settings import Settings
from lorakeet.lora.adapter import MAX_EXTRA_ROWS, Slot
from lorakeet.lora.backend import make_backend
from lorakeet.lora.base_weights import BaseWeights
from lorakeet.lora.batch import (
    HEAD,
    LoRABatch,
    body_groups,
    build_lora_batch,
    full_lora_batch,
)
from lorakeet.lora.host_store import HostStore, Replicas
from lorakeet.lora.layers import wrap_model
from lorakeet.lora.pool import AdapterPool, bytes_per_row
from lorakeet.lora.row_tables import table_width
from lorakeet.lora.specs import group_specs
from lorakeet.lora.vocabulary import VocabularyBatch
from lorakeet.models import sampler
from lorakeet.models.kv_cache import allocate_kv_cache, kv_block_bytes
from lorakeet.models.penalties import TokenCounts
from lorakeet.models.process_group import ALONE, ProcessGroup
from lorakeet.models.transfer import download, upload
from lorakeet.models.weights import load_model
from lorakeet.server.engine import memory
from lorakeet.server.engine.device_batch import (
    DeviceRows,
    build_batch,
    empty_batch,
    upload_all,
)
from lorakeet.server.engine.devices import choose_device
from lorakeet.server.engine.graphs import PassGraphs
from lorakeet.server.engine.inputs import Ints, SequenceRows, StepArrays
from lorakeet.server.engine.outputs import (
    PassOutputs,
    Samples,
    Scores,
    join_samples,
    join_scores,
)
from lorakeet.server.engine.sampling import SamplingRows
from lorakeet.server.engine.slot_loads import SlotLoads
from lorakeet.server.engine.step import ScheduledSequence, SequenceId, Step, StepResult

logger = logging.getLogger(__name__)

_SCORED_LOGITS = 2**25  # logits computed at a time when prompts are scored: 128 MiB of float32


class Runner:
    """The model, the KV cache, the adapter pool, and the host store that it is filled from."""

    def __init__(
        self,
        settings: Settings,
        folder: Path,
        group: ProcessGroup = ALONE,
        replicas: Replicas | None = None,
        on_loaded: Callable[[], None] = lambda: None,
    ) -> None:
        """`folder` holds the model's files. All ranks of `group` make a runner, and then launch
        the same steps; rank 0 alone samples and has results. `replicas`: the other ranks' host
        stores, for rank 0's. `on_loaded` is called once the model's weights are loaded.

        Raises SettingsError for what there is no room for, UnsupportedModelError and WeightsError.
        """
        self.settings = settings
        self.group = group
        self.device = choose_device(settings, group.rank)
        self.model = load_model(
            folder, self.device, settings.dtype, settings.load_format, group=group
        )
        on_loaded()
        self.config = self.model.config
        self.dtype = self.model.dtype
        memory.check_model_len(settings, self.config)
        specs = group_specs(self.config, group)
        self.host_store = HostStore(
            specs,
            max_rank=settings.max_lora_rank,
            dtype=self.dtype,
            device=self.device,
            max_bytes=None if group.rank else memory.host_bytes(settings),
            base_weights=BaseWeights(self.model),
            base_model=settings.model,
            replicas=replicas,
        )
        self._row_bytes = bytes_per_row(specs, self.dtype)
        num_rows = self._least(memory.pool_rows(settings, specs, self.dtype, self.device))
        self.pool = AdapterPool(
            specs,
            memory.pool_slots(settings, num_rows),
            num_rows,
            table_width(max(settings.max_lora_rank, memory.blend_rows(settings, num_rows))),
            self.dtype,
            self.device,
        )
        self.vocabulary_bytes = self._least(
            memory.vocabulary_bytes(settings, self.config, self.dtype, self.device)
        )
        backend = make_backend(self.pool, settings.max_num_batched_tokens, settings.max_loras)
        wrap_model(self.model, self.pool, backend)
        self._loads = SlotLoads(self.pool, self.host_store)
        self._logits_batch = empty_batch(self.device)
        self.graphs: PassGraphs | None = None
        self._allocate_cache()
        if self.device.type == "cuda":
            self.capture_graphs()
        for part, num_bytes in self.memory_by_part().items():
            logger.info("memory: %s %.2f GiB", part.replace("_", " "), num_bytes / 2**30)

    @property
    def depth(self) -> int:
        """Steps in flight: on CUDA, one runs while the next is prepared."""
        return 2 if self.device.type == "cuda" else 1

    def memory_by_part(self) -> dict[str, int]:
        """Bytes of weights, adapter pool, token counts, KV cache and CUDA graphs, on this rank."""
        block_bytes = kv_block_bytes(self.config, self.cache.block_size, self.dtype, self.group)
        return {
            "weights": sum(weight.nbytes for weight in self.model.parameters()),
            "adapter_pool": self.pool.num_rows * self._row_bytes,
            "adapter_vocabularies": self.vocabulary_bytes,
            "token_counts": self._token_counts.nbytes,
            "kv_cache": self.cache.num_blocks * block_bytes,
            "graphs": self._graph_bytes,
        }

    @torch.inference_mode()
    def launch(self, step: Step) -> Callable[[], StepResult]:
        """Do all that the step says; what is returned waits for its result.

        Slot copies run on beside the passes, and are only asked for here; a later result names them
        when they are complete, or have failed.
        """
        for seq_id in step.released:
            self.rows.release(seq_id)
        for sequence in step.new:
            self.sampling.add(self.rows.add(sequence), sequence)
        for slot in step.cleared:
            self.pool.clear_vocabulary(slot)
        self._loads.start(step.loads)  # for later passes, beside which they are copied
        outputs = self._forward(step.sequences) if step.sequences else PassOutputs()
        return partial(self._result, outputs)

    def shutdown(self) -> None:
        """End the threads that read and copy adapters: what they are at is done, no more is begun.
        Nothing can be launched any more."""
        self.host_store.shutdown()
        self.pool.close()

    def _result(self, outputs: PassOutputs) -> StepResult:
        sampled, prompt_logprobs = outputs.read(self.rows)
        loads = self._loads.take_finished()
        return StepResult(
            sampled=tuple(sampled),
            prompt_logprobs=prompt_logprobs,
            loaded=tuple(loads.seconds),
            load_seconds=tuple(loads.seconds.values()),
            load_errors=loads.errors,
        )

    # --- the pass ---

    def _forward(self, scheduled: Sequence[ScheduledSequence]) -> PassOutputs:
        arrays = self.rows.arrays(scheduled)
        outputs = self._pass(scheduled, arrays)
        self.pool.launched(self.rows.slots[arrays.rows])
        return outputs

    def _pass(self, scheduled: Sequence[ScheduledSequence], arrays: StepArrays) -> PassOutputs:
        samples = np.array([sequence.samples for sequence in scheduled])
        sampling_rows = arrays.rows[samples]
        last_tokens = arrays.query_starts[1:][samples] - 1
        places, block_ids, rows, last = upload_all(
            [*self.rows.take_new_blocks(), sampling_rows, last_tokens], self.device
        )
        self.device_rows.set_blocks(places, block_ids)
        hidden = self._hidden(arrays)
        scores = self._score_prompts(scheduled, arrays, hidden)
        if sampling_rows.size == 0:
            return PassOutputs(None, scores)
        last_slots = self.rows.slots_at(sampling_rows, arrays.positions[last_tokens])
        logits = self._logits(hidden[last], last_slots)
        if self.group.rank > 0:
            token_ids = self.group.broadcast(torch.empty_like(rows))
            self.device_rows.set_last_tokens(rows, token_ids)
            self.rows.expect_tokens(sampling_rows)
            return PassOutputs()
        batch = self.sampling.batch(sampling_rows, logits.shape[1])
        output = sampler.sample(logits, batch)
        if batch.penalties is not None:
            batch.penalties.count(output.token_ids)
        self.device_rows.set_last_tokens(rows, self.group.broadcast(output.token_ids))
        together = Samples(
            rows=sampling_rows,
            seq_ids=self.rows.seq_ids[sampling_rows],
            places=self.rows.expect_tokens(sampling_rows),
            num_logprobs=self.sampling.num_logprobs(sampling_rows),
            values=download(join_samples(output)),
        )
        return PassOutputs(together, scores)

    def _hidden(self, arrays: StepArrays) -> Tensor:
        """Hidden states of the pass: (T, hidden_size)."""
        slots = self.rows.slots_at(arrays.token_rows, arrays.positions)
        vocabulary = self.pool.vocabularies.for_embedding(slots)
        if self.graphs is not None and self.graphs.take(slots):
            return self.graphs.run(arrays, slots, vocabulary)
        lora = build_lora_batch(slots, self.pool, body_groups(self.pool))
        return self._run_model(arrays, lora, vocabulary)

    def _run_model(
        self, arrays: StepArrays, lora: LoRABatch | None, vocabulary: VocabularyBatch | None
    ) -> Tensor:
        batch = build_batch(arrays, self.device_rows, self.settings.block_size, lora)
        return self.model(replace(batch, own_embeddings=vocabulary))  # type: ignore[no-any-return]

    def _logits(self, hidden: Tensor, slots: NDArray[np.int32]) -> Tensor:
        """Logits of rows of hidden states, each with the slot of its adapter.

        As many columns as the largest vocabulary among them; -inf past a row's own.
        """
        batch = replace(
            self._logits_batch,
            logits_lora=build_lora_batch(slots, self.pool, [HEAD]),
            logits_vocabulary=self.pool.vocabularies.for_head(slots),
        )
        return self.model.compute_logits(hidden, batch)

    def _score_prompts(
        self, scheduled: Sequence[ScheduledSequence], arrays: StepArrays, hidden: Tensor
    ) -> dict[SequenceId, list[Scores]]:
        """Scores of the prompt tokens that this pass predicts, of sequences that asked for them."""
        scores: dict[SequenceId, list[Scores]] = {}
        for index in np.flatnonzero(self.sampling.scores_prompt(arrays.rows)).tolist():
            sequence, row = scheduled[index], int(arrays.rows[index])
            known = self.rows.sequences[row]
            num_top = known.sampling.prompt_logprobs
            assert num_top is not None
            stop = min(sequence.end, known.num_prompt_tokens - 1)
            if stop <= sequence.start:
                continue
            targets = self.rows.token_ids[row, sequence.start + 1 : stop + 1].astype(np.int64)
            first = int(arrays.query_starts[index])
            own = slice(first, first + len(targets))
            slots = self.rows.slots_at(arrays.token_rows[own], arrays.positions[own])
            scores[sequence.seq_id] = self._score(hidden[own], slots, targets, num_top)
        return scores

    def _score(
        self, hidden: Tensor, slots: NDArray[np.int32], targets: Ints, num_top: int
    ) -> list[Scores]:
        """Rows of logits in chunks of bounded size, each with LoRA batch info of its own."""
        size = max(1, _SCORED_LOGITS // self.config.vocab_size)
        scores: list[Scores] = []
        for start in range(0, len(targets), size):
            chunk = targets[start : start + size]
            logits = self._logits(hidden[start : start + size], slots[start : start + size])
            if self.group.rank > 0:
                continue
            values = sampler.score(logits, upload(chunk, self.device), num_top)
            scores.append(Scores(chunk, download(join_scores(*values))))
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
            group=self.group,
        )
        max_len = settings.max_model_len or self.config.max_position_embeddings
        max_len = max(max_len, settings.max_num_batched_tokens)  # of the worst pass
        self.device_rows = self._make_device_rows(max_len)
        num_counted = 0 if self.group.rank else settings.max_num_seqs  # rank 0 alone samples
        num_columns = self.config.vocab_size + memory.ADDED_TOKENS
        self._token_counts = TokenCounts(num_counted, num_columns, self.device)
        self._graph_bytes = 0
        if self.device.type == "cuda":
            self.model.bind_kv_cache(allocate(1))  # all that the trial passes write goes there
        available = memory.kv_memory(settings, self.device, self._worst_pass)
        if self.device.type == "cuda":
            graph_bytes = self._make_graphs(max_len).estimate_memory(
                partial(memory.free_memory, self.device)
            )
            logger.info("CUDA graphs will take up to %d MiB", graph_bytes // memory.MiB)
            # an adapter that is being copied to the pool: there is one at a time (see RowWriter)
            on_its_way = (settings.max_lora_rank + MAX_EXTRA_ROWS) * self._row_bytes
            available -= graph_bytes + self.vocabulary_bytes + on_its_way
        size = memory.cache_size(
            settings, self.config, self.dtype, self._least(available), self.group
        )
        self.max_model_len = size.max_model_len
        self.cache = allocate(size.num_blocks)
        self.model.bind_kv_cache(self.cache)
        self.rows = SequenceRows(settings.max_num_seqs, self.max_model_len, block_size)
        self.device_rows = self._make_device_rows(self.max_model_len)
        self.sampling = SamplingRows(self.rows, self._token_counts, self.device)

    def _least(self, value: int) -> int:
        """The smallest of all ranks' values: what all have room for."""
        values = torch.tensor([value], device=self.device)
        return int(self.group.all_gather(values, dim=0).min())

    def capture_graphs(self) -> None:
        """From now on small steps are replayed. (On the CPU: they run on the static batches.)"""
        before = memory.free_memory(self.device)
        graphs = self._make_graphs(self.max_model_len)
        graphs.capture_all()
        if self.device.type == "cuda":
            self._graph_bytes = before - memory.free_memory(self.device)
        self.graphs = graphs

    def _make_graphs(self, max_context_len: int) -> PassGraphs:
        settings = self.settings
        return PassGraphs(
            self.model,
            self.device_rows,
            self.pool,
            settings.max_num_seqs,
            settings.max_num_batched_tokens,
            settings.max_loras,
            max_context_len,
        )

    def _make_device_rows(self, max_model_len: int) -> DeviceRows:
        max_blocks = -(-max_model_len // self.settings.block_size)
        return DeviceRows(self.settings.max_num_seqs, max_blocks, self.device)

    @torch.inference_mode()
    def _worst_pass(self) -> None:
        """The pass that needs the most memory: full, every token with an adapter that has all rows
        of embedding and head, the ways to sample that take the most, and a chunk of prompt
        scores."""
        settings = self.settings
        arrays = memory.worst_arrays(settings, self.config)
        slots = (np.arange(len(arrays.token_ids)) % settings.max_loras + 1).astype(np.int32)
        num_rows = len(arrays.context_lens)
        own_slots = [Slot(slot) for slot in range(1, settings.max_loras + 1)]
        vocabulary = memory.worst_vocabulary(self.model)
        for slot in own_slots:
            self.pool.vocabularies.write(slot, vocabulary)
        lora = full_lora_batch(slots, self.pool, body_groups(self.pool))
        hidden = self._run_model(arrays, lora, self.pool.vocabularies.for_embedding(slots))
        logits = self._logits(hidden[:num_rows], slots[:num_rows])
        if self.group.rank == 0:
            self._worst_sampling(logits)
        del logits
        self._score(hidden, slots, np.zeros(len(hidden), np.int64), memory.MAX_LOGPROBS)
        for slot in own_slots:
            self.pool.clear_vocabulary(slot)

    def _worst_sampling(self, logits: Tensor) -> None:
        self._token_counts.widen(logits.shape[1])
        rows = [memory.WORST_SAMPLING] * len(logits)
        batch = sampler.build(rows, logits.shape[1], self.device, self._token_counts)
        sampler.sample(logits, batch)
