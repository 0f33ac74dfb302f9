"""The modules of a PEFT file → an `Adapter` in canonical form, checked against the model."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass
from functools import partial
from itertools import groupby

import torch
from torch import Tensor

from lorakeet.lora.adapter import Adapter, AdapterError, GroupSpec, GroupWeights
from lorakeet.lora.host_memory import Pages
from lorakeet.lora.peft_tensors import BaseTensor, LoRAModule, PeftTensors, all_finite
from lorakeet.lora.vectors import Vectors

_ALIGNMENT = 128  # bytes; of every tensor in an adapter's block


def check_rank(found: PeftTensors, max_rank: int) -> None:
    """Raise AdapterError that names the largest rank and the limit, if it is over the limit."""
    if found.rank > max_rank:
        raise AdapterError(f"its largest rank is {found.rank}, the limit is {max_rank}")


def check_fit(found: PeftTensors, specs: Sequence[GroupSpec]) -> None:
    """Raise AdapterError unless every module is one of the model's and all sizes are its own."""
    by_name = {name: spec for spec in specs for name in (*spec.slice_names, spec.name)}
    everything: list[LoRAModule | BaseTensor] = [*found.modules, *found.biases, *found.copies]
    for module in everything:
        spec = by_name[module.name]
        if module.layer >= spec.num_layers:
            raise AdapterError(
                f"{module.path}: there is no layer {module.layer}, the model has {spec.num_layers}"
            )
        output_size = len(range(spec.output_size)[_place(spec, module.name)[1]])
        for part, tensor, wanted in _sizes(module, spec.input_size, output_size):
            if tensor is not None and tuple(tensor.shape) != wanted:
                raise AdapterError(
                    f"{module.path}: the shape of {part} is {tuple(tensor.shape)}, "
                    f"for this model it must be {wanted}"
                )
    _check_fused(found.modules, specs)
    _check_fused(found.biases, specs)


def _sizes(
    module: LoRAModule | BaseTensor, input_size: int, output_size: int
) -> Iterator[tuple[str, Tensor | None, tuple[int, ...]]]:
    """The tensors of a module, and what their shapes must be."""
    if isinstance(module, LoRAModule):
        rank = module.scaling.rank
        yield "A", module.a, (rank, input_size)
        yield "B", module.b, (output_size, rank)
        yield "the magnitude", module.magnitude, (output_size,)
        yield "the bias of B", module.bias, (output_size,)
    elif module.tensor.ndim == 1:
        yield "the bias", module.tensor, (output_size,)
    else:
        yield "the weight", module.tensor, (output_size, input_size)


def pack(
    found: PeftTensors,
    vectors: Vectors,
    specs: Sequence[GroupSpec],
    dtype: torch.dtype,
    digest: Callable[[], str],
    workers: Executor,
    device: torch.device,
) -> Adapter:
    """Lay the modules, which fit the model, out as `GroupWeights`, all in one block of host memory,
    which is pinned for `device` if that is a GPU.

    Modules and vectors are whole; laid out is what the rank of `specs` holds. Scale and DoRA's
    factor are multiplied into B in float32, before the rounding to `dtype`. `digest` is asked last,
    `workers` share the copying. Raises AdapterError when a value is too large for `dtype`.
    """
    plans = [_Plan(spec, found.modules, vectors) for spec in specs]
    plans = [plan for plan in plans if plan.rank or plan.has_bias]
    shapes = [shape for plan in plans for shape in plan.shapes.values()]
    pages, views = _allocate(shapes, dtype)
    groups, writes, remaining = {}, [], iter(views)
    for plan in plans:
        tensors = {name: next(remaining) for name in plan.shapes}
        weights = GroupWeights(ranks=plan.ranks, **tensors)
        for run in plan.runs:
            a, b = run.places_in(weights, plan.spec)
            writes.append(partial(_write, run, vectors, plan.spec, a, b))
        _write_vectors(vectors, plan, weights)
        groups[plan.spec.name] = weights
    for _ in workers.map(lambda write: write(), writes):
        pass  # the first failure is raised here, what has not begun is left
    if plans and not all_finite(pages.tensor().view(dtype)):
        raise AdapterError(_too_large(plans, groups))
    if plans and device.type == "cuda":
        pages.pin(device)
    changed = {module.name for module in found.modules} | {name for _, name in vectors.biases}
    return Adapter(
        digest=digest(),
        rank=found.rank,
        groups=groups,
        modules=tuple(sorted(changed)),
        num_bytes=pages.num_bytes,
    )


class _Plan:
    """The shapes of one group."""

    def __init__(self, spec: GroupSpec, modules: Sequence[LoRAModule], vectors: Vectors) -> None:
        self.names = {*spec.slice_names, spec.name}
        self.spec = spec
        self.modules = [module for module in modules if module.name in self.names]
        ranks = [0] * spec.num_layers
        for module in self.modules:
            ranks[module.layer] = max(ranks[module.layer], module.scaling.rank)
        self.ranks = tuple(ranks)
        self.rank = max(ranks)
        self.has_bias = any(name in self.names for _, name in vectors.biases)
        layers, vector = sum(map(bool, ranks)), (spec.num_layers, spec.output_size)
        self.shapes: dict[str, tuple[int, ...]] = {
            "a": (layers, len(spec.slice_names), self.rank, spec.input_size),
            "b": (layers, self.rank, spec.output_size),
        }
        if self.has_bias:
            self.shapes["bias"] = vector
        if any(name in self.names for _, name in vectors.factors):
            self.shapes["magnitude"] = vector

    @property
    def runs(self) -> Iterator["_Run"]:
        layers = [layer for layer, rank in enumerate(self.ranks) if rank]
        places = {layer: place for place, layer in enumerate(layers)}
        by_name = enumerate(sorted(self.modules, key=lambda module: module.name))

        def kind(numbered: tuple[int, LoRAModule]) -> tuple[object, ...]:
            number, module = numbered
            distance = places[module.layer] - number  # the same from one layer to the next
            return module.name, module.scaling, module.a.dtype, module.b.dtype, distance

        for _, found in groupby(by_name, kind):
            modules = [module for _, module in found]
            yield _Run(modules, places[modules[0].layer])


@dataclass(frozen=True)
class _Run:
    """Modules of one name, scale and dtypes in layers that lie side by side."""

    modules: Sequence[LoRAModule]
    place: int  # of the first layer

    def places_in(self, weights: GroupWeights, spec: GroupSpec) -> tuple[Tensor, Tensor]:
        """Where they go: A (modules, slices, rank, in), B (modules, rank, out)."""
        layers = slice(self.place, self.place + len(self.modules))
        slices, columns = _place(spec, self.modules[0].name)
        rank = self.modules[0].scaling.rank
        return weights.a[layers, slices, :rank], weights.b[layers, :rank, columns]


def _allocate(shapes: Sequence[tuple[int, ...]], dtype: torch.dtype) -> tuple[Pages, list[Tensor]]:
    """Zeros, and a view of each shape into them."""
    unit = _ALIGNMENT // dtype.itemsize
    sizes = [torch.Size(shape).numel() for shape in shapes]
    padded = [-(-size // unit) * unit for size in sizes]
    pages = Pages(sum(padded) * dtype.itemsize)
    parts = torch.split(pages.tensor().view(dtype), padded)
    return pages, [
        part[:size].view(shape) for part, size, shape in zip(parts, sizes, shapes, strict=True)
    ]


def _write(run: _Run, vectors: Vectors, spec: GroupSpec, a: Tensor, b: Tensor) -> None:
    """Copy the modules to their places. A fused module has one A for all its slices.

    A few operations on many layers: after each, a busy engine may keep this thread waiting.
    """
    modules, first = run.modules, run.modules[0]
    for each in a.unbind(1):
        _stack([_own_inputs(spec, module.a) for module in modules], each)
    if first.b.dtype == b.dtype and not vectors.factors:
        _stack([_own_outputs(spec, module.name, module.b).T for module in modules], b)
        b *= first.scaling.scale  # torch works in float32, and rounds once
    else:
        for module, own in zip(modules, b, strict=True):
            own.copy_(_scaled(module, vectors.factors.get(module.place), spec).T)


def _too_large(plans: Sequence[_Plan], groups: Mapping[str, GroupWeights]) -> str:
    """Names a module with a value that is not finite any more."""
    for plan in plans:
        for run in plan.runs:
            a, b = run.places_in(groups[plan.spec.name], plan.spec)
            for module, *written in zip(run.modules, a, b, strict=True):
                for side, values in zip("AB", written, strict=True):
                    if not all_finite(values):
                        return f"{module.path}: {side}, scaled, is too large for {values.dtype}"
    raise AssertionError


def _stack(parts: list[Tensor], out: Tensor) -> None:
    """As torch.stack, which does not take every pair of dtypes."""
    if parts[0].dtype == out.dtype:
        torch.stack(parts, out=out)
    else:
        for part, own in zip(parts, out, strict=True):
            own.copy_(part)


def _scaled(module: LoRAModule, factor: Tensor | None, spec: GroupSpec) -> Tensor:
    """B (out, rank) in float32, with its scale."""
    scaled = _own_outputs(spec, module.name, module.b).float() * module.scaling.scale
    if factor is not None:
        scaled *= _own_outputs(spec, module.name, factor)[:, None]
    return scaled


def _write_vectors(vectors: Vectors, plan: _Plan, weights: GroupWeights) -> None:
    """A bias of a fused module is added to those of its parts."""
    for (layer, name), factor in vectors.factors.items():
        if name in plan.names and weights.magnitude is not None:
            own = _own_outputs(plan.spec, name, factor - 1)
            weights.magnitude[layer, _place(plan.spec, name)[1]] = own
    for (layer, name), bias in vectors.biases.items():
        if name in plan.names and weights.bias is not None and plan.spec.adds_bias:
            own = _own_outputs(plan.spec, name, bias)
            weights.bias[layer, _place(plan.spec, name)[1]] += own
    for part, values in (("magnitude", weights.magnitude), ("bias", weights.bias)):
        if values is not None and not all_finite(values):
            raise AdapterError(f"{plan.spec.name}: a {part} is too large for {values.dtype}")


def _place(spec: GroupSpec, name: str) -> tuple[slice, slice]:
    """The slices of a module, and its columns in B."""
    if name == spec.name:
        return slice(None), slice(None)
    index = spec.slice_names.index(name)
    start = sum(spec.slice_sizes[:index])
    return slice(index, index + 1), slice(start, start + spec.slice_sizes[index])


def _own_inputs(spec: GroupSpec, a: Tensor) -> Tensor:
    """The rank's part of A (rank, inputs of the module)."""
    return a if spec.input_cut is None else a[:, spec.input_cut.places]


def _own_outputs(spec: GroupSpec, name: str, values: Tensor) -> Tensor:
    """The rank's part of (outputs of the module, …); a fused module is cut slice by slice."""
    if spec.output_cuts is None:
        return values
    cuts = spec.output_cuts
    if name != spec.name:
        cuts = (cuts[spec.slice_names.index(name)],)
    parts = torch.split(values, [cut.whole for cut in cuts])
    return torch.cat([cut.take(part) for cut, part in zip(cuts, parts, strict=True)])


def _check_fused(
    modules: Sequence[LoRAModule] | Sequence[BaseTensor], specs: Sequence[GroupSpec]
) -> None:
    present = {(module.layer, module.name) for module in modules}
    for spec in specs:
        for layer in range(spec.num_layers):
            for name in spec.slice_names:
                if name != spec.name and {(layer, name), (layer, spec.name)} <= present:
                    raise AdapterError(f"layer {layer} has both {spec.name} and {name}")
