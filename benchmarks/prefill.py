"""Prefill without and with adapters: Llama-3.1-8B's shape, bf16, one GPU, no scheduler around it.

    python benchmarks/prefill.py [--adapters 0,1,8] [--sequences 8] [--tokens 256]
    TRITON_INTERPRET=1 python benchmarks/prefill.py --smoke      (tiny, on the CPU)

A pass computes `--sequences` prompts of `--tokens` tokens, each of one adapter of rank 16 on all
seven projections. The model's pass is captured in a CUDA graph, whose replays are timed by events
(median), the kinds of pass taking turns. The floor: for each GEMM the larger of bytes / bandwidth
and flops / speed, with the ceilings of the same run. The last line is the time without adapters
over that with adapters, the worst one.
"""

import argparse
import statistics
from collections.abc import Callable

import numpy as np
import torch
from common import BLOCK_SIZE, ModelBench, graph_of, measure_ceilings, median_ms
from shapes import LLAMA_8B, TINY

from lorakeet.lora.batch import LoRAForwardBatch

RANK = 16


def prefill_batch(
    bench: ModelBench, sequences: int, tokens: int, adapters: int
) -> LoRAForwardBatch:
    """Whole prompts, nothing cached, in scattered blocks of the bound cache."""
    rng = np.random.default_rng(1)
    blocks = -(-tokens // BLOCK_SIZE)
    tables = rng.permutation(sequences * blocks).reshape(sequences, blocks)
    owner = np.repeat(np.arange(sequences), tokens)
    positions = np.tile(np.arange(tokens), sequences)
    kv_slots = tables[owner, positions // BLOCK_SIZE] * BLOCK_SIZE + positions % BLOCK_SIZE
    slots = owner % adapters + 1 if adapters else np.zeros_like(owner)
    token_ids = rng.integers(0, bench.config.vocab_size, len(owner))
    return LoRAForwardBatch(
        token_ids=bench.put(token_ids, torch.int64),
        positions=bench.put(positions, torch.int64),
        kv_slots=bench.put(kv_slots, torch.int64),
        query_starts=bench.put(np.arange(sequences + 1) * tokens, torch.int32),
        context_lens=bench.put(np.full(sequences, tokens), torch.int32),
        block_tables=bench.put(tables, torch.int32),
        num_decodes=0,
        max_context_len=tokens,
        lora=bench.lora(slots.astype(np.int32)),
        logits_lora=None,
    )


def captured_pass(bench: ModelBench, batch: LoRAForwardBatch) -> Callable[[], object]:
    with torch.inference_mode():
        return graph_of(lambda: bench.hidden_states(batch))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--adapters", default="0,1,8", help="comma list; 0 is always measured")
    parser.add_argument("--sequences", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=256, help="of each sequence")
    parser.add_argument("--smoke", action="store_true")
    args = parser.parse_args()
    counts = sorted({0, *map(int, args.adapters.split(","))})
    assert len(counts) > 1, "--adapters names no count above 0"
    sequences, tokens, repeats = (2, 20, 1) if args.smoke else (args.sequences, args.tokens, 3)
    device = "cpu" if args.smoke else "cuda"
    bench = ModelBench(TINY if args.smoke else LLAMA_8B, device, tokens)
    ceilings = measure_ceilings(device)
    print(ceilings)
    bench.set_ranks([RANK] * max(counts))
    bench.bind_cache(sequences * -(-tokens // BLOCK_SIZE))
    batches = {count: prefill_batch(bench, sequences, tokens, count) for count in counts}
    passes = {count: captured_pass(bench, batch) for count, batch in batches.items()}
    rounds = [{count: median_ms(run, 7) for count, run in passes.items()} for _ in range(repeats)]
    times = {count: statistics.median(each[count] for each in rounds) for count in counts}
    floor = bench.floor(ceilings).products_ms(sequences * tokens)
    print(f"{sequences} sequences of {tokens} tokens, floor of the products {floor:.2f} ms")
    print("adapters       ms  ms/floor  without/with")
    for count, ms in times.items():
        print(f"{count:8d}  {ms:7.2f}  {ms / floor:8.2f}  {times[0] / ms:12.3f}")
    worst = times[0] / max(times[count] for count in counts[1:])
    print(f"without adapters / with, the worst: {worst:.3f}")


if __name__ == "__main__":
    main()
