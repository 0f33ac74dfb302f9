"""Versions: one load of one folder under one name, and how its requests are read and written."""

import asyncio
import itertools
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from lorakeet.lora.adapter import AdapterError, AdapterNotFoundError
from lorakeet.lora.read_faults import ending_only_this_read
from lorakeet.server.adapter_state import Registration
from lorakeet.server.adapter_tokenizers import AdapterTokenizers
from lorakeet.server.catalog import Unloaded
from lorakeet.server.contents import Contents, Use
from lorakeet.server.engine.messages import AdapterLoaded
from lorakeet.server.errors import BadRequestError, NotFoundError
from lorakeet.server.files import in_thread
from lorakeet.server.metrics import Metrics
from lorakeet.server.profiles import AdapterProfile, Profile, read_profile
from lorakeet.server.text_config import TextConfigError

T = TypeVar("T")

_PROFILE_CHANGED = (
    "its chat template, tokenizer, special tokens or generation config have changed since it was "
    "loaded: load it again, with load_inplace"
)


@dataclass(frozen=True)
class Version:
    number: int  # never used again
    name: str
    path: Path
    pinned: bool
    loaded: AdapterLoaded
    profile: AdapterProfile  # already laid over the base model's
    profile_digest: str  # of the folder's own
    created: int  # Unix time
    is_registered: bool  # by a client: it outlives the server if there is a state-dir

    @property
    def registration(self) -> Registration:
        return Registration(str(self.path), self.loaded.digest, self.pinned, self.profile_digest)

    @property
    def adapter_id(self) -> int:
        """What the engine calls it; versions of equal content have the same."""
        return self.loaded.adapter_id

    def is_same(self, other: "Version") -> bool:
        """No request could tell them apart."""
        return self.loaded.digest == other.loaded.digest and self.profile == other.profile

    def is_as(self, known: Unloaded) -> bool:
        """It is what was registered, as far as that is known."""
        return self.loaded.digest == known.digest and known.profile in (None, self.profile_digest)


class VersionReader:
    """Made once the model is loaded."""

    def __init__(
        self, contents: Contents, metrics: Metrics, base: Profile, tokenizers: AdapterTokenizers
    ) -> None:
        self._contents = contents
        self._metrics = metrics
        self._base = base
        self._tokenizers = tokenizers
        self._numbers = itertools.count(1)
        # One at a time: a tokenizer may take a second and hundreds of megabytes. Who waits for its
        # turn must not hold a thread, which all share.
        self._turn = asyncio.Lock()

    async def read(
        self,
        name: str,
        wanted: Unloaded,
        *,
        param: str = "model",
        register: bool = False,
    ) -> Version:
        """Read the folder into the engine; the version uses its content from now on.

        `wanted`: where it lies, and what must be there. Raises NotFoundError and BadRequestError.
        """
        number = next(self._numbers)
        use = Use(wanted.path, wanted.pinned)
        try:
            own = await self._in_turn(read_profile, wanted.path, self._tokenizers)
            if wanted.profile not in (None, own.digest) and await in_thread(wanted.path.is_dir):
                raise TextConfigError(_PROFILE_CHANGED)  # else the engine says that it is missing
            loaded = await self._contents.acquire(number, use, wanted.digest)
        except (AdapterError, TextConfigError) as error:
            message = f"The adapter {name!r} cannot be loaded: {error}"
            if isinstance(error, AdapterNotFoundError):
                raise NotFoundError(message, param=param, code="adapter_not_found") from None
            raise BadRequestError(message, param=param, code="invalid_adapter") from None
        self._metrics.adapter_loaded(name, loaded.seconds)
        return Version(
            number,
            name,
            wanted.path,
            wanted.pinned,
            loaded,
            own.over(self._base, loaded.vocab_size),
            own.digest,
            int(time.time()),
            is_registered=register or wanted.digest is not None,
        )

    async def profile(self, version: Version) -> Profile:
        """With its tokenizer. Raises BadRequestError when that was put out of memory, and cannot be
        read again from the folder."""
        digest, tokenizers = version.profile.tokenizer_digest, self._tokenizers
        tokenizer = tokenizers.at_hand(digest)
        if tokenizer is None:
            try:
                tokenizer = await self._in_turn(tokenizers.load_again, version.path, digest)
            except (AdapterError, TextConfigError) as error:
                message = f"The adapter {version.name!r} cannot be used: {error}"
                raise BadRequestError(message, param="model", code="invalid_adapter") from None
        return version.profile.using(tokenizer)

    async def _in_turn(self, function: Callable[..., T], path: Path, *args: object) -> T:
        """What `function` reads of the folder. Raises AdapterError and TextConfigError, whatever is
        wrong: no other error."""
        async with self._turn:
            with ending_only_this_read(path, TextConfigError):
                return await in_thread(function, path, *args)
