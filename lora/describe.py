"""What an adapter folder holds, for people: `lorakeet adapters check`."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from lorakeet.lora.adapter import GroupSpec
from lorakeet.lora.canonical import check_fit, check_rank
from lorakeet.lora.peft_config import Scaling
from lorakeet.lora.peft_files import check_not_empty, max_weights_bytes, read_files
from lorakeet.lora.peft_tensors import LoRAModule, check_finite, parse_tensors
from lorakeet.lora.peft_vocabulary import fit_modules, split_vocabulary


@dataclass(frozen=True)
class ModuleSummary:
    """Modules of one name that are of one kind and have the same scaling, in several layers."""

    name: str
    layers: tuple[int, ...]
    scaling: Scaling
    kind: str  # what it is beside A and B: "DoRA", "bias of B" or nothing

    def __str__(self) -> str:
        scaling = self.scaling
        kind = f", {self.kind}" if self.kind else ""
        return (
            f"{self.name:<12} rank {scaling.rank}, alpha {scaling.alpha:g}, "
            f"scale {scaling.scale:g}{kind}, layers {_ranges(self.layers)}"
        )


@dataclass(frozen=True)
class Description:
    digest: str
    rank: int  # the largest
    modules: tuple[ModuleSummary, ...]
    dtypes: tuple[str, ...]
    num_parameters: int
    num_bytes: int  # of the LoRA tensors, in the file
    base_model: str | None  # that the config names
    own_rows: dict[str, int]  # by module: whole rows in the file, in place of the base model's
    biases: tuple[str, ...]  # modules whose bias is in place of the base model's
    copies: tuple[str, ...]  # modules whose base weights are in the file: must be the model's

    def lines(self) -> Iterator[str]:
        """The description as text."""
        yield f"base model   {self.base_model or 'not named'}"
        yield f"rank         {self.rank}"
        yield f"tensors      {', '.join(self.dtypes)}; {self.num_parameters:,} parameters"
        yield f"size         {self.num_bytes:,} bytes"
        yield f"digest       {self.digest}"
        yield from map(str, self.modules)
        if self.biases:
            yield f"biases       in place of the model's: {', '.join(self.biases)}"
        if self.copies:
            yield f"copies       must equal the model's weights: {', '.join(self.copies)}"
        for name, count in self.own_rows.items():
            yield f"{name:<12} {count:,} rows in place of the model's (none where they are equal)"


def describe(folder: Path, specs: Sequence[GroupSpec], *, max_rank: int) -> Description:
    """Read an adapter folder and check it as `read_adapter` does, but for what needs the model's
    weights: which of its own rows differ, and whether all fits the model's dtype.

    Raises AdapterNotFoundError and AdapterError.
    """
    config, tensors = read_files(folder, max_weights_bytes(specs, max_rank))
    own, others = split_vocabulary(config, tensors)
    found = parse_tensors(config, others)
    check_not_empty(found, own)
    check_finite(tensors)
    check_rank(found, max_rank)
    found = replace(found, modules=fit_modules(found.modules, own, specs))
    check_fit(found, specs)
    trained = [tensor for module in found.modules for tensor in module.tensors.values()]
    trained += [bias.tensor for bias in found.biases]
    layers: dict[tuple[str, Scaling, str], list[int]] = {}
    for module in found.modules:
        layers.setdefault((module.name, module.scaling, _kind(module)), []).append(module.layer)
    return Description(
        digest=found.digest(),
        rank=found.rank,
        modules=tuple(
            ModuleSummary(name, tuple(numbers), scaling, kind)
            for (name, scaling, kind), numbers in layers.items()
        ),
        dtypes=tuple(sorted({str(tensor.dtype).removeprefix("torch.") for tensor in trained})),
        num_parameters=sum(tensor.numel() for tensor in trained),
        num_bytes=sum(tensor.nbytes for tensor in trained),
        base_model=config.base_model_name_or_path,
        own_rows=own.num_rows,
        biases=tuple(sorted({bias.name for bias in found.biases})),
        copies=tuple(sorted({copy.name for copy in found.copies})),
    )


def _kind(module: LoRAModule) -> str:
    if module.magnitude is not None:
        return "DoRA"
    return "" if module.bias is None else "bias of B"


def _ranges(numbers: Sequence[int]) -> str:
    """`(0, 1, 2, 5)` as "0-2, 5"; the numbers are sorted."""
    ranges: list[list[int]] = []
    for number in numbers:
        if ranges and ranges[-1][1] == number - 1:
            ranges[-1][1] = number
        else:
            ranges.append([number, number])
    return ", ".join(f"{first}-{last}" if last > first else f"{first}" for first, last in ranges)
