"""Chat templates against `apply_chat_template` of transformers."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import pytest
import tokenizers
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from engine.errors import ModelLoadError, TemplateError
from engine.text.assets import load_text
from engine.text.chat_template import ChatTemplate

DATA = Path(__file__).parent.parent / "data"
TEXTS: list[str] = json.loads((DATA / "nasty_texts.json").read_text())
TINY = tokenizers.Tokenizer.from_file(str(DATA / "tiny_byte_level.json"))

CONVERSATION: list[dict[str, Any]] = [
    {"role": "system", "content": "Be <b>brief</b> & 'exact'."},
    {"role": "user", "content": "Hi 👩‍🚀\n  there  "},
    {"role": "assistant", "content": "Hello."},
    {"role": "user", "content": "日本?"},
]
TOOL_TALK: list[dict[str, Any]] = [
    {"role": "user", "content": "Weather?", "name": None},
    {
        "role": "assistant",
        "content": None,
        "tool_calls": [{"type": "function", "function": {"name": "weather", "arguments": {"city": "Köln <&>"}}}],
    },
    {"role": "tool", "content": "sunny", "tool_call_id": "1"},
]
TOOLS: list[dict[str, Any]] = [
    {
        "type": "function",
        "function": {
            "name": "weather",
            "description": 'It\'s <here> & "now" — ☀',
            "parameters": {"type": "object", "properties": {"city": {"type": "string", "enum": ["Köln", "a<b"]}}},
        },
    }
]

TEMPLATES = {
    "chatml": (
        "{{ bos_token }}{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' }}"
        "{{ message.content | default('', true) | trim }}{{ eos_token }}\n{% endfor %}"
        "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
    ),
    "blocks trimmed": """
{%- for message in messages %}
    {% if message.role == 'user' %}
  [user]
    {% elif loop.first %}
  [first]
    {% endif %}
    {{ message.content }}
{% endfor %}
""",
    "tools as json": (
        "{% if tools %}{{ tools | tojson }}|{{ tools[0] | tojson(indent=2) }}|"
        "{{ tools | tojson(sort_keys=true, ensure_ascii=true) }}{% endif %}"
        "{% for message in messages %}{% for call in message.tool_calls or [] %}"
        "{{ call.function.name }}({{ call.function.arguments | tojson(separators=(',', ':')) }}){% endfor %}"
        "{{ 'no content' if message.content is not defined else message.content }}{% endfor %}"
    ),
    "loop controls": (
        "{% for message in messages %}{% if message.role == 'system' %}{% continue %}{% endif %}"
        "{{ message.role }}{% if loop.index > 2 %}{% break %}{% endif %}{% endfor %}"
    ),
    "namespace and generation": (
        "{% set ns = namespace(count=0) %}{% set inside = 'outer' %}{% for message in messages %}"
        "{% if message.role == 'assistant' %}{% generation %}{% set inside = 'inner' %}"
        "{% set ns.count = ns.count + 1 %}<{{ message.content }}{{ inside }}>{% endgeneration %}"
        "{{ inside }}{% endif %}{% endfor %}{{ ns.count }}"
    ),
    "clock": "{{ strftime_now('%Y') }}",
    "extra": "{{ enable_thinking is defined and enable_thinking }}|{{ documents is none }}|{{ unknown }}",
    "macro": (
        "{% macro say(m) %}{{ m.role | upper }}:{{ m['content'] }}{% endmacro %}"
        "{% for m in messages %}{{ say(m) }}{% endfor %}"
    ),
}


def oracle(template: str, messages: list[dict[str, Any]], **options: Any) -> str:
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=TINY, bos_token="<|endoftext|>", eos_token="<|im_end|>", chat_template=template
    )
    rendered: str = tokenizer.apply_chat_template(messages, tokenize=False, **options)
    return rendered


def ours(template: str | None) -> ChatTemplate:
    return ChatTemplate(template, "<|endoftext|>", "<|im_end|>")


@pytest.mark.parametrize("template", TEMPLATES.values(), ids=TEMPLATES)
@pytest.mark.parametrize("messages", [CONVERSATION, TOOL_TALK, CONVERSATION[:1]], ids=["talk", "tools", "one"])
@pytest.mark.parametrize("add_generation_prompt", [True, False], ids=["prompt", "no prompt"])
@pytest.mark.parametrize("tools", [None, TOOLS], ids=["", "with tools"])
def test_rendering_equals_transformers(
    template: str, messages: list[dict[str, Any]], add_generation_prompt: bool, tools: list[dict[str, Any]] | None
) -> None:
    expected = oracle(template, messages, add_generation_prompt=add_generation_prompt, tools=tools)

    assert ours(template).render(messages, add_generation_prompt=add_generation_prompt, tools=tools) == expected


@pytest.mark.parametrize(
    "options", [{"enable_thinking": True}, {"documents": [{"text": "x"}]}], ids=["thinking", "documents"]
)
def test_extra_variables_reach_the_template(options: dict[str, Any]) -> None:
    template = TEMPLATES["extra"]

    assert ours(template).render(CONVERSATION, **options) == oracle(
        template, CONVERSATION, add_generation_prompt=True, **options
    )


def test_a_token_the_model_does_not_have_renders_as_nothing() -> None:
    assert ChatTemplate("[{{ bos_token }}{{ eos_token }}]", None, None).render([]) == "[]"


@pytest.mark.model
def test_smollm2_renders_the_nasty_corpus_as_transformers_does(smollm2_path: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(smollm2_path.parent, gguf_file=smollm2_path.name)
    text = load_text(smollm2_path)

    for content in TEXTS:
        messages = [{"role": "system", "content": content[:5]}, {"role": "user", "content": content}]
        expected = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        assert text.chat_template.render(messages) == expected
        assert text.tokenizer.decode(text.tokenizer.encode(expected), skip_special=False) == expected


def test_what_a_template_refuses_is_an_error_with_its_words() -> None:
    template = ours("{{ raise_exception('roles must alternate') }}")
    with pytest.raises(TemplateError, match="roles must alternate"):
        template.render(CONVERSATION)


@pytest.mark.parametrize(
    "template",
    [
        "{{ messages[0].content + 1 }}",
        "{{ messages[9].content.strip() }}",
        "{{ messages[0].absent.field }}",
        "{{ 1 // 0 }}",
        "{{ messages | tojson(indent=messages) }}",
        "{% for i in range(99999999) %}{% endfor %}",
        "{% macro again() %}{{ again() }}{% endmacro %}{{ again() }}",
        "{{ messages | absent_filter }}",
    ],
)
def test_messages_a_template_cannot_handle_are_an_error(template: str) -> None:
    with pytest.raises(TemplateError):
        ours(template).render(CONVERSATION)


@pytest.mark.parametrize(
    "template",
    [
        "{{ messages.append(1) }}",
        "{{ ''.__class__.__mro__ }}",
        "{{ messages.__class__.__init__.__globals__ }}",
        "{{ raise_exception.__globals__['datetime'] }}",
        "{{ '%s' | format(cycler.__init__.__globals__) }}",
    ],
)
def test_a_template_cannot_leave_its_sandbox_or_change_messages(template: str) -> None:
    with pytest.raises(TemplateError):
        ours(template).render(CONVERSATION)
    assert len(CONVERSATION) == 4


def test_no_template_is_an_error_when_it_is_used() -> None:
    with pytest.raises(TemplateError, match="has no chat template"):
        ours(None).render(CONVERSATION)


def test_a_broken_template_is_an_error_when_it_is_used() -> None:
    template = ours("{% for message in messages %}")
    with pytest.raises(TemplateError, match="chat template is broken"):
        template.render(CONVERSATION)


@pytest.fixture
def write_folder(tmp_path: Path) -> Callable[..., Path]:
    def write(settings: dict[str, Any], jinja: bytes | None = None) -> Path:
        TINY.save(str(tmp_path / "tokenizer.json"))
        (tmp_path / "config.json").write_text(json.dumps({"eos_token_id": 2}))
        (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings))
        if jinja is not None:
            (tmp_path / "chat_template.jinja").write_bytes(jinja)
        return tmp_path

    return write


@pytest.mark.parametrize(
    ("settings", "jinja", "expected"),
    [
        ({"chat_template": "field {{ eos_token }}", "eos_token": "<|im_end|>"}, None, "field <|im_end|>"),
        ({"chat_template": "{{ eos_token }}", "eos_token": {"content": "<|im_end|>"}}, None, "<|im_end|>"),
        ({"chat_template": "field"}, "file ☀".encode(), "file ☀"),
        ({"chat_template": [{"name": "rag", "template": "r"}, {"name": "default", "template": "d"}]}, None, "d"),
    ],
)
def test_a_folder_holds_its_template_in_a_file_or_a_field(
    write_folder: Callable[..., Path], settings: dict[str, Any], jinja: bytes | None, expected: str
) -> None:
    assert load_text(write_folder(settings, jinja)).chat_template.render([]) == expected


def test_a_folder_without_a_template_loads_and_fails_when_it_is_used(write_folder: Callable[..., Path]) -> None:
    text = load_text(write_folder({}))

    assert text.tokenizer.encode("a")
    with pytest.raises(TemplateError, match="has no chat template"):
        text.chat_template.render(CONVERSATION)


@pytest.mark.parametrize(
    ("settings", "jinja", "message"),
    [
        ({"chat_template": 5}, None, r"tokenizer_config\.json: 'chat_template' must be a template"),
        ({"eos_token": 5}, None, r"tokenizer_config\.json: 'eos_token' must be a token"),
        ({}, b"\xff", r"chat_template\.jinja: cannot be read"),
    ],
)
def test_malformed_settings_are_named(
    write_folder: Callable[..., Path], settings: dict[str, Any], jinja: bytes | None, message: str
) -> None:
    with pytest.raises(ModelLoadError, match=message):
        load_text(write_folder(settings, jinja))


def test_a_gguf_file_without_a_template_loads_and_fails_when_it_is_used(tmp_path: Path) -> None:
    writer = gguf.GGUFWriter(tmp_path / "v.gguf", "llama")
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list(["a", "b", "ab"])
    writer.add_token_merges(["a b"])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    text = load_text(tmp_path / "v.gguf")

    assert text.tokenizer.encode("ab") == [2]
    with pytest.raises(TemplateError, match="has no chat template"):
        text.chat_template.render(CONVERSATION)
