"""Chat templates: rendered in a sandbox, in a process of their own with a limit on time and memory.

A template is code of whoever made the model or the adapter: it may loop for ever, or inside one
call that no thread can interrupt. `TemplateRenderer` therefore talks to a child process
(`python -m lorakeet.server.templates`) that the kernel ends when a rendering takes too long.
"""

import asyncio
import contextlib
import functools
import gc
import json
import resource
import signal
import struct
import sys
from datetime import datetime
from typing import Any
from weakref import WeakValueDictionary

import jinja2
import jinja2.ext
import orjson
from jinja2.sandbox import ImmutableSandboxedEnvironment

CPU_SECONDS = 3.0  # of one rendering
WALL_SECONDS = 30.0
MEMORY_BYTES = 2**30


class TemplateError(Exception):
    """The template refused the messages, failed, or took too long; the message says why."""


class _Generation(jinja2.ext.Extension):
    """`{% generation %}`: marks an assistant's words for training; here it only shows its body."""

    tags = {"generation"}  # noqa: RUF012 (jinja's own declaration)

    def parse(self, parser: jinja2.parser.Parser) -> list[jinja2.nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _raise_exception(message: str) -> None:
    raise jinja2.TemplateError(message)


def _to_json(value: Any, ensure_ascii: bool = False, **options: Any) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, **options)


@functools.lru_cache(maxsize=128)
def _compile(template: str) -> jinja2.Template:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, jinja2.ext.loopcontrols]
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
    return environment.from_string(template)


def render(template: str, variables: dict[str, Any], continue_final_message: bool = False) -> str:
    """The prompt's text: the environment is that of transformers' `apply_chat_template`.

    With `continue_final_message` it ends where the last message's content ends. Raises
    TemplateError.
    """
    try:
        text = _render(template, variables)
    except Exception as error:  # whatever a template can raise is the template's fault
        reason = str(error) or type(error).__name__  # a MemoryError says nothing
        raise TemplateError(f"the chat template failed: {reason}") from None
    return (
        _cut_after(text, variables["messages"][-1]["content"]) if continue_final_message else text
    )


def _render(template: str, variables: dict[str, Any]) -> str:
    with contextlib.suppress(MemoryError):
        return _compile(template).render(variables)
    _compile.cache_clear()  # perhaps the others that are kept took the room
    gc.collect()  # they are cycles
    return _compile(template).render(variables)


def _cut_after(text: str, final: str) -> str:
    at = text.rfind(final.strip())
    if at < 0 or not final.strip():
        raise TemplateError("the chat template does not show the last message: cannot continue it")
    whole = final.lstrip()  # templates often strip the content: keep its end if they did not
    return text[: at + len(whole if text.startswith(whole, at) else final.strip())]


class TemplateRenderer:
    """Renders in a child process, which is started again after it had to be ended.

    Templates take turns: one that is slow, and much in use, holds every other up only once.
    """

    def __init__(self) -> None:
        self._lock = asyncio.Lock()
        self._turns: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()  # by template
        self._process: asyncio.subprocess.Process | None = None

    async def render(
        self, template: str, variables: dict[str, Any], continue_final_message: bool = False
    ) -> str:
        """As `render`; raises TemplateError also for a template that takes too long."""
        values = [template, variables, continue_final_message]  # integers may be of any size
        request = json.dumps(values, ensure_ascii=False).encode(errors="surrogatepass")
        turn = self._turns.setdefault(template, asyncio.Lock())
        async with turn, self._lock:
            try:
                reply = orjson.loads(await asyncio.wait_for(self._ask(request), WALL_SECONDS))
            except (TimeoutError, asyncio.IncompleteReadError, ConnectionError):
                await self._end()
                raise TemplateError("the chat template takes too long or too much memory") from None
            except BaseException:  # cancelled: the answer would meet the next question
                await self._end()
                raise
        if reply["error"] is not None:
            raise TemplateError(reply["error"])
        text: str = reply["text"]
        return text

    async def _ask(self, request: bytes) -> bytes:
        process = self._process
        if process is None or process.returncode is not None:  # something else may have ended it
            process = await self._start()
        assert process.stdin is not None
        assert process.stdout is not None
        process.stdin.write(struct.pack("<Q", len(request)) + request)
        await process.stdin.drain()
        (size,) = struct.unpack("<Q", await process.stdout.readexactly(8))
        return await process.stdout.readexactly(size)

    async def _start(self) -> asyncio.subprocess.Process:
        self._process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-P", "-m", "lorakeet.server.templates"),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            start_new_session=True,  # Ctrl+C is for the server, which then ends this process
        )
        return self._process

    async def _end(self) -> None:
        process, self._process = self._process, None
        if process is not None:
            with contextlib.suppress(ProcessLookupError):
                process.kill()
            await process.wait()

    async def close(self) -> None:
        async with self._lock:
            await self._end()


def _serve_requests() -> None:
    """The child: one answer to each question, until standard input ends."""
    resource.setrlimit(resource.RLIMIT_DATA, (MEMORY_BYTES, MEMORY_BYTES))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    source, sink = sys.stdin.buffer, sys.stdout.buffer
    while header := source.read(8):
        template, variables, continue_final = json.loads(
            source.read(struct.unpack("<Q", header)[0])
        )
        signal.setitimer(signal.ITIMER_PROF, CPU_SECONDS)  # its signal ends the process
        try:
            answer = {"text": render(template, variables, continue_final), "error": None}
        except TemplateError as error:
            answer = {"text": None, "error": str(error)}
        reply = orjson.dumps(answer)
        signal.setitimer(signal.ITIMER_PROF, 0)
        sink.write(struct.pack("<Q", len(reply)) + reply)
        sink.flush()


if __name__ == "__main__":
    _serve_requests()
