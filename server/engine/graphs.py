"""Steps of few tokens in CUDA graphs: a launch for each step instead of hundreds of them.

A graph repeats its kernels on the same tensors. So a step's values are copied into a *static
batch*, padded to one of a few sizes, and the graph of that size is replayed. There are graphs for
steps of decodes alone and, in fewer sizes, for those with chunks of prompts; each both without a
LoRA kernel, for steps without any adapter, and for every mix of adapters and ranks, which are
values in the batch's lists of rank rows. Embeddings that adapters have of their own are gathered
before.

A static batch is an ordinary `LoRAForwardBatch`: on the CPU the same code runs the pass on it.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from tqdm import tqdm

from lorakeet.kernels.sizes import cdiv
from lorakeet.lora.batch import LoRAForwardBatch, StaticRankRows, static_room
from lorakeet.lora.pool import AdapterPool
from lorakeet.lora.vocabulary import StaticEmbeddings, VocabularyBatch
from lorakeet.models.llama import LlamaForCausalLM
from lorakeet.models.transfer import pinned
from lorakeet.server.engine.device_batch import DeviceRows, make_batch, pack, pass_arrays
from lorakeet.server.engine.inputs import Ints, StepArrays

_NO_KV_SLOT = -1  # nothing is written for a padding row
# With chunks. Larger steps with adapters keep an H200 busy for longer than the host takes to launch
# them, of a model of 8 billion parameters: see docs/performance.md.
_CHUNK_TOKENS = 1024
_CHUNK_STEP = 16  # fewer sizes than for decodes alone: multiples of it
_NUM_TRIED = 3  # shapes whose graphs tell what each takes


@dataclass(frozen=True, order=True)
class Shape:
    """What a static batch has room for. Decodes come first, of the tokens and of the sequences."""

    num_tokens: int
    num_decodes: int
    num_chunks: int  # sequences of several tokens

    def holds(self, num_tokens: int, has_chunks: bool) -> bool:
        return num_tokens <= self.num_tokens and has_chunks <= (self.num_chunks > 0)


def graph_shapes(max_num_seqs: int, max_num_batched_tokens: int) -> list[Shape]:
    """Those to capture, the smallest first.

    Each has room for all that a step of so many tokens can have: decodes, or decodes and chunks,
    which have two tokens and more.
    """
    most_decodes = min(max_num_seqs, max_num_batched_tokens)
    decodes = [Shape(size, size, 0) for size in graph_sizes(most_decodes)]
    most = min(max_num_batched_tokens, max(max_num_seqs, _CHUNK_TOKENS))
    chunks = [
        Shape(size, min(size, max_num_seqs), min(size // 2, max_num_seqs))
        for size in graph_sizes(most)
        if size > 1 and (size % _CHUNK_STEP == 0 or size == most)
    ]
    return sorted(decodes + chunks)


def graph_sizes(most: int) -> list[int]:
    """Numbers of tokens to capture, ascending: past 32, at most a fifth of a batch is padding.

    >>> graph_sizes(100)
    [1, 2, 4, 8, 16, 24, 32, 40, 48, 56, 64, 80, 96, 100]
    """
    sizes = [1, 2, 4, 8]
    while sizes[-1] < most:
        last = sizes[-1]
        sizes.append(last + max(8, 2 ** (last.bit_length() - 3)))
    return [size for size in sizes if size < most] + [most]


class StaticBatch:
    """A pass in tensors that stay in their place.

    What it has room for beyond a step's own is padding: tokens 0 at position 0, whose key and value
    go nowhere, without an adapter; decodes without context; chunks without tokens. `rank_rows` and
    `embeddings`: None, no row has an adapter.
    """

    def __init__(
        self,
        shape: Shape,
        rows: DeviceRows,
        max_context_len: int,
        rank_rows: StaticRankRows | None,
        embeddings: StaticEmbeddings | None,
    ) -> None:
        self._shape = shape
        self._rows = rows
        self._max_context_len = max_context_len
        self._rank_rows = rank_rows
        self._embeddings = embeddings
        none, start = np.zeros(0, np.int64), np.zeros(1, np.int64)
        nobody = StepArrays(none, none, none, none, none, start, none)
        self._packed = pack(self._arrays(nobody, np.zeros(0, np.int32)))
        self._values = torch.from_numpy(self._packed.values).to(rows.device)

    def fill(
        self, arrays: StepArrays, slots: NDArray[np.int32], vocabulary: VocabularyBatch | None
    ) -> None:
        """Take in a step that the shape takes; `slots` (T,) of its tokens; `vocabulary`: where
        embeddings are not the base's."""
        values = pack(self._arrays(arrays, slots)).values
        self._values.copy_(pinned(values, self._values.device), non_blocking=True)
        if self._embeddings is not None:
            self._embeddings.clear()
            if vocabulary is not None:
                token_ids = self._packed.views(self._values)[0].long()
                self._embeddings.fill(vocabulary, self._rows.resolve(token_ids))

    def batch(self) -> LoRAForwardBatch:
        """The pass; what this launches belongs into the graph."""
        narrow = self._packed.views(self._values)
        wide = self._packed.views(self._values.long())
        batch = make_batch(
            wide,
            narrow,
            self._rows,
            max_context_len=self._max_context_len,
            num_blocks=self._rows.block_tables.shape[1],
            num_decodes=self._shape.num_decodes,
            lora=None if self._rank_rows is None else self._rank_rows.batch(*narrow[-2:]),
        )
        return replace(batch, own_embeddings=self._embeddings)

    def _arrays(self, arrays: StepArrays, slots: NDArray[np.int32]) -> list[NDArray[np.integer]]:
        token_ids, positions, kv_slots, rows, query_starts, context_lens = pass_arrays(arrays)
        size, num_decodes = self._shape.num_tokens, arrays.num_decodes
        padded: list[NDArray[np.integer]] = [
            _pad(token_ids, size),
            _pad(positions, size),
            _pad(kv_slots, size, _NO_KV_SLOT),
            self._by_sequence(rows, num_decodes),
            self._starts(query_starts, num_decodes),
            self._by_sequence(context_lens, num_decodes),
        ]
        if self._rank_rows is not None:
            padded_slots = _pad(slots, size).astype(np.int32)
            padded += [self._rank_rows.pack(padded_slots), padded_slots]
        return padded

    def _starts(self, query_starts: Ints, num_decodes: int) -> Ints:
        decodes = np.minimum(np.arange(self._shape.num_decodes), num_decodes)
        num_tokens = int(query_starts[-1])
        chunks = _pad(query_starts[num_decodes:], self._shape.num_chunks + 1, num_tokens)
        return np.concatenate([decodes, chunks])

    def _by_sequence(self, values: Ints, num_decodes: int) -> Ints:
        """Decodes and chunks, padded each."""
        decodes = _pad(values[:num_decodes], self._shape.num_decodes)
        return np.concatenate([decodes, _pad(values[num_decodes:], self._shape.num_chunks)])


class PassGraphs:
    """The model's pass over few tokens: decodes of any batch, and chunks of prompts beside them."""

    def __init__(
        self,
        model: LlamaForCausalLM,
        rows: DeviceRows,
        pool: AdapterPool,
        max_num_seqs: int,
        max_num_batched_tokens: int,
        max_loras: int,
        max_context_len: int,
    ) -> None:
        self._model = model
        self._rows = rows
        self._adapters = pool
        self._max_loras = max_loras
        self._max_context_len = max_context_len
        self.shapes = graph_shapes(max_num_seqs, max_num_batched_tokens)
        self._graphs: dict[tuple[Shape, bool], tuple[StaticBatch, Callable[[], Tensor]]] = {}
        self._embeddings = StaticEmbeddings(
            self.max_tokens, model.config.hidden_size, model.dtype, rows.device
        )
        self._pool = torch.cuda.graph_pool_handle() if rows.device.type == "cuda" else None
        self._stream = None if self._pool is None else torch.cuda.Stream(rows.device)  # type: ignore[no-untyped-call]

    @torch.inference_mode()
    def capture_all(self) -> None:
        """The largest first: the others fit into the memory that it took."""
        with tqdm(
            total=2 * len(self.shapes), desc="Capturing CUDA graphs", unit="graph", disable=None
        ) as bar:
            for shape in reversed(self.shapes):
                for with_lora in (True, False):
                    self._capture(shape, with_lora)
                    bar.update()

    @torch.inference_mode()
    def estimate_memory(self, free_memory: Callable[[], int]) -> int:
        """Bytes that `capture_all` will take, from the graphs of the largest shapes, which are
        captured here.

        All share the memory for activations, which the first takes; the others show what those of a
        shape take for themselves.
        """
        free = [free_memory()]
        for shape in reversed(self.shapes[-_NUM_TRIED:]):
            self._capture(shape, with_lora=True)
            self._capture(shape, with_lora=False)
            free.append(free_memory())
        first, others = free[0] - free[1], free[1] - free[-1]
        num_others = max(1, len(free) - 2)
        total = first + cdiv(max(others, 0) * (len(self.shapes) - 1), num_others)
        return total + self._embeddings.num_bytes

    @property
    def max_tokens(self) -> int:
        return self.shapes[-1].num_tokens

    def take(self, slots: NDArray[np.int32]) -> bool:
        """Whether there is a graph for a step of tokens with these slots, (T,)."""
        most_listed = self._adapters.tables.most_listed(np.unique(slots))
        return len(slots) <= self.max_tokens and most_listed <= static_room(self._adapters)

    def run(
        self, arrays: StepArrays, slots: NDArray[np.int32], vocabulary: VocabularyBatch | None
    ) -> Tensor:
        """Hidden states of a step that they `take`; `slots` (T,) of its tokens, `vocabulary` as
        `VocabularyStore.for_embedding` gives it for them.

        They are valid until the next call.
        """
        has_chunks = arrays.num_decodes < len(arrays.rows)
        shape = next(shape for shape in self.shapes if shape.holds(len(slots), has_chunks))
        static, replay = self._graphs[shape, bool(slots.any())]
        static.fill(arrays, slots, vocabulary)
        return replay()[: len(slots)]

    def _capture(self, shape: Shape, with_lora: bool) -> None:
        rank_rows, embeddings = None, None
        if with_lora:
            num_adapters = min(shape.num_tokens, self._max_loras)
            rank_rows = StaticRankRows(self._adapters, shape.num_tokens, num_adapters)
            embeddings = self._embeddings
        static = StaticBatch(shape, self._rows, self._max_context_len, rank_rows, embeddings)

        def run() -> Tensor:
            return self._model(static.batch())  # type: ignore[no-any-return]

        self._graphs[shape, with_lora] = static, self._record(run)

    def _record(self, run: Callable[[], Tensor]) -> Callable[[], Tensor]:
        """Something that repeats on the device what `run` launches; on the CPU, `run` itself."""
        if self._stream is None:
            return run
        # The same stream before and in the capture: cuBLAS and NCCL set up some things by stream.
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            run()  # compiles kernels, and lets libraries set up what cannot be captured
        graph = torch.cuda.CUDAGraph()
        # "thread_local": NCCL's watchdog and the readers of adapters may call CUDA meanwhile.
        with torch.cuda.graph(graph, self._pool, self._stream, capture_error_mode="thread_local"):
            hidden = run()

        def replay() -> Tensor:
            graph.replay()
            return hidden

        return replay


def _pad(values: NDArray[np.integer], size: int, value: int = 0) -> Ints:
    padded = np.full(size, value)
    padded[: len(values)] = values
    return padded
