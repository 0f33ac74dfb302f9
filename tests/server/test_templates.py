"""Chat templates: transformers as oracle; what hostile ones can do."""

import asyncio
import json
import os
from pathlib import Path

import pytest
from transformers import PreTrainedTokenizerFast

from lorakeet.server.templates import TemplateError, TemplateRenderer, render
from lorakeet.server.text_config import MAX_EOS, MAX_TEXT, TextConfigError, read_text_config

MESSAGES = [
    {"role": "system", "content": "Be <brief> & 'kind'."},
    {"role": "user", "content": " Hi é\n"},
    {"role": "assistant", "content": "Well, "},
]
TEMPLATES = [
    "{{ bos_token }}{% for m in messages %}[{{ m['role'] }}] {{ m['content'] }}\n{% endfor %}",
    """{%- for m in messages %}
    {%- if loop.first and m.role != 'system' %}{{ raise_exception('no system') }}{% endif %}
        {{- m.role + ': ' + m.content | trim + '\\n' }}
    {%- if loop.last %}{% break %}{% endif %}
{%- endfor %}
{% if add_generation_prompt %}assistant: {% endif %}""",
    "{% for m in messages %}{{ m | tojson }}{% if m.role == 'assistant' %}"
    "{% generation %}{{ m.content }}{% endgeneration %}{% endif %}{% endfor %}",
    "{% set ns = namespace(n=0) %}{% for m in messages %}{% set ns.n = ns.n + 1 %}{% endfor %}"
    "{{ ns.n }}{{ tools is none }}{{ strftime_now('%Y') | length }}{{ eos_token }}",
]


@pytest.mark.parametrize("template", TEMPLATES)
@pytest.mark.parametrize("generation_prompt", [True, False])
def test_as_transformers(toy_model: Path, template: str, generation_prompt: bool) -> None:
    tokenizer = PreTrainedTokenizerFast.from_pretrained(toy_model)
    expected = tokenizer.apply_chat_template(
        MESSAGES, chat_template=template, add_generation_prompt=generation_prompt, tokenize=False
    )
    variables = {
        **read_text_config(toy_model).special_tokens,
        "messages": MESSAGES,
        "tools": None,
        "documents": None,
        "add_generation_prompt": generation_prompt,
    }
    assert render(template, variables) == expected


@pytest.mark.parametrize(
    ("template", "expected"),
    [
        ("{% for m in messages %}<{{ m.content }}>{% endfor %}", "<a>< bc "),
        ("{% for m in messages %}<{{ m.content | trim }}>{% endfor %}", "<a><bc"),
    ],
)
def test_continue_final_message(template: str, expected: str) -> None:
    messages = [{"role": "user", "content": "a"}, {"role": "assistant", "content": " bc "}]
    assert render(template, {"messages": messages}, continue_final_message=True) == expected


def test_continue_needs_a_visible_last_message() -> None:
    with pytest.raises(TemplateError, match="continue"):
        render("x", {"messages": [{"role": "user", "content": "abc"}]}, True)


ESCAPES = [
    "{% include '/etc/passwd' %}",
    "{% import '/etc/passwd' as p %}{{ p }}",
    "{{ ''.__class__.__mro__[1].__subclasses__() }}",
    "{{ messages.append(1) }}",
    "{{ cycler.__init__.__globals__ }}",
    "{{ raise_exception('no') }}",
    "{% if %}",
    "{{ undefined.attribute }}",
]
BOMBS = [
    "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}",
    "{{ 9 ** (9 ** 9) }}",  # one call that no thread could interrupt
    "{{ 'a' * 10 ** 10 }}",
]


@pytest.mark.parametrize("template", ESCAPES)
def test_failures_are_template_errors(template: str) -> None:
    with pytest.raises(TemplateError):
        render(template, {"messages": []})


@pytest.mark.parametrize("template", BOMBS)
def test_bombs_are_contained_and_the_next_one_renders(template: str) -> None:
    async def run() -> None:
        renderer = TemplateRenderer()
        ticks = 0

        async def tick() -> None:
            nonlocal ticks
            while True:
                await asyncio.sleep(0.01)
                ticks += 1

        ticking = asyncio.create_task(tick())
        with pytest.raises(TemplateError):
            await renderer.render(template, {"messages": []})
        ticking.cancel()
        assert ticks > 0  # the event loop ran on
        assert await renderer.render("{{ x }}é", {"x": "y" * 200_000}) == "y" * 200_000 + "é"
        await renderer.close()

    asyncio.run(run())


def test_templates_that_are_kept_take_no_room_from_others() -> None:
    """Each is compiled to a constant of 40 MB, and most templates are kept in that form."""

    async def run() -> None:
        renderer = TemplateRenderer()
        for number in range(26):  # small ones: the time for each is limited too
            template = f"{{% if x %}}{{{{ '- ' * (2 * 10 ** 7) }}}}{{% endif %}}{number}"
            assert await renderer.render(template, {}) == str(number)
        await renderer.close()

    asyncio.run(run())


def test_a_cancelled_rendering_does_not_answer_the_next_question() -> None:
    async def run() -> None:
        renderer = TemplateRenderer()
        assert await renderer.render("a", {}) == "a"
        slow = asyncio.create_task(renderer.render(BOMBS[0], {}))
        await asyncio.sleep(0.1)
        slow.cancel()
        assert await renderer.render("b", {}) == "b"
        await renderer.close()

    asyncio.run(run())


def test_a_renderer_that_was_killed_starts_again() -> None:
    """By the kernel, for want of memory: the next question is not to blame."""

    async def run() -> None:
        renderer = TemplateRenderer()
        assert await renderer.render("a", {}) == "a"
        process = renderer._process
        assert process is not None
        process.kill()
        await process.wait()
        assert await renderer.render("b", {}) == "b"
        await renderer.close()

    asyncio.run(run())


def test_templates_take_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    order: list[str] = []

    async def ask(_: TemplateRenderer, request: bytes) -> bytes:
        order.append(json.loads(request)[0])
        await asyncio.sleep(0.01)
        return b'{"text": "", "error": null}'

    monkeypatch.setattr(TemplateRenderer, "_ask", ask)

    async def run() -> None:
        renderer = TemplateRenderer()
        await asyncio.gather(*(renderer.render(template, {}) for template in "aaaabbc"))

    asyncio.run(run())
    assert sorted(order[:3]) == ["a", "b", "c"]
    assert sorted(order) == [*"aaaabbc"]


def test_variables_of_any_name_and_size() -> None:
    async def run() -> str:
        renderer = TemplateRenderer()
        text = await renderer.render("{{ self_ }}{{ n }}", {"self": 1, "self_": 2, "n": 10**30})
        await renderer.close()
        return text

    assert asyncio.run(run()) == "2" + "1" + "0" * 30


# --- folders --------------------------------------------------------------------------------------


def write(folder: Path, **files: object) -> Path:
    for name, content in files.items():
        file = folder / name.replace("__", ".")
        file.write_text(content if isinstance(content, str) else json.dumps(content))
    return folder


def test_the_jinja_file_wins(tmp_path: Path) -> None:
    folder = write(
        tmp_path, chat_template__jinja="one", tokenizer_config__json={"chat_template": "two"}
    )
    assert read_text_config(folder).chat_template == "one"


def test_named_templates_and_token_objects(tmp_path: Path) -> None:
    config = {
        "chat_template": [
            {"name": "tool_use", "template": "t"},
            {"name": "default", "template": "d"},
        ],
        "eos_token": {"content": "</s>", "lstrip": False},
        "pad_token": None,
    }
    text = read_text_config(write(tmp_path, tokenizer_config__json=config))
    assert text.chat_template == "d"
    assert text.special_tokens == {"eos_token": "</s>"}


@pytest.mark.parametrize(("value", "ids"), [(7, (7,)), ([7, 8], (7, 8)), (None, ())])
def test_eos_ids(tmp_path: Path, value: object, ids: tuple[int, ...]) -> None:
    folder = write(tmp_path, generation_config__json={"eos_token_id": value})
    assert read_text_config(folder).eos_token_ids == ids


@pytest.mark.parametrize("content", ["{", "[]", '{"chat_template": 5}'])
def test_bad_files_are_named(tmp_path: Path, content: str) -> None:
    with pytest.raises(TextConfigError, match="tokenizer_config"):
        read_text_config(write(tmp_path, tokenizer_config__json=content))


def test_texts_that_are_too_long_are_refused(tmp_path: Path) -> None:
    (tmp_path / "chat_template.jinja").write_text("x" * (MAX_TEXT - 2))
    read_text_config(tmp_path)
    config = tmp_path / "tokenizer_config.json"
    config.write_text(json.dumps({"eos_token": "</s>"}))
    with pytest.raises(TextConfigError, match="more than 262144 characters"):
        read_text_config(tmp_path)
    config.write_text(json.dumps({"chat_template": "x" * (MAX_TEXT + 1)}))
    (tmp_path / "chat_template.jinja").unlink()
    with pytest.raises(TextConfigError, match="more than 262144 characters"):
        read_text_config(tmp_path)
    config.unlink()
    (tmp_path / "config.json").write_text(json.dumps({"eos_token_id": [*range(MAX_EOS + 1)]}))
    with pytest.raises(TextConfigError, match="eos_token_id holds more than 1024"):
        read_text_config(tmp_path)


def test_equal_templates_share_memory(tmp_path: Path) -> None:
    template = "{{ messages[0].content }}" * 10
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "chat_template.jinja").write_text(template)
    one, other = (read_text_config(tmp_path / name).chat_template for name in ("a", "b"))
    assert one is other


def test_a_fifo_is_refused_at_once(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "chat_template.jinja")
    with pytest.raises(TextConfigError, match="not a file"):
        read_text_config(tmp_path)
