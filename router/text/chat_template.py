"""Chat templates: messages to the prompt text the model was trained on.

Rendered as transformers does it: the same globals, the same whitespace rules, sandboxed, since a
template is code that came with a download.  The sandbox keeps a template from files and from other
objects, not from time or memory: `{{ 9 ** 9 ** 9 }}` computes for ever and holds the GIL.  So a
template that comes with a request is taken (`replaced`) only where the operator trusts the clients.
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

# Of a template that comes with a request: to compile one of this size takes half a second.
MAX_SOURCE: Final = 32 * 1024
# Put after the message to be continued, so that its end is found.  The space tells whether the
# template trims messages.
_TAG: Final = "\ue000continue\ue000 "
_ASKS_FOR_NONE: Final = re.compile(r"content\W{0,3}\s+is\s+(not\s+)?none", re.IGNORECASE)


class _Config(msgspec.Struct):
    """The entries of tokenizer_config.json that templates see; the rest is not read."""

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
        """`for_tools` is the template of chats with tools, of a model that has two."""
        self._variables = dict(variables or {})
        self._source = source
        self._for_tools = for_tools or source
        self._templates = {
            text: _compiled(text) for text in (self._source, self._for_tools) if text is not None
        }

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
        """Its text, that of chats with tools; it shows what the answers look like."""
        return self._for_tools or ""

    def replaced(self, source: str) -> ChatTemplate:
        """Return a template of this model with another text.

        Raises:
            WireError: INVALID_REQUEST; it is too long, or does not compile.
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
        """Return the prompt text.

        To `continue_final_message` is to end inside that message, before any generation prompt.

        Raises:
            WireError: INVALID_REQUEST; there is no template, or it refuses these messages, or has
                no place for tools.
        """
        source = self._for_tools if tools else self._source
        if source is None:
            raise _refused(
                "this model has no chat template: use /v1/completions, or add chat_template.jinja "
                "to the model directory"
            )
        for field, given in (("tools", tools), ("documents", documents)):
            if given and re.search(rf"\b{field}\b", source) is None:
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
    """Return `messages` as the `template` with this text wants them.

    The arguments of a tool call are an object; text that is not the JSON of one, as of a call that
    the model did not finish, becomes an empty object.  Missing content is empty, unless the
    template asks for none, and the developer is the system, unless the template knows developers.
    """
    has_developer = "developer" in template
    has_none = _ASKS_FOR_NONE.search(template) is not None
    wanted = list[dict[str, Any]]()
    # The fields whose text does not parse.
    unread = list[str]()
    for index, original in enumerate(messages):
        message = dict(original)
        if message.get("role") == "developer" and not has_developer:
            message["role"] = "system"
        if message.get("content") is None and not has_none:
            message["content"] = ""
        # Templates ask whether there is such a field, not whether it has any call.
        calls = message.pop("tool_calls", None)
        if calls:
            message["tool_calls"] = _with_objects(calls, f"messages[{index}].tool_calls", unread)
        wanted.append(message)
    if unread:
        log.warning(
            "arguments of calls are not the JSON text of an object: the chat template gets none",
            calls=len(unread),
            first=unread[0],
        )
    return wanted


def _with_objects(calls: object, where: str, unread: list[str]) -> list[dict[str, Any]]:
    if not isinstance(calls, list):
        raise _refused(f"{where}: expected a list of calls")
    wanted = list[dict[str, Any]]()
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
                unread += [field] if text else []
        if not isinstance(arguments, dict):
            raise _refused(f"{field}: expected the JSON text of an object")
        wanted.append({**call, "function": {**function, "arguments": arguments}})
    return wanted


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
    # jinja2's own filter escapes <, > and & for HTML, and models were not trained on that.
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


def _raise_exception(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


def _strftime_now(layout: str) -> str:
    return datetime.now().strftime(layout)


def _environment() -> ImmutableSandboxedEnvironment:
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
    return environment


_ENVIRONMENT: Final = _environment()


# Remembers a few that came with requests.
@lru_cache(maxsize=8)
def _compiled(source: str) -> jinja2.Template:
    return _ENVIRONMENT.from_string(source)
