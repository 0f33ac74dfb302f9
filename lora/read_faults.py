"""What any fault becomes while files of an adapter are read."""

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from lorakeet.lora.adapter import AdapterError

_log = logging.getLogger(__name__)


@contextmanager
def ending_only_this_read(path: Path, *expected: type[Exception]) -> Iterator[None]:
    """Whatever is wrong while the folder at `path` is read ends this read and nothing else.

    AdapterErrors and `expected` ones say what it is, and stay. Any other, such as a MemoryError,
    is logged, and raises AdapterError.
    """
    try:
        yield
    except Exception as error:
        if isinstance(error, (AdapterError, *expected)):
            raise
        _log.exception("the adapter at %s could not be read", path)
        raise AdapterError(f"the adapter could not be read: {type(error).__name__}") from error
