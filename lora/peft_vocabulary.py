"""What a PEFT file holds of whole rows of the embedding and the output head → a `Vocabulary`.

PEFT writes such rows in three ways: `modules_to_save` (a whole table of the adapter's own),
`trainable_token_indices` (some rows), and copies of the base model's tables beside the factors of
adapted ones, or when the vocabulary was resized. All mean the same here: rows that stand in for the
base's. Rows that equal the base's are dropped.

In a model that ties the two tables, a copy of the base's changes both, as it does when PEFT loads
it; a table of the adapter's own changes its module alone; trainable rows of the embedding are the
head's too, unless the file has other ones for it.
"""

import hashlib
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.nn.functional import pad

from lorakeet.lora.adapter import Adapter, AdapterError, GroupSpec, TokenRows, Vocabulary
from lorakeet.lora.peft_config import CONFIG_NAME, REPLACEABLE, PeftConfig, shorten
from lorakeet.lora.peft_tensors import PARENT, PEFT_PREFIX, LoRAModule, all_finite, check_tensor

_MAX_SIZE = 2**22  # token ids; the sampler's limit
_BLOCK = 4096  # rows compared at a time: the model may be on a device with little memory left
_KEY = re.compile(
    rf"(?:{re.escape(PEFT_PREFIX)})?{PARENT}(?P<module>{'|'.join(REPLACEABLE)})\."
    r"(?P<kind>(?:base_layer\.|modules_to_save\.(?:default\.)?|original_module\.)?weight"
    r"|token_adapter\.(?:base_layer\.weight|trainable_tokens_delta(?:\.default)?))"
)
_DELTA, _ORIGINAL = "trainable_tokens_delta", "original_module.weight"


@dataclass(frozen=True)
class VocabularyTensors:
    """By module, "embed_tokens" and "lm_head"."""

    tables: dict[str, Tensor]  # (vocabulary of the adapter, hidden)
    tokens: dict[str, tuple[tuple[int, ...], Tensor]]  # ids, and their rows
    own: frozenset[str]  # tables that are not the base model's: `modules_to_save`

    def __bool__(self) -> bool:
        return bool(self.tables or self.tokens)

    @property
    def num_rows(self) -> dict[str, int]:
        """Rows by module."""
        counts = {name: len(ids) for name, (ids, _) in self.tokens.items()}
        return counts | {name: len(table) for name, table in self.tables.items()}


def split_vocabulary(
    config: PeftConfig, tensors: Mapping[str, Tensor]
) -> tuple[VocabularyTensors, dict[str, Tensor]]:
    """Take out the tensors that hold whole rows; returns them, and the others.

    Raises AdapterError where config and tensors do not go together, or two copies differ.
    """
    found: dict[str, dict[str, Tensor]] = {name: {} for name in REPLACEABLE}
    others = {}
    for key, tensor in tensors.items():
        match = _KEY.fullmatch(key)
        if match is None:
            others[key] = tensor
            continue
        check_tensor(key, tensor)
        kind = match["kind"].replace(".default", "")
        if found[match["module"]].setdefault(kind, tensor) is not tensor:
            raise AdapterError(f"{shorten(key)} is there twice, under two names")
    tables, tokens = {}, {}
    for name, by_kind in found.items():
        delta = by_kind.pop(f"token_adapter.{_DELTA}", None)
        if delta is not None:
            ids = config.trainable_token_indices
            tokens[name] = (ids.get(name, ids.get("embed_tokens", ())), delta)  # a tied head's too
        if (table := _one_table(name, by_kind)) is not None:
            tables[name] = table
    own = config.modules_to_save
    _check_config(config, tables, tokens)
    return VocabularyTensors(tables, tokens, own), others


def _one_table(name: str, by_kind: dict[str, Tensor]) -> Tensor | None:
    """The table that counts: PEFT may write a trained one twice, and the one that it replaces."""
    original = by_kind.pop(_ORIGINAL, None)
    tables = list(by_kind.values())
    if not tables:
        if original is not None:
            raise AdapterError(f"{name}: the file holds the replaced weights without the new ones")
        return None
    if any(not torch.equal(tables[0], other) for other in tables[1:]):
        raise AdapterError(f"{name}: the file holds {', '.join(by_kind)}, which differ")
    return tables[0]


def _check_config(
    config: PeftConfig,
    tables: Mapping[str, Tensor],
    tokens: Mapping[str, tuple[tuple[int, ...], Tensor]],
) -> None:
    for name in sorted(config.modules_to_save - tables.keys()):
        raise AdapterError(f"{CONFIG_NAME}: modules_to_save {name}: the file does not hold it")
    for name, (ids, delta) in tokens.items():
        if len(ids) != len(delta):
            raise AdapterError(
                f"{name}: {_DELTA} has {len(delta)} rows; {CONFIG_NAME} has {len(ids)} "
                "trainable_token_indices for it"
            )
        if name in config.modules_to_save:
            raise AdapterError(f"{name}: modules_to_save and trainable_token_indices exclude it")
    if config.trainable_token_indices and not tokens:
        raise AdapterError(f"{CONFIG_NAME}: trainable_token_indices: the file has no {_DELTA}")


def fit_modules(
    modules: Sequence[LoRAModule], found: VocabularyTensors, specs: Sequence[GroupSpec]
) -> tuple[LoRAModule, ...]:
    """The modules with factors of embedding and head cut or padded to the model's vocabulary.

    Raises AdapterError where the sizes in the file do not go together.
    """
    (embedding,) = (spec for spec in specs if spec.name == "embed_tokens")
    size = _size(found, embedding.input_size, embedding.output_size)
    return tuple(_fit(module, embedding.input_size, size) for module in modules)


def resolve_vocabulary(
    found: VocabularyTensors,
    modules: Sequence[LoRAModule],
    base_weights: Mapping[str, Tensor] | None,
    dtype: torch.dtype,
) -> Vocabulary | None:
    """The adapter's own rows; None for an adapter that has the model's vocabulary as it is.

    `modules` are those of the file, before `fit_modules`: what they add to one of the rows is put
    into it. `base_weights`: the model's "embed_tokens" and "lm_head", each (vocab, hidden), on any
    device; of a model that ties them, the same memory. Raises AdapterError.
    """
    if not found:
        return None
    if base_weights is None:
        names = ", ".join({**found.tables, **found.tokens})
        raise AdapterError(f"{names}: the file holds its weights; there is no model to compare")
    base_size, hidden = base_weights["embed_tokens"].shape
    size = _size(found, base_size, hidden)
    found = _tie(found, base_weights)
    own: dict[str, TokenRows | None] = {}
    for name in REPLACEABLE:
        ids, rows = _changed_rows(found, name, base_weights[name])
        for module in modules:
            if module.name == name and len(ids):
                rows = _add_factors(module, ids, rows, size)
        own[name] = TokenRows(ids, _cast(rows, name, dtype)) if len(ids) else None
    _check_embedded(own["embed_tokens"], base_size, size)
    if size == base_size and not any(own.values()):
        return None
    return Vocabulary(size, own["embed_tokens"], own["lm_head"])


def with_vocabulary(adapter: Adapter, vocabulary: Vocabulary | None) -> Adapter:
    """The adapter with a vocabulary of its own, which is part of its identity."""
    if vocabulary is None:
        return adapter
    digest = hashlib.sha256(f"{adapter.digest} {vocabulary.size}".encode())
    own = {"embed_tokens": vocabulary.embed_tokens, "lm_head": vocabulary.lm_head}
    for name, part in own.items():
        if part is None:
            continue
        digest.update(f" {name} {len(part.ids)} {part.rows.dtype} ".encode())
        for tensor in (part.ids, part.rows):
            digest.update(tensor.contiguous().view(torch.uint8).numpy().data)
    changed = {name for name, part in own.items() if part is not None}
    return replace(
        adapter,
        digest=digest.hexdigest(),
        vocabulary=vocabulary,
        modules=tuple(sorted({*adapter.modules, *changed})),
        num_bytes=adapter.num_bytes + vocabulary.num_bytes,
    )


def _size(found: VocabularyTensors, base_size: int, hidden: int) -> int:
    """How many token ids the adapter has: as its tables say, or the highest one that it trains."""
    parts = [*found.tables.items(), *((name, rows) for name, (_, rows) in found.tokens.items())]
    for name, tensor in parts:
        if tensor.shape[1] != hidden:
            raise AdapterError(f"{name}: hidden size {tensor.shape[1]}, the model has {hidden}")
    sizes = {name: len(table) for name, table in found.tables.items()}
    if len(set(sizes.values())) > 1:
        raise AdapterError(f"embed_tokens and lm_head are of different vocabularies: {sizes}")
    highest = max((max(ids) for ids, _ in found.tokens.values()), default=0)
    size = max(sizes.values(), default=max(base_size, highest + 1))
    if highest >= size or size > _MAX_SIZE:
        largest = max(highest, size - 1)
        raise AdapterError(f"token id {largest} is past the adapter's vocabulary of {size}")
    return size


def _tie(found: VocabularyTensors, base_weights: Mapping[str, Tensor]) -> VocabularyTensors:
    if base_weights["embed_tokens"].data_ptr() != base_weights["lm_head"].data_ptr():
        return found
    tables, tokens = dict(found.tables), dict(found.tokens)
    for name, other in (REPLACEABLE, REPLACEABLE[::-1]):
        if name in found.tables and name not in found.own:
            tables.setdefault(other, found.tables[name])
    if "embed_tokens" in tokens:
        if "lm_head" in found.own:
            raise AdapterError(
                "trainable_token_indices with modules_to_save lm_head: the model ties the two"
            )
        tokens.setdefault("lm_head", tokens["embed_tokens"])
    return VocabularyTensors(tables, tokens, found.own)


def _changed_rows(found: VocabularyTensors, name: str, base: Tensor) -> tuple[Tensor, Tensor]:
    """Ids (N,), ascending, and rows (N, hidden) of a module that are not the base's."""
    table = found.tables.get(name)
    trained_ids, trained = found.tokens.get(name, ((), None))
    ids = torch.zeros(0, dtype=torch.int64) if table is None else _differing(table, base)
    if trained is None:
        return ids, base[:0].cpu() if table is None else table[ids]
    places = torch.tensor(trained_ids)
    ids = torch.cat([ids, places]).unique()  # type: ignore[no-untyped-call]
    source = trained if table is None else table
    rows = source.new_empty((len(ids), trained.shape[1]))
    if table is not None:
        rows = table[ids]
    rows[torch.searchsorted(ids, places)] = trained.to(rows.dtype)
    return ids, rows


def _differing(table: Tensor, base: Tensor) -> Tensor:
    """Ids whose rows differ, compared in the model's dtype; all past the base's end do."""
    common = min(len(table), len(base))
    differs = [
        (table[start:stop].to(base.device, base.dtype) != base[start:stop]).any(dim=1).cpu()
        for start in range(0, common, _BLOCK)
        for stop in [min(start + _BLOCK, common)]
    ]
    added = torch.arange(common, len(table))
    return torch.cat([torch.cat(differs).nonzero()[:, 0], added])


def _add_factors(module: LoRAModule, ids: Tensor, rows: Tensor, size: int) -> Tensor:
    """What the module makes of the rows, in float32: s · B A is added, and a DoRA scales it.

    An embedding's A is looked up, a head's B has a row for each token.
    """
    a, b = module.a.float(), module.b.float() * module.scaling.scale
    count = a.shape[1] if module.name == "embed_tokens" else b.shape[0]
    if count != size:
        raise AdapterError(f"{module.path}: its factors have {count} tokens, its weights {size}")
    delta = a.T[ids] @ b.T if module.name == "embed_tokens" else b[ids] @ a
    if module.bias is not None:
        raise AdapterError(f"{module.path}: lora_bias of a changed table is not supported")
    rows = rows.float() + delta
    if module.magnitude is None:
        return rows
    if module.name == "embed_tokens":  # its norms are over all tokens
        raise AdapterError(f"{module.path}: DoRA of a changed embedding is not supported")
    norms: Tensor = torch.linalg.vector_norm(rows, dim=1)
    return rows * (module.magnitude.float()[ids] / norms)[:, None]


def _fit(module: LoRAModule, base_size: int, size: int) -> LoRAModule:
    """Cut or pad the vocabulary of a module's factors to the model's."""
    missing = base_size - size
    if module.name == "embed_tokens" and module.a.shape[1] == size:
        return replace(module, a=pad(module.a, (0, missing)))
    if module.name == "lm_head" and module.b.shape[0] == size:
        magnitude = module.magnitude
        if magnitude is not None:
            magnitude = pad(magnitude, (0, missing))
        return replace(module, b=pad(module.b, (0, 0, 0, missing)), magnitude=magnitude)
    return module


def _cast(rows: Tensor, name: str, dtype: torch.dtype) -> Tensor:
    cast = rows.to(dtype).contiguous()
    if not all_finite(cast):
        raise AdapterError(f"{name}: a value is too large for {dtype}")
    return cast


def _check_embedded(embed_tokens: TokenRows | None, base_size: int, size: int) -> None:
    num_added = 0 if embed_tokens is None else int((embed_tokens.ids >= base_size).sum())
    if num_added < size - base_size:
        raise AdapterError(
            f"its vocabulary has {size} tokens, the model's {base_size}: "
            "the file does not hold the embeddings of all added ones"
        )
