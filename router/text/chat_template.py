"""Chat templates: messages to the prompt text the model was trained on.

The template is the model's own (chat_template.jinja, or chat_template in tokenizer_config.json as a
string or a list of named ones), rendered as transformers does it: the same globals, the same
whitespace rules, sandboxed, since a template is code that came with a download.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any, NoReturn

import jinja2
import msgspec
from jinja2.sandbox import ImmutableSandboxedEnvironment

from wire.errors import MAX_SHOWN, ErrorCode, WireError
from wire.process.model import ModelError

Chat = Sequence[Mapping[str, Any]]


class _Config(msgspec.Struct):
    """What of tokenizer_config.json templates see; everything else in the file is not read."""

    chat_template: str | list[dict[str, str]] | None = None
    bos_token: str | dict[str, Any] | None = None
    eos_token: str | dict[str, Any] | None = None
    pad_token: str | dict[str, Any] | None = None
    unk_token: str | dict[str, Any] | None = None


class ChatTemplate:
    """The chat template of one model, compiled once."""

    def __init__(self, source: str | None, variables: Mapping[str, str] | None = None) -> None:
        self._variables = dict(variables or {})
        # Not HTML: a prompt must reach the model as it is.
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True,
            lstrip_blocks=True,
            autoescape=False,
            extensions=["jinja2.ext.loopcontrols"],
        )
        environment.filters["tojson"] = _to_json
        environment.globals["raise_exception"] = _raise_exception
        environment.globals["strftime_now"] = _strftime_now
        self._template = None if source is None else environment.from_string(source)

    @classmethod
    def load(cls, model_path: Path) -> ChatTemplate:
        """Read the template of a model directory; one without any refuses to render.

        Raises:
            ModelError: tokenizer_config.json is not what it should be, or the template does not
                compile.
        """
        config = _read_config(model_path / "tokenizer_config.json")
        variables = {}
        for name in ("bos_token", "eos_token", "pad_token", "unk_token"):
            token = getattr(config, name)
            if token is not None:
                variables[name] = token if isinstance(token, str) else str(token.get("content", ""))
        file = model_path / "chat_template.jinja"
        source = file.read_text(encoding="utf-8") if file.is_file() else _source(config)
        try:
            return cls(source, variables)
        except jinja2.TemplateError as error:
            raise ModelError(f"{model_path}: the chat template: {error}") from error

    @property
    def exists(self) -> bool:
        return self._template is not None

    def render(
        self,
        messages: Chat,
        *,
        add_generation_prompt: bool = True,
        variables: Mapping[str, Any] | None = None,
    ) -> str:
        """Return the prompt text.

        Raises:
            WireError: INVALID_REQUEST; there is no template, or it refuses these messages.
        """
        if self._template is None:
            raise WireError(
                ErrorCode.INVALID_REQUEST,
                "this model has no chat template: use /v1/completions, or add chat_template.jinja "
                "to the model directory",
            )
        try:
            return self._template.render(
                {**self._variables, **(variables or {})},
                messages=messages,
                add_generation_prompt=add_generation_prompt,
            )
        except (jinja2.TemplateError, ArithmeticError, LookupError, TypeError, ValueError) as error:
            raise WireError(
                ErrorCode.INVALID_REQUEST,
                f"the chat template refuses these messages: {str(error)[:MAX_SHOWN]}",
            ) from error


def _read_config(path: Path) -> _Config:
    if not path.is_file():
        return _Config()
    try:
        return msgspec.json.decode(path.read_bytes(), type=_Config)
    except msgspec.MsgspecError as error:
        raise ModelError(f"{path}: {error}") from error


def _source(config: _Config) -> str | None:
    template = config.chat_template
    if isinstance(template, list):
        named = {entry.get("name", ""): entry.get("template") for entry in template}
        return named.get("default") or next(iter(named.values()), None)
    return template


def _to_json(value: object, indent: int | None = None, ensure_ascii: bool = False) -> str:
    # jinja2's own filter escapes <, > and & for HTML, and models were not trained on that.
    return json.dumps(value, indent=indent, ensure_ascii=ensure_ascii)


def _raise_exception(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


def _strftime_now(layout: str) -> str:
    return datetime.now().strftime(layout)
