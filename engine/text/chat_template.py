"""Messages to the prompt a model was trained on, by the Jinja template that comes with the model.

Templates see what they see in transformers: the same block trimming, `tojson`, `raise_exception`, `strftime_now`, loop
controls and the `generation` tag. They are foreign code and run in Jinja's immutable sandbox.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from typing import Any, NoReturn

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from engine.errors import TemplateError

# What a template's own expressions can raise when messages are not of the form it expects.
_TEMPLATE_FAULTS = (
    jinja2.TemplateError,
    ArithmeticError,
    AttributeError,
    LookupError,
    RecursionError,
    TypeError,
    ValueError,
)


class ChatTemplate:
    """One model's template. A missing or broken one is an error when it is used, since completions need none."""

    def __init__(self, source: str | None, bos_token: str | None, eos_token: str | None) -> None:
        self._tokens = {
            name: token for name, token in (("bos_token", bos_token), ("eos_token", eos_token)) if token is not None
        }
        self._template: jinja2.Template | None = None
        self._fault = "this model has no chat template"
        if source is not None:
            try:
                self._template = _environment().from_string(source)
            except jinja2.TemplateError as e:
                self._fault = f"the model's chat template is broken: {e}"

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        **extra: Any,
    ) -> str:
        """The prompt, special tokens included. Message fields that are None count as absent.

        Raises `TemplateError` if there is no template, or if it refuses these messages or cannot handle them.
        """
        if self._template is None:
            raise TemplateError(self._fault)
        present = [{key: value for key, value in message.items() if value is not None} for message in messages]
        variables = self._tokens | extra
        try:
            return self._template.render(
                messages=present,
                tools=tools,
                documents=variables.pop("documents", None),
                add_generation_prompt=add_generation_prompt,
                **variables,
            )
        except _TEMPLATE_FAULTS as e:
            raise TemplateError(f"the model's chat template does not accept these messages: {e}") from e


class _GenerationTag(Extension):
    """``{% generation %}`` marks assistant text for training; here its body is rendered as it is."""

    tags = {"generation"}  # noqa: RUF012  # Jinja declares it so

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        # A call block, as in transformers, so that variables set inside stay inside.
        return nodes.CallBlock(self.call_method("_body"), [], [], body).set_lineno(line)

    def _body(self, caller: Callable[[], str]) -> str:
        return caller()


def _environment() -> ImmutableSandboxedEnvironment:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationTag, loopcontrols]
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = _strftime_now
    return environment


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Jinja's own filter escapes HTML, which a prompt must not be."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise_exception(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


def _strftime_now(layout: str) -> str:
    return datetime.now().astimezone().strftime(layout)
