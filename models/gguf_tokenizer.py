"""The tokenizer of a GGUF file, as tokenizer.json and tokenizer_config.json.

Built from the file's own tables and not by transformers' converter: that one leaves out how some
vocabularies split digits, ignore merges or normalize, which gives ids that the model never saw so.
"""

import json
from pathlib import Path
from typing import Any

from tokenizers import (
    AddedToken,
    Regex,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
)

from lorakeet.models.config import UnsupportedModelError

_UNKNOWN, _CONTROL, _USER_DEFINED = 2, 3, 4  # tokenizer.ggml.token_type

# Pre-tokenizers of byte-level vocabularies, by tokenizer.ggml.pre.
_KINDS = {
    "gpt-2": "gpt2",
    "smollm": "smollm",
    "llama-bpe": "llama3",
    "llama3": "llama3",
    "llama-v3": "llama3",
    "qwen2": "qwen2",
    "deepseek-r1-qwen": "qwen2",
    "tekken": "tekken",
}

_WORDS = r"[^\r\n\p{L}\p{N}]?\p{L}+"
_CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_CASED_WORDS = rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*"
_SPACES = r"\s*[\r\n]+|\s+(?!\S)|\s+"

_SPLITS = {
    "llama3": rf"{_CONTRACTIONS}|{_WORDS}|\p{{N}}{{1,3}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|{_SPACES}",
    "qwen2": rf"{_CONTRACTIONS}|{_WORDS}|\p{{N}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|{_SPACES}",
    "tekken": rf"{_CASED_WORDS}|\p{{N}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|{_SPACES}",
}

# Tokens that end an answer in some chat format, though the file may name another one only.
_END_TOKENS = ("<|im_end|>", "<|endoftext|>", "<|eot_id|>", "<|eom_id|>", "<|end_of_text|>")

Metadata = dict[str, Any]


def write_tokenizer(metadata: Metadata, folder: Path) -> None:
    """Write both files. Raises UnsupportedModelError for a vocabulary of another kind."""
    build_tokenizer(metadata).save(str(folder / "tokenizer.json"))
    tokens = metadata["tokenizer.ggml.tokens"]
    config: dict[str, Any] = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "clean_up_tokenization_spaces": False,
    }
    for role, key in (("bos", "bos"), ("eos", "eos"), ("unk", "unknown"), ("pad", "padding")):
        token_id = metadata.get(f"tokenizer.ggml.{key}_token_id")
        if token_id is not None and token_id < len(tokens):
            config[f"{role}_token"] = tokens[token_id]
    if template := metadata.get("tokenizer.chat_template"):
        config["chat_template"] = template
    text = json.dumps(config, indent=2, ensure_ascii=False)
    (folder / "tokenizer_config.json").write_text(text, encoding="utf-8")


def end_token_ids(metadata: Metadata) -> list[int]:
    """Ids of the tokens that end an answer, the file's own end token first."""
    named = [metadata.get(f"tokenizer.ggml.{key}_token_id") for key in ("eos", "eot", "eom")]
    types = metadata.get("tokenizer.ggml.token_type", [])
    known = [
        token_id
        for token_id, (token, kind) in enumerate(
            zip(metadata["tokenizer.ggml.tokens"], types, strict=False)
        )
        if kind == _CONTROL and token in _END_TOKENS
    ]
    return list(dict.fromkeys(i for i in [*named, *known] if i is not None))


def build_tokenizer(metadata: Metadata) -> Tokenizer:
    """Raises UnsupportedModelError unless the vocabulary is byte-level or SentencePiece BPE."""
    for key in ("tokens", "model"):
        if f"tokenizer.ggml.{key}" not in metadata:
            raise UnsupportedModelError(f"The GGUF file holds no tokenizer.ggml.{key}.")
    kind = metadata["tokenizer.ggml.model"]
    tokens = metadata["tokenizer.ggml.tokens"]
    vocab = {token: token_id for token_id, token in enumerate(tokens)}
    types = metadata.get("tokenizer.ggml.token_type") or [1] * len(tokens)
    if kind == "gpt2":
        tokenizer, adds_bos = _byte_level(metadata, vocab)
    elif kind == "llama":
        tokenizer, adds_bos = _sentencepiece(metadata, vocab, types), True
    else:
        raise UnsupportedModelError(f"GGUF vocabularies of kind {kind!r} are not supported.")
    for special, wanted in ((True, (_CONTROL, _UNKNOWN)), (False, (_USER_DEFINED,))):
        chosen = [token for token, type_ in zip(tokens, types, strict=True) if type_ in wanted]
        tokenizer.add_tokens([AddedToken(t, special=special, normalized=False) for t in chosen])
    _add_ends(tokenizer, metadata, metadata.get("tokenizer.ggml.add_bos_token", adds_bos))
    return tokenizer


def _byte_level(metadata: Metadata, vocab: dict[str, int]) -> tuple[Tokenizer, bool]:
    """Byte-level BPE; and whether a prompt starts with BOS where the file does not say."""
    pre = metadata.get("tokenizer.ggml.pre")
    kind = _KINDS.get(str(pre))
    if kind is None:
        raise UnsupportedModelError(
            f"GGUF pre-tokenizer {pre!r} is not supported; supported are {', '.join(_KINDS)}."
        )
    merges = [_pair(merge) for merge in metadata["tokenizer.ggml.merges"]]
    whole_words_first = kind in ("llama3", "tekken")
    tokenizer = Tokenizer(models.BPE(vocab, merges, ignore_merges=whole_words_first))
    if kind == "qwen2":
        tokenizer.normalizer = normalizers.NFC()
    own_rule = _SPLITS.get(kind)
    steps: list[pre_tokenizers.PreTokenizer] = []
    if kind == "smollm":
        steps.append(pre_tokenizers.Digits(individual_digits=True))
    if own_rule is not None:
        steps.append(pre_tokenizers.Split(Regex(own_rule), behavior="isolated"))
    steps.append(pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=own_rule is None))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(steps)
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer, whole_words_first


def _pair(merge: str) -> tuple[str, str]:
    left, right = merge.split(" ")
    return left, right


def _sentencepiece(metadata: Metadata, vocab: dict[str, int], types: list[int]) -> Tokenizer:
    """BPE over characters, bytes for what the vocabulary lacks, spaces written as U+2581."""
    scores = metadata.get("tokenizer.ggml.scores")
    if scores is None:
        raise UnsupportedModelError("The GGUF file holds no tokenizer.ggml.scores.")
    unknown = next((t for t, kind in zip(vocab, types, strict=False) if kind == _UNKNOWN), None)
    merges = _merges_from_scores(vocab, scores)
    tokenizer = Tokenizer(
        models.BPE(vocab, merges, unk_token=unknown, fuse_unk=True, byte_fallback=True)
    )
    space = normalizers.Replace(" ", "▁")
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    if metadata.get("tokenizer.ggml.add_space_prefix", True):
        tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), space])
        steps.append(decoders.Strip(" ", 1, 0))
    else:
        tokenizer.normalizer = space
    tokenizer.decoder = decoders.Sequence(steps)
    return tokenizer


def _merges_from_scores(vocab: dict[str, int], scores: list[float]) -> list[tuple[str, str]]:
    """Every way to make a token of two others, best token first: SentencePiece's order of work."""
    merges = [
        (-scores[token_id], vocab[token[:cut]], vocab[token[cut:]], token[:cut], token[cut:])
        for token, token_id in vocab.items()
        for cut in range(1, len(token))
        if token[:cut] in vocab and token[cut:] in vocab
    ]
    return [(left, right) for *_, left, right in sorted(merges)]


def _add_ends(tokenizer: Tokenizer, metadata: Metadata, adds_bos: bool) -> None:
    """Have `encode` put the tokens around a text that the file asks for."""
    adds_eos = metadata.get("tokenizer.ggml.add_eos_token", False)
    tokens = metadata["tokenizer.ggml.tokens"]
    ends = {}
    for key, wanted in (("bos", adds_bos), ("eos", adds_eos)):
        token_id = metadata.get(f"tokenizer.ggml.{key}_token_id")
        if wanted and token_id is not None:
            ends[key] = (tokens[token_id], token_id)
    before, after = ([ends[key][0]] if key in ends else [] for key in ("bos", "eos"))
    if ends:
        tokenizer.post_processor = processors.TemplateProcessing(
            single=[*before, "$A", *after],
            pair=[*before, "$A", *after, *before, "$B:1", *after],
            special_tokens=list(ends.values()),
        )
