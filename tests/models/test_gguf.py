"""GGUF files of tiny models against the models themselves, and files that cannot be served."""

import math
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType
from gguf.quants import dequantize, quantize
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig

from lorakeet.models.config import UnsupportedModelError, load_config
from lorakeet.models.gguf import convert_gguf
from support.gguf_files import write_gguf
from support.models import BOS_ID, EOS_ID, tiny_model


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model(tmp_path_factory.mktemp("llama"))


def logits(folder: Path) -> torch.Tensor:
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    with torch.no_grad():
        out: torch.Tensor = model(torch.arange(3, 67)[None] * 7 % 300).logits
    return out


@pytest.mark.parametrize(
    "kind",
    [
        "llama",
        "llama_tied",
        "llama_bias",
        "qwen2",
        "qwen3",
        "rope_linear",
        "rope_yarn",
        "odd_head_dim",
    ],
)
def test_same_weights_and_logits(kind: str, tmp_path: Path) -> None:
    source = tiny_model(tmp_path / "model", kind)
    folder = convert_gguf(write_gguf(tmp_path / "m.gguf", source), tmp_path / "cache")
    want, got = load_file(source / "model.safetensors"), load_file(folder / "model.safetensors")
    assert want.keys() == got.keys()
    for name, weight in want.items():
        assert torch.equal(got[name], weight), name
    assert torch.allclose(logits(folder), logits(source), atol=1e-3)
    config, original = load_config(folder), load_config(source)
    assert config.rope == original.rope
    assert config.tie_word_embeddings == original.tie_word_embeddings == (kind == "llama_tied")


@pytest.mark.parametrize("kind", ["F16", "BF16", "Q8_0", "Q4_1", "Q5_0"])
def test_quantized_weights_are_what_their_blocks_stand_for(
    llama: Path, kind: str, tmp_path: Path
) -> None:
    quantization = GGMLQuantizationType[kind]
    folder = convert_gguf(write_gguf(tmp_path / "m.gguf", llama, quantization), tmp_path / "cache")
    got = load_file(folder / "model.safetensors")
    for name, weight in load_file(llama / "model.safetensors").items():
        assert got[name].dtype == torch.float32
        if weight.ndim == 2:
            assert not torch.equal(got[name], weight)
            # rows are quantized one by one, so the permutation of rows changes nothing
            want = dequantize(quantize(weight.numpy(), quantization), quantization)
            assert np.array_equal(got[name].numpy(), want), name


def llama3_divisors(rope: dict[str, Any], head_dim: int) -> np.ndarray[Any, np.dtype[np.float32]]:
    """rope_freqs.weight, by the definition that Llama 3.1 came with."""
    divisors = []
    for i in range(0, head_dim, 2):
        wavelength = 2 * math.pi * rope["theta"] ** (i / head_dim)
        if wavelength < rope["original"] / 4:
            divisors.append(1.0)
        elif wavelength > rope["original"]:
            divisors.append(rope["factor"])
        else:
            smooth = (rope["original"] / wavelength - 1) / 3
            divisors.append(1 / ((1 - smooth) / rope["factor"] + smooth))
    return np.array(divisors, dtype=np.float32)


def test_llama3_rope_is_read_off_the_divisors(tmp_path: Path) -> None:
    source = tiny_model(tmp_path / "model", "rope_llama3")
    divisors = llama3_divisors({"theta": 10000.0, "original": 64, "factor": 4.0}, 16)
    assert set(divisors) > {1.0, 4.0}  # both ends and something between
    file = write_gguf(tmp_path / "m.gguf", source, tensors={"rope_freqs.weight": divisors})
    folder = convert_gguf(file, tmp_path / "cache")
    assert load_config(folder).rope == load_config(source).rope
    assert torch.allclose(logits(folder), logits(source), atol=1e-3)


def test_llama31_files_do_not_name_the_original_length(tmp_path: Path) -> None:
    rope = {"rope_type": "default", "rope_theta": 500000.0}
    source = tiny_model(tmp_path / "model", rope_parameters=rope, head_dim=64)
    divisors = llama3_divisors({"theta": 500000.0, "original": 8192, "factor": 8.0}, 64)
    file = write_gguf(tmp_path / "m.gguf", source, tensors={"rope_freqs.weight": divisors})
    got = load_config(convert_gguf(file, tmp_path / "cache")).rope
    assert (got.kind, got.factor, got.original_max_position_embeddings) == ("llama3", 8.0, 8192)
    assert (got.low_freq_factor, got.high_freq_factor) == (1.0, 4.0)


def test_tokenizer_template_and_end_tokens(llama: Path, tmp_path: Path) -> None:
    file = write_gguf(tmp_path / "m.gguf", llama, metadata={"tokenizer.ggml.eot_token_id": 2})
    folder = convert_gguf(file, tmp_path / "cache")
    want, got = AutoTokenizer.from_pretrained(llama), AutoTokenizer.from_pretrained(folder)
    for text in ("the fox, 12  dogs\n é🦜", "<|user|>hi<|end|><|unknown|>", ""):
        assert got.encode(text) == want.encode(text)
        assert got.decode(got.encode(text), skip_special_tokens=True) == want.decode(
            want.encode(text), skip_special_tokens=True
        )
    chat = [{"role": "user", "content": "hi"}]
    assert got.apply_chat_template(chat, tokenize=False) == "<|bos|><|user|>hi<|end|>"
    assert (got.bos_token_id, got.eos_token_id) == (BOS_ID, EOS_ID)
    assert GenerationConfig.from_pretrained(folder).eos_token_id == [EOS_ID, 2]


@pytest.mark.parametrize(
    ("metadata", "message"),
    [
        ({"general.architecture": "gpt2"}, "architecture 'gpt2'"),
        ({"llama.expert_count": 8}, "Mixture-of-experts"),
        ({"split.count": 3}, "several files"),
        ({"llama.block_count": None}, "llama.block_count"),
        ({"llama.rope.dimension_count": 8}, "one size"),
        ({"llama.attention.value_length": 8}, "one size"),
        ({"llama.attention.head_count_kv": [2, 2, 1]}, "differ in attention.head_count_kv"),
        ({"llama.rope.scaling.type": "longrope"}, "'longrope'"),
        ({"llama.rope.scaling.yarn_beta_fast": 16.0}, "yarn_beta_fast"),
        ({"tokenizer.ggml.model": "bert"}, "'bert'"),
        ({"tokenizer.ggml.model": None}, "tokenizer.ggml.model"),
        ({"tokenizer.ggml.pre": "klingon"}, "'klingon'"),
        ({"tokenizer.ggml.pre": None}, "pre-tokenizer None"),
    ],
)
def test_what_cannot_be_served_is_refused(
    llama: Path, metadata: dict[str, Any], message: str, tmp_path: Path
) -> None:
    file = write_gguf(tmp_path / "m.gguf", llama, metadata=metadata)
    with pytest.raises(UnsupportedModelError, match=re.escape(message)):
        convert_gguf(file, tmp_path / "cache")
    assert not [path for path in (tmp_path / "cache" / "gguf").iterdir() if path.is_dir()]


@pytest.mark.parametrize("name", ["blk.0.attn_rot.weight", "stray", "blk.0.token_embd.weight"])
def test_a_tensor_of_no_known_use_is_refused(llama: Path, name: str, tmp_path: Path) -> None:
    ones = np.ones(4, dtype=np.float32)
    file = write_gguf(tmp_path / "m.gguf", llama, tensors={name: ones})
    with pytest.raises(UnsupportedModelError, match=re.escape(name)):
        convert_gguf(file, tmp_path / "cache")


def test_rope_divisors_of_another_kind_are_refused(llama: Path, tmp_path: Path) -> None:
    strange = np.linspace(1, 3, 8, dtype=np.float32)
    file = write_gguf(tmp_path / "m.gguf", llama, tensors={"rope_freqs.weight": strange})
    with pytest.raises(UnsupportedModelError, match="rope_freqs"):
        convert_gguf(file, tmp_path / "cache")


@pytest.mark.parametrize("size", [0, 3, 100, 4000, -1])
def test_a_broken_file_is_refused(llama: Path, size: int, tmp_path: Path) -> None:
    whole = write_gguf(tmp_path / "m.gguf", llama).read_bytes()
    file = tmp_path / "cut.gguf"
    file.write_bytes(whole[:size])
    with pytest.raises(UnsupportedModelError, match="not a readable GGUF"):
        convert_gguf(file, tmp_path / "cache")
    file.write_bytes(b"PK" + whole[2:])
    with pytest.raises(UnsupportedModelError, match="not a readable GGUF"):
        convert_gguf(file, tmp_path / "cache")


def test_converted_once_by_content(llama: Path, tmp_path: Path) -> None:
    file = write_gguf(tmp_path / "m.gguf", llama)
    folder = convert_gguf(file, tmp_path / "cache")
    stamp = (folder / "model.safetensors").stat().st_mtime_ns
    assert convert_gguf(file, tmp_path / "cache") == folder
    assert (folder / "model.safetensors").stat().st_mtime_ns == stamp
    # other bytes of the same size under the same name and time are another model
    times = file.stat()
    content = bytearray(file.read_bytes())
    content[-5] ^= 1
    file.write_bytes(content)
    os.utime(file, ns=(times.st_atime_ns, times.st_mtime_ns))
    assert convert_gguf(file, tmp_path / "cache") != folder


@pytest.mark.parametrize("harm", ["cut", "missing", "no manifest", "bad manifest"])
def test_a_broken_cache_heals(llama: Path, harm: str, tmp_path: Path) -> None:
    file = write_gguf(tmp_path / "m.gguf", llama)
    folder = convert_gguf(file, tmp_path / "cache")
    weights = folder / "model.safetensors"
    whole = weights.read_bytes()
    if harm == "cut":
        weights.write_bytes(whole[:-8])
    elif harm == "missing":
        (folder / "tokenizer.json").unlink()
    elif harm == "no manifest":
        (folder / "manifest.json").unlink()
    else:
        (folder / "manifest.json").write_text("[")
    assert convert_gguf(file, tmp_path / "cache") == folder
    assert weights.read_bytes() == whole
    assert (folder / "tokenizer.json").exists()


def test_processes_that_race_end_with_one_whole_folder(llama: Path, tmp_path: Path) -> None:
    file = write_gguf(tmp_path / "m.gguf", llama)
    program = (
        "import sys; from pathlib import Path; from lorakeet.models.gguf import convert_gguf; "
        "print(convert_gguf(Path(sys.argv[1]), Path(sys.argv[2])))"
    )
    command = [sys.executable, "-c", program, str(file), str(tmp_path / "cache")]
    running = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for _ in range(3)]
    printed = {process.communicate(timeout=120)[0].strip() for process in running}
    assert [process.returncode for process in running] == [0, 0, 0]
    assert len(printed) == 1
    folder = Path(printed.pop())
    assert torch.equal(logits(folder), logits(llama))
    assert not list(folder.parent.glob("*.partial"))
