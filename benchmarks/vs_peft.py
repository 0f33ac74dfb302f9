"""Output tokens a second beside PEFT and transformers, the same work in one run, on the CPU.

    python benchmarks/vs_peft.py [--model FOLDER] [--repeats 3]

16 requests at once over 8 adapters (rank 16, all linear layers), 64 tokens each, greedy, prompts of
16 to 256 tokens; against PEFT's mixed-batch `generate(adapter_names=…)`. Then the same with every
request on the base model, against transformers' `generate`. Float32 everywhere, the same number of
threads. The last line is the ratio of the medians. Needs the development dependencies.
"""

import argparse
import random
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch
from peft import LoraConfig, PeftModel, get_peft_model
from transformers import AutoConfig, AutoModelForCausalLM

from lorakeet.server.llm import LLM, SamplingParams

NUM_REQUESTS, NUM_ADAPTERS, NUM_TOKENS = 16, 8, 64
PROMPT_TOKENS = (16, 256)
TARGETS = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]

Run = Callable[[], list[list[int]]]


def make_adapters(model_folder: str, folder: Path) -> dict[str, Path]:
    paths = {}
    for index in range(NUM_ADAPTERS):
        torch.manual_seed(index)
        base = AutoModelForCausalLM.from_pretrained(model_folder, dtype=torch.float32)
        config = LoraConfig(
            r=16, lora_alpha=16, target_modules=TARGETS, init_lora_weights=False, use_rslora=False
        )
        model = get_peft_model(base, config)
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                parameter.data.mul_(0.05)  # a delta of a trained adapter's size
        paths[f"a{index}"] = folder / f"a{index}"
        model.save_pretrained(paths[f"a{index}"])
    return paths


def make_prompts(vocab_size: int) -> list[list[int]]:
    pick = random.Random(0)
    return [
        [pick.randrange(1000, vocab_size) for _ in range(pick.randint(*PROMPT_TOKENS))]
        for _ in range(NUM_REQUESTS)
    ]


def transformers_run(
    model_folder: str, adapters: dict[str, Path], names: list[str | None], prompts: list[list[int]]
) -> Run:
    """Left-padded batch through `generate`, with PEFT's adapter names where there are any."""
    model = AutoModelForCausalLM.from_pretrained(model_folder, dtype=torch.float32)
    if adapters:
        first, *rest = adapters
        model = PeftModel.from_pretrained(model, adapters[first], adapter_name=first)
        for name in rest:
            model.load_adapter(adapters[name], adapter_name=name)
    model.eval()
    longest = max(map(len, prompts))
    ids = torch.zeros(len(prompts), longest, dtype=torch.long)
    mask = torch.zeros_like(ids)
    for row, prompt in enumerate(prompts):
        ids[row, longest - len(prompt) :] = torch.tensor(prompt)
        mask[row, longest - len(prompt) :] = 1
    extra = {"adapter_names": names} if adapters else {}

    def run() -> list[list[int]]:
        with torch.no_grad():
            out = model.generate(
                input_ids=ids,
                attention_mask=mask,
                max_new_tokens=NUM_TOKENS,
                min_new_tokens=NUM_TOKENS,
                do_sample=False,
                pad_token_id=0,
                **extra,
            )
        return [row[longest:].tolist() for row in out]

    return run


def lorakeet_run(llm: LLM, names: list[str | None], prompts: list[list[int]]) -> Run:
    params = SamplingParams(max_tokens=NUM_TOKENS, temperature=0.0, ignore_eos=True)

    def run() -> list[list[int]]:
        results = llm.generate(prompts, params, adapter=names)
        return [list(result.outputs[0].token_ids) for result in results]

    return run


def timed(run: Run) -> tuple[float, list[list[int]]]:
    """Output tokens a second, and the answers."""
    start = time.perf_counter()
    tokens = run()
    return NUM_REQUESTS * NUM_TOKENS / (time.perf_counter() - start), tokens


def compare(title: str, peer: Run, ours: Run, repeats: int) -> float:
    """The two take turns, so that what else the machine does meets both."""
    peer(), ours()
    peer_rates, our_rates = [], []
    for _ in range(repeats):
        rate, peer_tokens = timed(peer)
        peer_rates.append(rate)
        rate, our_tokens = timed(ours)
        our_rates.append(rate)
    peer_rate, our_rate = statistics.median(peer_rates), statistics.median(our_rates)
    same = sum(a == b for a, b in zip(peer_tokens, our_tokens, strict=True))
    ratio = our_rate / peer_rate
    print(
        f"{title}: peer {peer_rate:.1f}, Lorakeet {our_rate:.1f} output tokens a second, "
        f"ratio {ratio:.2f}; {same} of {NUM_REQUESTS} answers are token for token the same",
        flush=True,
    )
    return ratio


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", help="model folder; none: the demo model")
    parser.add_argument("--repeats", type=int, default=3)
    arguments = parser.parse_args()
    model_folder = arguments.model
    if model_folder is None:
        from lorakeet.server.demo import demo_model

        model_folder = str(demo_model())
    with tempfile.TemporaryDirectory() as folder:
        adapters = make_adapters(model_folder, Path(folder))
        names: list[str | None] = [f"a{i % NUM_ADAPTERS}" for i in range(NUM_REQUESTS)]
        nobody: list[str | None] = [None] * NUM_REQUESTS
        with LLM(
            model_folder,
            adapters=adapters,
            max_loras=NUM_ADAPTERS,
            max_lora_rank=16,
            enable_prefix_caching=False,  # repeats ask the same prompts; nothing may be reused
        ) as llm:
            prompts = make_prompts(AutoConfig.from_pretrained(model_folder).vocab_size)
            peft = transformers_run(model_folder, adapters, names, prompts)
            mixed = compare(
                "8 adapters", peft, lorakeet_run(llm, names, prompts), arguments.repeats
            )
            del peft
            plain = transformers_run(model_folder, {}, nobody, prompts)
            base = compare(
                "base only", plain, lorakeet_run(llm, nobody, prompts), arguments.repeats
            )
    print(f"ratio with 8 adapters {mixed:.2f}, base only {base:.2f}")


if __name__ == "__main__":
    main()
