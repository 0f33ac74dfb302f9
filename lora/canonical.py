"""The modules of a PEFT file → an `Adapter` in canonical form, checked against the model."""

from collections.abc import Sequence

import torch
from torch import Tensor

from lorakeet.lora.adapter import Adapter, AdapterError, GroupSpec, GroupWeights
from lorakeet.lora.peft_tensors import LoRAModule, PeftTensors, all_finite

_ALIGNMENT = 128  # bytes; of every tensor in an adapter's block


def check_rank(found: PeftTensors, max_rank: int) -> None:
    """Raise AdapterError that names the largest rank and the limit, if it is over the limit."""
    if found.rank > max_rank:
        raise AdapterError(f"its largest rank is {found.rank}, the limit is {max_rank}")


def check_fit(found: PeftTensors, specs: Sequence[GroupSpec]) -> None:
    """Raise AdapterError unless every module is one of the model's and all sizes are its own."""
    by_name = {name: spec for spec in specs for name in (*spec.slice_names, spec.name)}
    for module in found.modules:
        spec = by_name[module.name]
        if module.layer >= spec.num_layers:
            raise AdapterError(
                f"{module.path}: there is no layer {module.layer}, the model has {spec.num_layers}"
            )
        rank = module.scaling.rank
        output_size = len(range(spec.output_size)[_place(spec, module.name)[1]])
        for side, tensor, wanted in (
            ("A", module.a, (rank, spec.input_size)),
            ("B", module.b, (output_size, rank)),
        ):
            if tuple(tensor.shape) != wanted:
                raise AdapterError(
                    f"{module.path}: the shape of {side} is {tuple(tensor.shape)}, "
                    f"for this model it must be {wanted}"
                )
    _check_fused(found.modules, specs)


def pack(
    found: PeftTensors, specs: Sequence[GroupSpec], dtype: torch.dtype, *, pin_memory: bool = False
) -> Adapter:
    """Lay the modules, which fit the model, out as `GroupWeights`, all in one block of host memory.

    The scale is multiplied into B in float32, before the rounding to `dtype`. Raises AdapterError
    when a value is too large for `dtype`.
    """
    plans = [_Plan(spec, found.modules) for spec in specs]
    plans = [plan for plan in plans if plan.rank]
    shapes = [shape for plan in plans for shape in (plan.a_shape, plan.b_shape)]
    block, views = _allocate(shapes, dtype, pin_memory)
    groups = {}
    for plan, a, b in zip(plans, views[::2], views[1::2], strict=True):
        for module in plan.modules:
            _write(module, plan.spec, a[module.layer], b[module.layer])
        groups[plan.spec.name] = GroupWeights(a, b, plan.ranks)
    return Adapter(
        digest=found.digest,
        rank=found.rank,
        groups=groups,
        modules=tuple(sorted({module.name for module in found.modules})),
        num_bytes=block.nbytes,
    )


class _Plan:
    """The shapes of one group."""

    def __init__(self, spec: GroupSpec, modules: Sequence[LoRAModule]) -> None:
        names = {*spec.slice_names, spec.name}
        self.spec = spec
        self.modules = [module for module in modules if module.name in names]
        ranks = [0] * spec.num_layers
        for module in self.modules:
            ranks[module.layer] = max(ranks[module.layer], module.scaling.rank)
        self.ranks = tuple(ranks)
        self.rank = max(ranks)
        self.a_shape = (spec.num_layers, len(spec.slice_names), self.rank, spec.input_size)
        self.b_shape = (spec.num_layers, self.rank, spec.output_size)


def _allocate(
    shapes: Sequence[tuple[int, ...]], dtype: torch.dtype, pin_memory: bool
) -> tuple[Tensor, list[Tensor]]:
    """One block of zeros, and a view of each shape into it."""
    unit = _ALIGNMENT // dtype.itemsize
    sizes = [torch.Size(shape).numel() for shape in shapes]
    padded = [-(-size // unit) * unit for size in sizes]
    block = torch.zeros(sum(padded), dtype=dtype, pin_memory=pin_memory)
    parts = torch.split(block, padded)
    return block, [
        part[:size].view(shape) for part, size, shape in zip(parts, sizes, shapes, strict=True)
    ]


def _write(module: LoRAModule, spec: GroupSpec, a: Tensor, b: Tensor) -> None:
    """Copy one module into its layer: a (slices, rank, in), b (rank, output_size).

    A fused module has one A for all its slices.
    """
    rank = module.scaling.rank
    slices, columns = _place(spec, module.name)
    a[slices, :rank] = module.a
    b[:rank, columns] = module.b.T.float() * module.scaling.scale
    for side, written in (("A", a[slices, :rank]), ("B", b[:rank, columns])):
        if not all_finite(written):
            raise AdapterError(f"{module.path}: {side}, scaled, is too large for {a.dtype}")


def _place(spec: GroupSpec, name: str) -> tuple[slice, slice]:
    """The slices of a module, and its columns in B."""
    if name == spec.name:
        return slice(None), slice(None)
    index = spec.slice_names.index(name)
    start = sum(spec.slice_sizes[:index])
    return slice(index, index + 1), slice(start, start + spec.slice_sizes[index])


def _check_fused(modules: Sequence[LoRAModule], specs: Sequence[GroupSpec]) -> None:
    present = {(module.layer, module.name) for module in modules}
    for spec in specs:
        for layer in range(spec.num_layers):
            for name in spec.slice_names:
                if name != spec.name and {(layer, name), (layer, spec.name)} <= present:
                    raise AdapterError(f"layer {layer} has both {spec.name} and {name}")
