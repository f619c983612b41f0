"""Chat templates: render messages as the prompt text that the model was trained on.

Templates are rendered as in transformers, with the same globals and whitespace rules.  They run in
a sandbox, because a template is downloaded code.  The sandbox protects files and other objects, but
does not limit time or memory: `{{ 9 ** 9 ** 9 }}` runs forever and holds the GIL.  So a template
from a request is accepted (`replaced`) only if the operator trusts the clients.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from datetime import datetime
from functools import lru_cache
from pathlib import Path
from typing import Any, Final, NoReturn

import jinja2
import msgspec
import structlog
from jinja2.sandbox import ImmutableSandboxedEnvironment

from router.text.output_parts import arguments_of
from wire.errors import MAX_SHOWN, ErrorCode, WireError
from wire.process.model import ModelError

log = structlog.get_logger("router")

Chat = Sequence[Mapping[str, Any]]

# The maximum length of a request's template, which takes half a second to compile.
MAX_SOURCE: Final = 32 * 1024
# Appended to the message to continue, to find its end in the prompt.  The trailing space shows
# whether the template strips messages.
_TAG: Final = "\ue000continue\ue000 "
_CHECKS_FOR_NONE: Final = re.compile(r"content\W{0,3}\s+is\s+(not\s+)?none", re.IGNORECASE)


class _Config(msgspec.Struct):
    """The entries of tokenizer_config.json that templates use."""

    chat_template: str | list[dict[str, str]] | None = None
    bos_token: str | dict[str, Any] | None = None
    eos_token: str | dict[str, Any] | None = None
    pad_token: str | dict[str, Any] | None = None
    unk_token: str | dict[str, Any] | None = None


class ChatTemplate:
    """The chat template of one model, compiled once."""

    def __init__(
        self,
        source: str | None,
        variables: Mapping[str, str] | None = None,
        *,
        for_tools: str | None = None,
    ) -> None:
        """Compile the templates; `for_tools` is a separate one for chats with tools, if any."""
        self._variables = dict(variables or {})
        self._source = source
        self._for_tools = for_tools or source
        self._templates = {
            text: _compiled(text) for text in (self._source, self._for_tools) if text is not None
        }

    @classmethod
    def load(cls, model_path: Path) -> ChatTemplate:
        """Read the chat template of a model directory; without one, `render` raises an error.

        Raises:
            ModelError: tokenizer_config.json is invalid, or the template does not compile.
        """
        config = _read_config(model_path / "tokenizer_config.json")
        variables = {}
        for name in ("bos_token", "eos_token", "pad_token", "unk_token"):
            token = getattr(config, name)
            if token is not None:
                variables[name] = token if isinstance(token, str) else str(token.get("content", ""))
        file = model_path / "chat_template.jinja"
        named = _named(config)
        if file.is_file():
            named = {"default": file.read_text(encoding="utf-8")}
        source = named.get("default") or next(iter(named.values()), None)
        try:
            return cls(source, variables, for_tools=named.get("tool_use"))
        except jinja2.TemplateError as error:
            raise ModelError(f"{model_path}: the chat template: {error}") from error

    @property
    def source(self) -> str:
        """The template text for chats with tools; it shows the syntax of answers."""
        return self._for_tools or ""

    def replaced(self, source: str) -> ChatTemplate:
        """Compile another template text for this model.

        Raises:
            WireError: INVALID_REQUEST; the text is too long or does not compile.
        """
        if len(source) > MAX_SOURCE:
            raise _refused(f"chat_template: {len(source)} characters, over {MAX_SOURCE}")
        try:
            return ChatTemplate(source, self._variables)
        except (jinja2.TemplateError, RecursionError) as error:
            raise _refused(f"chat_template: {str(error)[:MAX_SHOWN]}") from error

    def render(
        self,
        messages: Chat,
        *,
        tools: Chat | None = None,
        documents: Chat | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        variables: Mapping[str, Any] | None = None,
    ) -> str:
        """Render messages as the prompt text.

        With `continue_final_message`, the prompt ends inside the last message.

        Raises:
            WireError: INVALID_REQUEST; there is no template, it refuses the messages, or it does
                not support tools or documents.
        """
        source = self._for_tools if tools else self._source
        if source is None:
            raise _refused(
                "this model has no chat template: use /v1/completions, or add chat_template.jinja "
                "to the model directory"
            )
        for field, value in (("tools", tools), ("documents", documents)):
            if value and re.search(rf"\b{field}\b", source) is None:
                raise _refused(f"{field}: the chat template of this model has no place for them")
        chat = for_template(messages, source)
        if continue_final_message:
            if not chat or not isinstance(chat[-1].get("content"), str):
                raise _refused("continue_final_message: the last message has no content")
            chat[-1]["content"] += _TAG
        try:
            text = self._templates[source].render(
                {**self._variables, **(variables or {})},
                messages=chat,
                tools=tools or None,
                documents=documents or None,
                add_generation_prompt=add_generation_prompt,
            )
        except (
            *(jinja2.TemplateError, ArithmeticError, LookupError),
            *(RecursionError, TypeError, ValueError),
        ) as error:
            raise _refused(
                f"the chat template refuses these messages: {str(error)[:MAX_SHOWN]}"
            ) from error
        return _up_to_tag(text) if continue_final_message else text


def _up_to_tag(text: str) -> str:
    end = text.rfind(_TAG.strip())
    if end < 0:
        raise _refused("continue_final_message: the chat template does not show the last message")
    return text[:end] if text.startswith(_TAG, end) else text[:end].rstrip()


def for_template(messages: Sequence[Mapping[str, Any]], template: str) -> list[dict[str, Any]]:
    """Convert messages to the form that the template text `template` expects.

    The arguments of a tool call become an object: an empty one if the text is not a JSON object,
    for example in an unfinished call.  Missing content becomes "" unless the template checks for
    none, and the role developer becomes system unless the template mentions developers.
    """
    has_developer = "developer" in template
    has_none = _CHECKS_FOR_NONE.search(template) is not None
    converted = list[dict[str, Any]]()
    # The paths of arguments that do not parse.
    invalid = list[str]()
    for index, original in enumerate(messages):
        message = dict(original)
        if message.get("role") == "developer" and not has_developer:
            message["role"] = "system"
        if message.get("content") is None and not has_none:
            message["content"] = ""
        # Templates check whether the field exists, not whether it has any calls.
        calls = message.pop("tool_calls", None)
        if calls:
            message["tool_calls"] = _with_objects(calls, f"messages[{index}].tool_calls", invalid)
        converted.append(message)
    if invalid:
        log.warning(
            "arguments of calls are not the JSON text of an object: the chat template gets none",
            calls=len(invalid),
            first=invalid[0],
        )
    return converted


def _with_objects(calls: object, where: str, invalid: list[str]) -> list[dict[str, Any]]:
    if not isinstance(calls, list):
        raise _refused(f"{where}: expected a list of calls")
    converted = list[dict[str, Any]]()
    for index, call in enumerate(calls):
        match call:
            case {"function": {"name": str(), **rest} as function}:
                arguments = rest.get("arguments")
            case _:
                raise _refused(f"{where}[{index}]: expected the call of a function with a name")
        field = f"{where}[{index}].function.arguments"
        if isinstance(arguments, str):
            text, arguments = arguments.strip(), arguments_of(arguments)
            if arguments is None:
                arguments = {}
                invalid += [field] if text else []
        if not isinstance(arguments, dict):
            raise _refused(f"{field}: expected the JSON text of an object")
        converted.append({**call, "function": {**function, "arguments": arguments}})
    return converted


def _refused(why: str) -> WireError:
    return WireError(ErrorCode.INVALID_REQUEST, why)


def _read_config(path: Path) -> _Config:
    if not path.is_file():
        return _Config()
    try:
        return msgspec.json.decode(path.read_bytes(), type=_Config)
    except msgspec.MsgspecError as error:
        raise ModelError(f"{path}: {error}") from error


def _named(config: _Config) -> dict[str, str]:
    template = config.chat_template
    if isinstance(template, list):
        return {entry.get("name", ""): entry.get("template", "") for entry in template}
    return {} if template is None else {"default": template}


def _to_json(
    value: object,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    # jinja2's own filter escapes <, > and & for HTML, which models were not trained on.
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


def _raise_exception(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


def _strftime_now(layout: str) -> str:
    return datetime.now().strftime(layout)


def _environment() -> ImmutableSandboxedEnvironment:
    # No autoescape: prompts are not HTML.
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True,
        lstrip_blocks=True,
        autoescape=False,
        extensions=["jinja2.ext.loopcontrols"],
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = _strftime_now
    return environment


_ENVIRONMENT: Final = _environment()


# Caches a few templates from requests.
@lru_cache(maxsize=8)
def _compiled(source: str) -> jinja2.Template:
    return _ENVIRONMENT.from_string(source)
