"""The adapters that one request names: one, or several with weights, held while it runs.

A blend's delta is the weighted sum of its adapters' deltas: W x + Σ_i w_i s_i B_i (A_i x), with
their biases. PEFT's `add_weighted_adapter` has it as `combination_type="cat"` (but forgets biases,
and is off by a factor when the first adapter has rsLoRA). Its "linear" is another thing: it adds
up the A and the B apart, so that the product has cross terms of every pair, and wants equal ranks.
Text (template, tokens that end, defaults) is the base model's, since it cannot be mixed.
"""

from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass

from lorakeet.server.api.schemas import AdapterWeight, GenerationRequest
from lorakeet.server.engine.messages import EngineInfo
from lorakeet.server.errors import BadRequestError, ModelNotFoundError
from lorakeet.server.registry import Registry
from lorakeet.server.versions import Version

Blend = tuple[tuple[int, float], ...]  # as in AddRequest


@dataclass(frozen=True)
class Selection:
    """What a request asks for, by name; nothing is held yet."""

    adapter: str | None = None  # the one adapter
    blend: tuple[tuple[str | None, float], ...] = ()  # or several; a name may be there twice

    @property
    def label(self) -> str | None:
        """For metrics, which count it among the others, logs and headers; None: the base model."""
        return "(blend)" if self.blend else self.adapter


@dataclass(frozen=True)
class _Part:
    index: int  # in the request's `adapters`
    version: Version
    weight: float


@dataclass(frozen=True)
class Leased:
    """The versions that a request runs on."""

    version: Version | None = None  # the one adapter; None: the base model, or a blend
    blend: Blend = ()


async def select(registry: Registry, body: GenerationRequest) -> Selection:
    """Raises ModelNotFoundError, and BadRequestError when adapters are named in two ways."""
    if body.adapters is None:
        return Selection(await registry.resolve(body.model, body.adapter, body.user))
    if body.adapter is not None:
        message = "Send either adapter or adapters"
        raise BadRequestError(message, param="adapters", code="adapter_conflict")
    if (named := await registry.resolve(body.model)) is not None:
        message = f"model names the adapter {named!r}, adapters names others"
        raise BadRequestError(message, param="adapters", code="adapter_conflict")
    parts = enumerate(body.adapters)
    names = [await _resolve(registry, index, part, body.user) for index, part in parts]
    weights = [part.weight for part in body.adapters]
    if len(names) == 1 and weights == [1]:
        return Selection(names[0])
    return Selection(blend=tuple(zip(names, weights, strict=True)))


@asynccontextmanager
async def lease(
    registry: Registry, info: EngineInfo, selection: Selection
) -> AsyncIterator[Leased]:
    """Hold the versions of all adapters, loaded if need be.

    Raises ModelNotFoundError, and BadRequestError for an adapter that cannot be loaded or blended.
    """
    async with AsyncExitStack() as stack:
        if not selection.blend:
            yield Leased(await stack.enter_async_context(registry.lease(selection.adapter)))
            return
        parts = []
        for index, (name, weight) in enumerate(selection.blend):
            if name is not None:  # the base model adds nothing
                version = await _lease_part(stack, registry, index, name)
                parts.append(_Part(index, version, weight))
        yield _combine(parts, info)


async def _resolve(
    registry: Registry, index: int, part: AdapterWeight, user: str | None
) -> str | None:
    """None: an alias that stands for the base model, at least for this request."""
    try:
        return await registry.resolve(registry.base_name, part.name, user)
    except ModelNotFoundError:
        raise ModelNotFoundError(part.name, param=_param(index)) from None


async def _lease_part(stack: AsyncExitStack, registry: Registry, index: int, name: str) -> Version:
    try:
        version = await stack.enter_async_context(registry.lease(name))
    except ModelNotFoundError:
        raise ModelNotFoundError(name, param=_param(index)) from None
    except BadRequestError as error:
        raise BadRequestError(error.message, param=_param(index), code=error.code) from None
    assert version is not None
    return version


def _combine(parts: Sequence[_Part], info: EngineInfo) -> Leased:
    """Weights of the same adapter add up, those of zero are left out."""
    totals: dict[int, float] = {}
    by_id = {part.version.adapter_id: part.version for part in reversed(parts)}
    for part in parts:
        id_ = part.version.adapter_id
        totals[id_] = totals.get(id_, 0.0) + part.weight
    blend = tuple(sorted((id_, weight) for id_, weight in totals.items() if weight))
    if not blend:
        return Leased()
    if len(blend) == 1 and blend[0][1] == 1:
        return Leased(by_id[blend[0][0]])
    for part in parts:
        if totals[part.version.adapter_id] and not part.version.loaded.blendable:
            message = (
                f"The adapter {part.version.name!r} cannot be blended: its effect is no sum of "
                "rows (DoRA, embeddings or tokens of its own, or an aLoRA)"
            )
            raise BadRequestError(message, param=_param(part.index), code="not_blendable")
    num_rows = sum(by_id[id_].loaded.num_rows for id_, _ in blend)
    if num_rows > info.max_blend_rows:
        message = (
            f"The ranks of these adapters add up to {num_rows}; "
            f"at most {info.max_blend_rows} are possible in one request"
        )
        raise BadRequestError(message, param="adapters", code="blend_too_large")
    return Leased(blend=blend)


def _param(index: int) -> str:
    return f"adapters[{index}].name"
