"""Steps of few tokens in CUDA graphs: a launch for each step instead of hundreds of them.

A graph repeats its kernels on the same tensors. So a step's values are copied into a *static
batch*, padded to one of a few sizes, and the graph of that size is replayed. There a token of a
prompt is a sequence of one token too, in the context that ends with it: keys and values of a whole
chunk are written before attention reads them, layer by layer. There are two sets of graphs:
one for steps without any adapter, which holds no LoRA kernel at all, and one for every mix of
adapters and ranks, which are values in the batch's lists of rank rows. Embeddings that adapters
have of their own are gathered before.

A static batch is an ordinary `LoRAForwardBatch`: on the CPU the same code runs the pass on it.
"""

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from tqdm import tqdm

from lorakeet.lora.batch import LoRAForwardBatch, StaticRankRows, static_room
from lorakeet.lora.pool import AdapterPool
from lorakeet.lora.vocabulary import StaticEmbeddings, VocabularyBatch
from lorakeet.models.llama import LlamaForCausalLM
from lorakeet.models.transfer import pinned
from lorakeet.server.engine.device_batch import DeviceRows, make_batch, pack, pass_arrays
from lorakeet.server.engine.inputs import Ints, StepArrays
from lorakeet.server.engine.scheduler_config import ReplayLimits

_NO_KV_SLOT = -1  # nothing is written for a padding row
_NUM_PASS_ARRAYS = 6
_CHUNK_TOKENS = 512  # in a step with chunks; each size more takes memory, and time at the start
_MOST_REREAD = 2**18  # cached tokens; past it, the tokens of a chunk better read them together


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
    """A pass of `size` tokens, each a sequence of its own, in tensors that stay in their place.

    Rows past a step's own are padding: token 0 at position 0 of a sequence without context, whose
    key and value go nowhere, without an adapter. `rank_rows` and `embeddings`: None, no row has
    an adapter.
    """

    def __init__(
        self,
        size: int,
        rows: DeviceRows,
        max_context_len: int,
        rank_rows: StaticRankRows | None,
        embeddings: StaticEmbeddings | None,
    ) -> None:
        self.size = size
        self._rows = rows
        self._max_context_len = max_context_len
        self._rank_rows = rank_rows
        self._embeddings = embeddings
        nobody = StepArrays(*[np.zeros(0, np.int64)] * 7)
        self._packed = pack(self._arrays(nobody, np.zeros(0, np.int32)))
        self._values = torch.from_numpy(self._packed.values).to(rows.device)

    def fill(
        self, arrays: StepArrays, slots: NDArray[np.int32], vocabulary: VocabularyBatch | None
    ) -> None:
        """Take in a step of at most `size` tokens, `by_token`; `slots` (T,) of each;
        `vocabulary`: where embeddings are not the base's."""
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
        wide = [values.long() for values in narrow[:_NUM_PASS_ARRAYS]]
        batch = make_batch(
            wide,
            narrow,
            self._rows,
            max_query_len=1,
            max_context_len=self._max_context_len,
            num_blocks=self._rows.block_tables.shape[1],
            num_decodes=self.size,
            lora=None if self._rank_rows is None else self._rank_rows.batch(*narrow[-2:]),
        )
        return replace(batch, own_embeddings=self._embeddings)

    def _arrays(self, arrays: StepArrays, slots: NDArray[np.int32]) -> list[NDArray[np.integer]]:
        token_ids, positions, kv_slots, rows, _, context_lens = pass_arrays(arrays)
        padded: list[NDArray[np.integer]] = [
            _pad(token_ids, self.size),
            _pad(positions, self.size),
            _pad(kv_slots, self.size, _NO_KV_SLOT),
            _pad(rows, self.size),
            np.arange(self.size + 1),
            _pad(context_lens, self.size),
        ]
        if self._rank_rows is not None:
            padded_slots = _pad(slots, self.size).astype(np.int32)
            padded += [self._rank_rows.pack(padded_slots), padded_slots]
        return padded


class PassGraphs:
    """The model's pass over few tokens: decode steps of any batch, and small chunks of prompts."""

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
        self.sizes = graph_sizes(max(max_num_seqs, min(_CHUNK_TOKENS, max_num_batched_tokens)))
        self._graphs: dict[tuple[int, bool], tuple[StaticBatch, Callable[[], Tensor]]] = {}
        self._embeddings = StaticEmbeddings(
            self.sizes[-1], model.config.hidden_size, model.dtype, rows.device
        )
        self._pool = torch.cuda.graph_pool_handle() if rows.device.type == "cuda" else None
        self._stream = None if self._pool is None else torch.cuda.Stream(rows.device)  # type: ignore[no-untyped-call]

    @torch.inference_mode()
    def capture_all(self) -> None:
        """The largest first: the others fit into the memory that it took."""
        with tqdm(
            total=2 * len(self.sizes), desc="Capturing CUDA graphs", unit="graph", disable=None
        ) as bar:
            for size in reversed(self.sizes):
                for with_lora in (True, False):
                    self._capture(size, with_lora)
                    bar.update()

    @torch.inference_mode()
    def estimate_memory(self, free_memory: Callable[[], int]) -> int:
        """Bytes that `capture_all` will take, from the two largest graphs, which are captured here.

        They share the memory for activations, so the second shows what each graph takes for itself.
        """
        free = [free_memory()]
        for with_lora in (True, False):
            self._capture(self.sizes[-1], with_lora)
            free.append(free_memory())
        graphs = free[0] - free[1] + (2 * len(self.sizes) - 1) * max(free[1] - free[2], 0)
        return graphs + self._embeddings.num_bytes

    @property
    def limits(self) -> ReplayLimits:
        return ReplayLimits(self.sizes[-1], _MOST_REREAD)

    def take(self, arrays: StepArrays, slots: NDArray[np.int32]) -> bool:
        """Whether there is a graph for this step, and it is worth while."""
        return (
            len(arrays.token_ids) <= self.sizes[-1]
            and arrays.num_reread <= _MOST_REREAD
            and self._adapters.tables.most_listed(np.unique(slots)) <= static_room(self._adapters)
        )

    def run(
        self, arrays: StepArrays, slots: NDArray[np.int32], vocabulary: VocabularyBatch | None
    ) -> Tensor:
        """Hidden states of a step that they `take`; `slots` (T,) of its tokens, `vocabulary` as
        `VocabularyStore.for_embedding` gives it for them.

        They are valid until the next call.
        """
        count = len(slots)
        size = next(size for size in self.sizes if size >= count)
        static, replay = self._graphs[size, bool(slots.any())]
        static.fill(arrays.by_token(), slots, vocabulary)
        return replay()[:count]

    def _capture(self, size: int, with_lora: bool) -> None:
        rank_rows, embeddings = None, None
        if with_lora:
            rank_rows = StaticRankRows(self._adapters, size, min(size, self._max_loras))
            embeddings = self._embeddings
        static = StaticBatch(size, self._rows, self._max_context_len, rank_rows, embeddings)

        def run() -> Tensor:
            return self._model(static.batch())  # type: ignore[no-any-return]

        self._graphs[size, with_lora] = static, self._record(run)

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
