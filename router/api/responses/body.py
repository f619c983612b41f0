"""POST /v1/responses: its request body, and the conversation that it continues.

The sampling fields are those of the other endpoints; the fields specific to this API are here.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Annotated, Any, Final, Literal

import msgspec
from msgspec import Meta, Struct

from router.api.errors import invalid
from router.api.model import ServedModel
from router.api.requests.body import Positive, Sampled, StreamOptions
from router.api.requests.conversation import (
    MAX_TOOLS,
    Conversation,
    Effort,
    Tool,
    ToolChoice,
    ToolName,
    check_tools,
    tool_choice,
)
from router.api.requests.structures import ANY_OBJECT, Wanted, one_of, wanted_schema
from router.api.responses.items import Item, messages_of
from wire.errors import shown
from wire.options import NumTop

LOGPROBS: Final = "message.output_text.logprobs"
# The values that `include` accepts.  All but the first have no effect: reasoning is plain text and
# needs no encryption, and the other values are about tools that this server does not have.
INCLUDES: Final = (
    LOGPROBS,
    "reasoning.encrypted_content",
    "file_search_call.results",
    "web_search_call.results",
    "web_search_call.action.sources",
    "message.input_image.image_url",
    "computer_call_output.output.image_url",
    "code_interpreter_call.outputs",
)


class ResponseStreamOptions(StreamOptions):
    """`stream_options`; the last event always has the usage."""

    include_obfuscation: bool | None = None


class TextFormat(Struct, omit_defaults=True):
    """`text.format`."""

    type: Literal["text", "json_object", "json_schema"]
    name: str | None = None
    description: str | None = None
    schema: dict[str, Any] | None = None
    strict: bool | None = None


class TextOptions(Struct):
    """`text`: the format of the message."""

    format: TextFormat | None = None
    verbosity: Literal["low", "medium", "high"] | None = None


class ReasoningOptions(Struct):
    """`reasoning`."""

    effort: Effort | None = None
    summary: Literal["auto", "concise", "detailed"] | None = None
    generate_summary: Literal["auto", "concise", "detailed"] | None = None


class FunctionTool(Struct):
    """An entry of `tools`; entries of other types may have no name."""

    type: str
    name: ToolName | None = None
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class NamedFunction(Struct, tag_field="type", tag="function"):
    """A `tool_choice` that names one tool."""

    name: str


class AllowedFunctions(Struct, tag_field="type", tag="allowed_tools"):
    """A `tool_choice` that names several tools."""

    mode: Literal["auto", "required"]
    tools: Annotated[list[NamedFunction], Meta(min_length=1, max_length=MAX_TOOLS)]


class ResponseBody(Sampled, kw_only=True):
    """The request body of POST /v1/responses."""

    input: str | Annotated[list[Item], Meta(min_length=1)]
    instructions: str | None = None
    previous_response_id: str | None = None
    max_output_tokens: Positive | None = None
    stream_options: ResponseStreamOptions | None = None
    text: TextOptions | None = None
    tools: Annotated[list[FunctionTool], Meta(max_length=MAX_TOOLS)] | None = None
    tool_choice: str | NamedFunction | AllowedFunctions | None = None
    parallel_tool_calls: bool | None = None
    reasoning: ReasoningOptions | None = None
    include: list[str] | None = None
    top_logprobs: NumTop | None = None
    store: bool | None = None
    include_reasoning: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None

    # Fields without effect, which the response repeats.
    metadata: (
        Annotated[
            dict[Annotated[str, Meta(max_length=64)], Annotated[str, Meta(max_length=512)]],
            Meta(max_length=16),
        ]
        | None
    ) = None
    user: str | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None

    @property
    def token_limit(self) -> int | None:
        return self.max_output_tokens

    @property
    def num_logprobs(self) -> int | None:
        return self.top_logprobs or 0 if LOGPROBS in (self.include or ()) else None

    @property
    def wanted(self) -> Wanted | None:
        format = self.text.format if self.text else None
        found = [each for each in (super().wanted,) if each is not None]
        if format is not None and format.type == "json_object":
            found.append(Wanted("text.format", "json_schema", ANY_OBJECT))
        elif format is not None and format.schema is not None:
            schema = msgspec.Raw(msgspec.json.encode(format.schema))
            found.append(wanted_schema("text.format.schema", schema))
        return one_of(found)

    @property
    def is_kept(self) -> bool:
        return self.store is not False

    @property
    def items(self) -> list[Item]:
        """The items of `input`; a string is one user message."""
        if isinstance(self.input, str):
            return [Item(role="user", content=self.input)]
        return self.input

    def check(self) -> None:
        super().check()
        for index, item in enumerate(self.items):
            item.check(f"input[{index}]")
        if unknown := set(self.include or ()).difference(INCLUDES):
            raise invalid("include", f"{shown(min(unknown))} is not one of {', '.join(INCLUDES)}")
        if self.top_logprobs and self.num_logprobs is None:
            raise invalid("top_logprobs", f"only allowed when include has {LOGPROBS}")
        if self.tools and self.num_logprobs is not None:
            raise invalid("include", f"{LOGPROBS} is not supported with tools")
        if self.stream_options and self.stream_options.include_obfuscation:
            raise invalid("stream_options.include_obfuscation", "is not supported; leave it out")
        if self.text is not None:
            _check_text(self.text)
        if self.reasoning is not None:
            _check_reasoning(self.reasoning)
        for index, tool in enumerate(self.tools or ()):
            _check_function(f"tools[{index}]", tool)
        check_tools(self.known_tools, self.choice_of_tool, "tool_choice.tools[{}].name")

    @property
    def known_tools(self) -> list[Tool]:
        return [
            Tool(tool.name or "", tool.description or "", tool.parameters, tool.strict is True)
            for tool in self.tools or ()
        ]

    @property
    def choice_of_tool(self) -> ToolChoice:
        match self.tool_choice:
            case NamedFunction(name):
                return ToolChoice("named", (name,))
            case AllowedFunctions(mode, tools):
                return ToolChoice(mode, tuple([tool.name for tool in tools]))
            case word:
                return tool_choice(word)

    def conversation(self, items: Iterable[Item], model: ServedModel) -> Conversation:
        """Convert `items`, those of earlier responses and of this body, to a conversation."""
        effort = self.reasoning.effort if self.reasoning else None
        return Conversation(
            messages=messages_of(items, self.instructions),
            tools=self.known_tools,
            tool_choice=self.choice_of_tool,
            has_parallel_calls=self.parallel_tool_calls is not False,
            add_special_tokens=bool(self.add_special_tokens),
            variables={
                **model.variables_of_effort("reasoning.effort", effort),
                **(self.chat_template_kwargs or {}),
            },
            shows_reasoning=self.include_reasoning is not False,
        )

    def echo(self) -> dict[str, Any]:
        """Return the response fields that repeat the request, encoded once."""
        text, reasoning = self.text or TextOptions(), self.reasoning or ReasoningOptions()
        fields: dict[str, Any] = {
            "instructions": self.instructions,
            "max_output_tokens": self.max_output_tokens,
            "previous_response_id": self.previous_response_id,
            "tools": self.tools or [],
            "tool_choice": self.tool_choice or "auto",
            "parallel_tool_calls": self.parallel_tool_calls is not False,
            "text": {"format": text.format or TextFormat("text")},
            "reasoning": {"effort": reasoning.effort, "summary": reasoning.summary},
            "top_logprobs": self.top_logprobs or 0,
            "store": self.is_kept,
            "metadata": self.metadata or {},
            "safety_identifier": self.safety_identifier,
            "prompt_cache_key": self.prompt_cache_key,
            "background": False,
            "truncation": "disabled",
            "service_tier": "default",
        }
        if self.user is not None:
            fields["user"] = self.user
        return {name: msgspec.Raw(msgspec.json.encode(value)) for name, value in fields.items()}


def _check_text(text: TextOptions) -> None:
    if text.verbosity not in (None, "medium"):
        raise invalid("text.verbosity", "is not supported by this model; leave it out")
    if text.format is not None and text.format.type == "json_schema":
        if text.format.schema is None:
            raise invalid("text.format.schema", "is missing")
        if not text.format.name:
            raise invalid("text.format.name", "is missing")


def _check_reasoning(reasoning: ReasoningOptions) -> None:
    for name in ("summary", "generate_summary"):
        if getattr(reasoning, name) not in (None, "auto"):
            raise invalid(f"reasoning.{name}", "is not supported: reasoning is shown in full")


def _check_function(where: str, tool: FunctionTool) -> None:
    if tool.type != "function":
        raise invalid(f"{where}.type", f"{shown(tool.type)} is not supported: only function is")
    if not tool.name:
        raise invalid(f"{where}.name", "is missing")
