"""How fast a model is read from its files: Llama-3.1-8B's shape as local safetensors.

    python benchmarks/load_model.py [--folder DIR] [--layers 32]
    python benchmarks/load_model.py --smoke      (tiny, on the CPU)

Writes random weights once (16 GB; less with fewer layers), then reads the files' bytes into memory
without looking at them, and loads the model on the GPU, or the CPU where there is none. Both come
from the page cache if the files fit there: then memory is the limit, not the disk. The last line:
the time of loading over that of reading.
"""

import argparse
import json
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from safetensors.torch import save_file
from shapes import LLAMA_8B, TINY, projections, write_model
from tqdm import tqdm

from lorakeet.models.weights import load_model

_BLOCK = 2**24


@contextmanager
def folder_of(name: str | None) -> Iterator[Path]:
    if name is not None:
        yield Path(name)
        return
    with tempfile.TemporaryDirectory() as own:
        yield Path(own)


def write_weights(folder: Path, config: dict[str, object]) -> None:
    """One file a layer, in bfloat16, and one for the rest."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    hidden, vocab = int(str(config["hidden_size"])), int(str(config["vocab_size"]))

    def draw(*shape: int) -> torch.Tensor:
        return torch.empty(shape, dtype=torch.bfloat16, device=device).normal_(0, 0.02).cpu()

    rest = {
        "model.embed_tokens.weight": draw(vocab, hidden),
        "model.norm.weight": draw(hidden),
        "lm_head.weight": draw(vocab, hidden),
    }
    index = dict.fromkeys(rest, "rest.safetensors")
    save_file(rest, folder / "rest.safetensors")
    for layer in tqdm(range(int(str(config["num_hidden_layers"]))), desc="layers"):
        prefix, name = f"model.layers.{layer}", f"layer-{layer}.safetensors"
        tensors = {
            f"{prefix}.{block}.{leaf}.weight": draw(outputs, inputs)
            for leaf, (block, inputs, outputs) in projections(config).items()
        }
        for norm in ("input_layernorm", "post_attention_layernorm"):
            tensors[f"{prefix}.{norm}.weight"] = draw(hidden)
        save_file(tensors, folder / name)
        index |= dict.fromkeys(tensors, name)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": index}))


def read_files(folder: Path) -> float:
    """Seconds to read all weights into a buffer, one file after the other."""
    buffer = memoryview(bytearray(_BLOCK))
    started = time.perf_counter()
    for file in sorted(folder.glob("*.safetensors")):
        with file.open("rb", buffering=0) as source:
            while source.readinto(buffer):
                pass
    return time.perf_counter() - started


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--folder", help="where the model is kept; a temporary folder if left out")
    parser.add_argument("--layers", type=int)
    parser.add_argument("--smoke", action="store_true")
    args = parser.parse_args()
    config = dict(TINY if args.smoke else LLAMA_8B)
    config |= {"num_hidden_layers": args.layers} if args.layers else {}
    with folder_of(args.folder) as root:
        model = root / "model"
        if not model.exists():
            write_weights(write_model(model, config), config)
        size = sum(file.stat().st_size for file in model.glob("*.safetensors"))
        reading = min(read_files(model) for _ in range(2))
        device = "cuda" if torch.cuda.is_available() and not args.smoke else "cpu"
        torch.zeros(1, device=device)
        started = time.perf_counter()
        load_model(model, device)
        if device == "cuda":
            torch.cuda.synchronize()
        loading = time.perf_counter() - started
    print(f"{size / 1e9:.2f} GB; read {size / reading / 1e9:.2f} GB/s", end="; ")
    print(f"loaded in {loading:.1f} s, {size / loading / 1e9:.2f} GB/s")
    print(f"time of loading over that of reading: {loading / reading:.2f}")


if __name__ == "__main__":
    main()
