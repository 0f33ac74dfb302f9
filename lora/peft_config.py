"""PEFT's adapter_config.json → a checked `PeftConfig`, or an AdapterError that names the field."""

import json
import math
import re
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeVar

from lorakeet.lora.adapter import AdapterError

CONFIG_NAME = "adapter_config.json"

# Fields that say how an adapter was trained, made or stored, not what it computes. The tensors
# decide which modules are adapted and whether there are biases.
_IGNORED = frozenset(
    "auto_mapping base_model_name_or_path corda_config ensure_weight_tying eva_config"
    " exclude_modules fan_in_fan_out inference_mode layers_pattern layers_to_transform loftq_config"
    " lora_dropout lora_ga_config megatron_config megatron_core peft_version qalora_group_size"
    " revision runtime_config target_modules task_type".split()
)
_READ = frozenset(
    "peft_type r lora_alpha use_rslora rank_pattern alpha_pattern bias init_lora_weights use_dora"
    " lora_bias modules_to_save trainable_token_indices alora_invocation_tokens".split()
)
REPLACEABLE = ("embed_tokens", "lm_head")  # modules that an adapter may bring whole, or rows of
_NOT_SUPPORTED = {
    "layer_replication": "layers used several times",
    "use_qalora": "QALoRA, which pools its inputs",
    "target_parameters": "parameters that are no module's weight, as of MoE experts",
    "use_bdlora": "BD-LoRA's block-diagonal factors",
    "arrow_config": "a router of several adapters",
    "kasa_config": "KaSA, which truncates the base weights",
    "monteclora_config": "MonteCLoRA's sampled factors",
    "velora_config": "VeLoRA",
}
# Start values that leave the base weights alone, and have LoRA's forward pass.
_HARMLESS_INIT = ("gaussian", "eva", "orthogonal", "mica")

_MAX_PATTERN_KEYS = 10_000
_MAX_KEY_LENGTH = 256
_MAX_KEY_PARTS = 5
_MAX_LOOKUP_SECONDS = 10.0

_Number = TypeVar("_Number", int, float)


@dataclass(frozen=True)
class Scaling:
    """What the config says of one module."""

    rank: int
    alpha: float
    scale: float  # the factor of B A


@dataclass(frozen=True)
class PeftConfig:
    """What of a LoRA's adapter_config.json changes the result.

    The patterns are PEFT's `rank_pattern` and `alpha_pattern`, compiled, in the file's order.
    """

    r: int
    lora_alpha: float
    use_rslora: bool = False
    use_dora: bool = False
    lora_bias: bool = False
    rank_pattern: tuple[tuple[re.Pattern[str], int], ...] = ()
    alpha_pattern: tuple[tuple[re.Pattern[str], float], ...] = ()
    base_model_name_or_path: str | None = None
    modules_to_save: frozenset[str] = frozenset()  # of REPLACEABLE
    trainable_token_indices: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    alora_invocation_tokens: tuple[int, ...] = ()

    def resolve(self, paths: Iterable[str]) -> dict[str, Scaling]:
        """Rank, alpha and scale of the modules at paths like "model.layers.1.self_attn.q_proj".

        As PEFT does it: each pattern is searched on its own, its first key that matches wins. The
        scale is alpha / r (arXiv:2106.09685), with `use_rslora` alpha / sqrt(r) (arXiv:2312.03732).
        Raises AdapterError when patterns take too long.
        """
        deadline = time.monotonic() + _MAX_LOOKUP_SECONDS
        resolved = {}
        for path in paths:
            rank = _lookup(self.rank_pattern, path, self.r, deadline)
            alpha = _lookup(self.alpha_pattern, path, self.lora_alpha, deadline)
            scale = alpha / (math.sqrt(rank) if self.use_rslora else rank)
            resolved[path] = Scaling(rank, alpha, scale)
        return resolved


def parse_config(data: bytes) -> PeftConfig:
    """Check the bytes of an adapter_config.json.

    Missing fields: `peft_type` is required, as in PEFT. `r` and `lora_alpha` are 8, `use_rslora` is
    false, the patterns are empty: PEFT's defaults. `target_modules`, `bias` and
    `base_model_name_or_path` need not be there: the tensors decide what is adapted.

    Values: `r` and the ranks are positive integers; `lora_alpha` and the alphas are finite numbers,
    zero and negative ones included (PEFT divides them as they are). A field that is not known is
    ignored while its value is null, false, zero or empty.

    Raises AdapterError that names the field for any other value, for a field that is not known but
    has a value, and for every kind of adapter that is not plain LoRA.
    """
    fields = _read_object(data)
    _refuse_other_kinds(fields)
    use_dora, lora_bias = _flag("use_dora", fields), _flag("lora_bias", fields)
    if use_dora and lora_bias:
        raise AdapterError(f"{CONFIG_NAME}: lora_bias with use_dora: PEFT does not define it")
    base = fields.get("base_model_name_or_path")
    return PeftConfig(
        r=_rank("r", fields.get("r", 8)),
        lora_alpha=_alpha("lora_alpha", fields.get("lora_alpha", 8)),
        use_rslora=_flag("use_rslora", fields),
        use_dora=use_dora,
        lora_bias=lora_bias,
        rank_pattern=_pattern("rank_pattern", fields, _rank),
        alpha_pattern=_pattern("alpha_pattern", fields, _alpha),
        base_model_name_or_path=base if isinstance(base, str) else None,
        modules_to_save=_modules_to_save(fields.get("modules_to_save")),
        trainable_token_indices=_token_indices(fields.get("trainable_token_indices")),
        alora_invocation_tokens=_invocation(fields),
    )


def shorten(value: object) -> str:
    """`repr` for a message: never long, whatever an untrusted file holds."""
    text = repr(value[:200]) if isinstance(value, str) else repr(value)
    return text if len(text) <= 120 else f"{text[:117]}..."


def _read_object(data: bytes) -> dict[str, Any]:
    try:
        fields = json.loads(data.decode("utf-8"))
    except UnicodeDecodeError:
        raise AdapterError(f"{CONFIG_NAME} is not UTF-8 text") from None
    except (ValueError, RecursionError):
        raise AdapterError(f"{CONFIG_NAME} is not valid JSON") from None
    if not isinstance(fields, dict):
        raise AdapterError(f"{CONFIG_NAME} must hold a JSON object")
    return fields


def _refuse_other_kinds(fields: Mapping[str, Any]) -> None:
    """Every field with a value must be one that is understood: another may change the maths."""
    peft_type = fields.get("peft_type")
    if peft_type is None:
        raise AdapterError(f"{CONFIG_NAME}: peft_type is missing")
    if peft_type != "LORA":
        raise _bad("peft_type", peft_type, "'LORA'")
    if fields.get("bias") not in (None, "none", "all", "lora_only"):
        raise _bad("bias", fields["bias"], "'none', 'all' or 'lora_only'")
    _check_init(fields.get("init_lora_weights"))
    for name, value in fields.items():
        if value and name not in _IGNORED | _READ:
            what = f" ({_NOT_SUPPORTED[name]})" if name in _NOT_SUPPORTED else ""
            raise AdapterError(f"{CONFIG_NAME}: {shorten(name)} is not supported{what}")


def _check_init(init: object) -> None:
    if init is None or isinstance(init, bool) or init in _HARMLESS_INIT:
        return
    text = str(init)
    if text.startswith("pissa") or text in ("olora", "corda", "lora_ga"):
        raise AdapterError(
            f"{CONFIG_NAME}: init_lora_weights {shorten(init)} has taken a part out of the base "
            "weights, which the adapter is no good without; save it as plain LoRA, by PEFT's "
            "save_pretrained(…, path_initial_model_for_weight_conversion=…)"
        )
    if text == "loftq":
        raise AdapterError(
            f"{CONFIG_NAME}: init_lora_weights 'loftq' needs the base weights as LoftQ quantized "
            "them, which are not served"
        )
    raise _bad("init_lora_weights", init, "a way to start that PEFT has")


def _flag(name: str, fields: Mapping[str, Any]) -> bool:
    value = fields.get(name)
    if value and not isinstance(value, bool):
        raise _bad(name, value, "true or false")
    return bool(value)


def _invocation(fields: Mapping[str, Any]) -> tuple[int, ...]:
    """Of an aLoRA (arXiv:2504.12397). As in PEFT, an empty list makes a plain LoRA of it, and it
    does not go with DoRA; biases and saved modules, which PEFT would apply before the invocation
    too, are refused."""
    name = "alora_invocation_tokens"
    tokens = fields.get(name) or ()
    if not isinstance(tokens, list | tuple) or any(
        isinstance(token, bool) or not isinstance(token, int) or token < 0 for token in tokens
    ):
        raise _bad(name, tokens, "a list of token ids")
    if tokens:
        for other in ("use_dora", "modules_to_save", "trainable_token_indices"):
            if fields.get(other):
                raise AdapterError(f"{CONFIG_NAME}: {other} does not go with {name}")
        if fields.get("bias") not in (None, "none"):
            raise AdapterError(f"{CONFIG_NAME}: bias {fields['bias']!r} does not go with {name}")
    return tuple(tokens)


def _rank(name: str, value: object) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise _bad(name, value, "a positive integer")
    return value


def _modules_to_save(value: object) -> frozenset[str]:
    names = value or []
    if not (isinstance(names, list) and all(isinstance(name, str) for name in names)):
        raise _bad("modules_to_save", value, "a list of names")
    return frozenset(_replaceable("modules_to_save", name) for name in names)


def _token_indices(value: object) -> dict[str, tuple[int, ...]]:
    """By module; a plain list is the embedding's, as in PEFT."""
    by_module = value if isinstance(value, dict) else {"embed_tokens": value} if value else {}
    found = {}
    for name, indices in by_module.items():
        if not (
            isinstance(indices, list)
            and all(type(index) is int and 0 <= index < 2**31 for index in indices)
            and len(set(indices)) == len(indices) > 0
        ):
            raise _bad("trainable_token_indices", value, "lists of different token ids")
        found[_replaceable("trainable_token_indices", name)] = tuple(indices)
    return found


def _replaceable(field_name: str, module: str) -> str:
    name = module.rpartition(".")[2]
    if name not in REPLACEABLE:
        raise AdapterError(
            f"{CONFIG_NAME}: {field_name} {shorten(module)} is not supported: "
            f"only {' and '.join(REPLACEABLE)} can be replaced"
        )
    return name


def _alpha(name: str, value: object) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise _bad(name, value, "a number")
    try:
        alpha = float(value)
    except OverflowError:
        alpha = math.inf
    if not math.isfinite(alpha):
        raise _bad(name, value, "a finite number")
    return alpha


def _pattern(
    name: str, fields: Mapping[str, Any], check: Callable[[str, object], _Number]
) -> tuple[tuple[re.Pattern[str], _Number], ...]:
    pattern = fields.get(name) or {}
    if not isinstance(pattern, dict):
        raise _bad(name, pattern, "an object")
    if len(pattern) > _MAX_PATTERN_KEYS:
        raise AdapterError(f"{CONFIG_NAME}: {name} has more than {_MAX_PATTERN_KEYS} keys")
    return tuple(
        (_regex(name, key), check(f"{name} {shorten(key)}", value))
        for key, value in pattern.items()
    )


def _regex(name: str, key: str) -> re.Pattern[str]:
    """PEFT's rule (`get_pattern_key`): the key matches from a dot, or the start, to the end.

    A key that could match for minutes is refused, since no other thread runs meanwhile. Only
    repeated groups backtrack without end; else it is the parts that can match in several ways.
    """
    parts = sum(key.replace("(?:", "(").count(part) for part in "*+?{(")
    if len(key) > _MAX_KEY_LENGTH or parts > _MAX_KEY_PARTS or re.search(r"\)[*+{]", key):
        raise AdapterError(f"{CONFIG_NAME}: {name} {shorten(key)} is too complex a pattern")
    try:
        return re.compile(rf"(.*\.)?({key})$")
    except (re.error, OverflowError, RecursionError):
        raise AdapterError(f"{CONFIG_NAME}: {name} {shorten(key)} is no valid pattern") from None


def _lookup(
    pattern: tuple[tuple[re.Pattern[str], _Number], ...],
    path: str,
    default: _Number,
    deadline: float,
) -> _Number:
    for regex, value in pattern:
        if regex.match(path):
            return value
        if time.monotonic() > deadline:
            raise AdapterError(f"{CONFIG_NAME}: its patterns take too long to match")
    return default


def _bad(name: str, value: object, wanted: str) -> AdapterError:
    return AdapterError(f"{CONFIG_NAME}: {name} must be {wanted}, not {shorten(value)}")
