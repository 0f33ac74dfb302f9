"""Triton's interpreter in half of its time: without work that has no effect.

It changes what is private to Triton (3.6 to 3.9); a Triton that has none of it is left as it is.
As a command: runs a script with its arguments, in such an interpreter.
"""

import runpy
import sys
from dataclasses import replace
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any

import triton.language as tl
from triton.runtime import interpreter
from triton.runtime.interpreter import InterpretedFunction

from lorakeet.kernels import lora_linear


def quicken() -> None:
    """Results stay the same, but for the order of a shrink's sums."""
    vars(lora_linear)["_SHRINK_PROGRAMS"] = 10  # most of them would have no work
    if not _is_known():
        return
    builder = interpreter.interpreter_builder
    if not builder.options.debug:  # else sums are checked for overflow, and nobody is told
        builder.options = replace(builder.options, sanitize_overflow=False)
    vars(interpreter)["_get_np_dtype"] = _np_dtype
    InterpretedFunction.__call__ = _call


def _is_known() -> bool:
    names = ("interpreter_builder", "_get_np_dtype", "_patch_lang")
    return all(hasattr(interpreter, name) for name in names) and hasattr(
        InterpretedFunction, "rewrite"
    )


_find_np_dtype = cache(getattr(interpreter, "_get_np_dtype", type))


def _np_dtype(dtype: Any) -> Any:
    """Its own makes a table of all dtypes at each call."""
    scalar = dtype.element_ty if isinstance(dtype, tl.block_type) else dtype
    return _find_np_dtype(tl.uint64 if isinstance(scalar, tl.pointer_type) else scalar)


def _call(function: InterpretedFunction, *args: Any, **kwargs: Any) -> Any:
    """A kernel's call of another function. Its own looks through all of `tl` for what to replace,
    which the kernel's launch has done."""
    if any(tl.core.is_builtin(module.load) for module in _language_of(function.fn)):
        interpreter._patch_lang(function.fn)
    return function.rewrite()(*args, **kwargs)


@cache
def _language_of(fn: Any) -> list[ModuleType]:
    return [each for each in fn.__globals__.values() if each is tl or each is tl.core]


if __name__ == "__main__":
    quicken()
    del sys.argv[0]
    sys.path[0] = str(Path(sys.argv[0]).parent)
    runpy.run_path(sys.argv[0], run_name="__main__")
