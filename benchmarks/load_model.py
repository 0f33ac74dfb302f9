"""How fast a model is read from its files: Llama-3.1-8B's shape as local safetensors.

    python benchmarks/load_model.py [--folder DIR] [--layers 32]
    python benchmarks/load_model.py --smoke      (tiny, on the CPU)

Writes random weights once (16 GB; less with fewer layers). Then it reads the files' bytes without
looking at them, a few files at a time; loads the model on the GPU, or the CPU where there is none;
and starts `lorakeet serve` on the folder, until /health answers ("ready after"). The page cache is
told to drop the files before each of the three, so that they come from the disk; where it keeps
them all the same (files in memory, some virtual machines), the output says so. The last line: the
time of loading over that of reading.
"""

import argparse
import json
import os
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import torch
from safetensors.torch import save_file
from server_process import served
from shapes import LLAMA_8B, TINY, projections, write_model
from tqdm import tqdm

from lorakeet.models.weights import READERS, load_model

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


def drop_from_cache(folder: Path) -> bool:
    """Whether the next to read the weights gets them from the disk, as far as one can see."""
    dropped = [_drop(file) for file in folder.glob("*.safetensors")]
    return all(dropped)


def _drop(file: Path) -> bool:
    with file.open("rb") as source:
        os.fsync(source.fileno())  # what is not yet on the disk would stay
        os.posix_fadvise(source.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        try:
            os.preadv(source.fileno(), [bytearray(1)], 0, os.RWF_NOWAIT)
        except BlockingIOError:  # it would have to wait for the disk
            return True
        except OSError:  # no such reads here
            return False
    return False


def read_files(folder: Path) -> float:
    """Seconds to read all weights."""

    def read(file: Path) -> None:
        buffer = memoryview(bytearray(_BLOCK))
        with file.open("rb", buffering=0) as source:
            while source.readinto(buffer):
                pass

    started = time.perf_counter()
    with ThreadPoolExecutor(READERS) as readers:
        list(readers.map(read, sorted(folder.glob("*.safetensors"))))
    return time.perf_counter() - started


def load(folder: Path, device: str) -> float:
    """Seconds to load the model; it is gone afterwards."""
    torch.zeros(1, device=device)
    started = time.perf_counter()
    model = load_model(folder, device)
    if device == "cuda":
        torch.cuda.synchronize()
    seconds = time.perf_counter() - started
    del model
    torch.cuda.empty_cache()
    return seconds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--folder", help="where the model is kept; a temporary folder if left out")
    parser.add_argument("--layers", type=int)
    parser.add_argument("--port", type=int, default=8714)
    parser.add_argument("--smoke", action="store_true")
    args = parser.parse_args()
    config = dict(TINY if args.smoke else LLAMA_8B)
    config |= {"num_hidden_layers": args.layers} if args.layers else {}
    device = "cuda" if torch.cuda.is_available() and not args.smoke else "cpu"
    with folder_of(args.folder) as root:
        model = root / "model"
        if not model.exists():
            write_weights(write_model(model, config), config)
        size = sum(file.stat().st_size for file in model.glob("*.safetensors"))
        is_dropped = drop_from_cache(model)
        reading = read_files(model)
        is_dropped &= drop_from_cache(model)
        loading = load(model, device)
        is_dropped &= drop_from_cache(model)
        log = root / "server.log"
        with served(model, ["--device", device], log, args.port, load_format="auto"):
            pass
    source = "the disk" if is_dropped else "the page cache, which keeps the files,"
    print(f"{size / 1e9:.2f} GB; {source} gives {size / reading / 1e9:.2f} GB/s", end="; ")
    print(f"loaded in {loading:.1f} s, {size / loading / 1e9:.2f} GB/s")
    print(f"time of loading over that of reading: {loading / reading:.2f}")


if __name__ == "__main__":
    main()
