"""POST /v1/messages and count_tokens: parses request bodies into core requests.

Every field of Anthropic's API is listed here.  Unsupported fields accept only values without
effect, such as `null`, and fields without effect are marked.  An unknown field is refused, as at
Anthropic.
"""

from __future__ import annotations

from functools import partial
from typing import Annotated, Any, Final, Literal

import msgspec
from msgspec import Meta, Struct

from router.api.completions.completion import CompletionRequest
from router.api.errors import invalid
from router.api.messages.blocks import Chat, Kinds, Message, Nothing, Strict, read_typed, text_of
from router.api.messages.response import MessageAnswer
from router.api.model import SWITCHES, RequestContext, ServedModel
from router.api.requests.body import MAX_STOPS, Body, CacheSalt, Sampled, StopString, parse
from router.api.requests.conversation import (
    MAX_TOOLS,
    Conversation,
    Tool,
    ToolChoice,
    ToolName,
    check_tools,
)
from router.api.requests.structures import Wanted, wanted_schema

# Far larger than any context, so only the context length limits an answer.
MAX_TOKENS: Final = 2**31 - 1


class ClientTool(Strict, tag="custom"):
    """A tool that the client runs.

    `eager_input_streaming` streams its arguments as they are generated, instead of all at once.
    """

    name: ToolName
    input_schema: dict[str, Any]
    description: str = ""
    strict: bool | None = None
    eager_input_streaming: bool | None = None
    allowed_callers: list[Literal["direct"]] | None = None
    input_examples: Nothing = None
    defer_loading: bool | None = None


TOOLS: Final[Kinds] = {"custom": ClientTool, None: ClientTool}
MODES: Final[dict[str, Literal["none", "auto", "required", "named"]]] = {
    "auto": "auto",
    "any": "required",
    "tool": "named",
    "none": "none",
}


class Choice(Struct, forbid_unknown_fields=True):
    type: Literal["auto", "any", "tool", "none"]
    name: str = ""
    disable_parallel_tool_use: bool | None = None


class ThinkingMode(Struct, forbid_unknown_fields=True):
    """`budget_tokens` has no effect: `max_tokens` limits reasoning and answer together."""

    type: Literal["enabled", "adaptive", "disabled"]
    budget_tokens: int | None = None
    display: Literal["summarized"] | None = None


class OutputFormat(Struct, forbid_unknown_fields=True):
    type: Literal["json_schema"]
    schema: msgspec.Raw


class OutputConfig(Struct, forbid_unknown_fields=True):
    """`high` is the default effort."""

    effort: Literal["low", "medium", "high", "xhigh", "max"] | None = None
    format: OutputFormat | None = None


class ContextManagement(Struct, forbid_unknown_fields=True):
    edits: Nothing = None


class PromptBody(Body, kw_only=True, forbid_unknown_fields=True):
    """The request body of POST /v1/messages/count_tokens: the fields that form the prompt."""

    model: str
    messages: Annotated[list[Message], Meta(min_length=1)]
    system: str | list[Any] | None = None
    tools: Annotated[list[Any], Meta(max_length=MAX_TOOLS)] | None = None
    tool_choice: Choice | None = None
    thinking: ThinkingMode | None = None
    output_config: OutputConfig | None = None
    context_management: ContextManagement | None = None
    mcp_servers: Nothing = None

    # Fields without effect on the answer.
    cache_control: dict[str, Any] | None = None
    speed: Literal["standard"] | None = None

    def conversation(self, model: ServedModel) -> Conversation:
        """Convert the messages and tools to a conversation."""
        chat = Chat()
        if self.system:
            chat.add_text("system", text_of(self.system, "system"))
        for index, message in enumerate(self.messages):
            chat.add(message, f"messages[{index}]")
        messages = chat.messages
        last = messages[-1]
        if last.get("tool_calls"):
            raise invalid("messages", "the last ends with a tool_use block; send its tool_result")
        tools, choice = self._tools, self.tool_choice or Choice("auto")
        names = (choice.name,) if choice.type == "tool" else ()
        chosen = ToolChoice(MODES[choice.type], names)
        check_tools(tools, chosen)
        return Conversation(
            messages=messages,
            tools=tools,
            tool_choice=chosen,
            has_parallel_calls=not choice.disable_parallel_tool_use,
            # If the last message is the assistant's, the answer continues it.
            add_generation_prompt=last["role"] != "assistant",
            continue_final_message=last["role"] == "assistant",
            variables=self._effort(model) | self._thinking(model),
        )

    @property
    def _tools(self) -> list[Tool]:
        tools = []
        for index, sent in enumerate(self.tools or ()):
            tool: ClientTool = read_typed(TOOLS, sent, f"tools[{index}]")
            if tool.defer_loading:
                raise invalid(f"tools[{index}].defer_loading", "there is no search for tools here")
            strict = bool(tool.strict)
            tools.append(Tool(tool.name, tool.description, tool.input_schema, strict))
        return tools

    def _effort(self, model: ServedModel) -> dict[str, Any]:
        config = self.output_config or OutputConfig()
        if config.effort is None:
            return {}
        variables = model.effort(config.effort)
        if variables is None and config.effort != "high":
            raise invalid("output_config.effort", "this model takes none but high; leave it out")
        return variables or {}

    def _thinking(self, model: ServedModel) -> dict[str, Any]:
        """Return the chat template variables that switch reasoning on or off."""
        if self.thinking is None:
            return {}
        if self.thinking.type == "disabled":
            variables = model.effort("none")
            if variables is None:
                raise invalid("thinking", "this model always thinks; leave it out")
            return variables
        if self.thinking.type == "enabled" and not model.has_reasoning:
            raise invalid("thinking", "this model does not think before it answers; leave it out")
        return dict.fromkeys(SWITCHES, True)


class MessageSampled(Sampled, kw_only=True):
    """The sampling fields of /v1/messages by OpenAI's names, for the code that endpoints share."""

    output_format: OutputFormat | None = None

    @property
    def wanted(self) -> Wanted | None:
        if self.output_format is None:
            return None
        return wanted_schema("output_config.format.schema", self.output_format.schema)

    @property
    def is_cut_to_context(self) -> bool:
        return True  # agents send the largest max_tokens that they accept


class MessagesBody(PromptBody, kw_only=True):
    """The request body of POST /v1/messages."""

    max_tokens: Annotated[int, Meta(ge=1, le=MAX_TOKENS)]
    stream: bool | None = None
    stop_sequences: Annotated[list[StopString], Meta(max_length=MAX_STOPS)] | None = None
    temperature: Annotated[float, Meta(ge=0.0, le=2.0)] | None = None
    top_p: Annotated[float, Meta(gt=0.0, le=1.0)] | None = None
    top_k: Annotated[int, Meta(ge=0, le=2**31 - 1)] | None = None
    seed: Annotated[int, Meta(ge=-(2**63), le=2**63 - 1)] | None = None  # an extension
    cache_salt: CacheSalt | None = None  # an extension
    container: None = None
    inference_geo: None = None

    # Fields without effect on the answer.
    metadata: dict[str, Any] | None = None
    service_tier: Literal["auto", "standard_only"] | None = None
    diagnostics: dict[str, Any] | None = None

    @property
    def sampled(self) -> MessageSampled:
        """The sampling fields by OpenAI's names, for the code that endpoints share."""
        config = self.output_config or OutputConfig()
        names = ("stream", "temperature", "top_p", "top_k", "seed", "max_tokens", "cache_salt")
        return MessageSampled(
            **{name: getattr(self, name) for name in names},
            stop=self.stop_sequences,
            output_format=config.format,
        )


def read(model: ServedModel, raw: bytes, context: RequestContext) -> CompletionRequest:
    """Parse and validate a request body, and return its core requests."""
    body = parse(MessagesBody, raw)
    model.check_name(body.model)
    conversation = body.conversation(model)
    eager = [tool["name"] for tool in body.tools or () if tool.get("eager_input_streaming")]
    answer = partial(MessageAnswer, max_tokens=body.max_tokens, eager=frozenset(eager))
    return model.conversation_request(conversation, body.sampled, context, answer)


def count_tokens(model: ServedModel, raw: bytes) -> bytes:
    """Return the JSON response of POST /v1/messages/count_tokens."""
    body = parse(PromptBody, raw)
    model.check_name(body.model)
    text = model.render(body.conversation(model))
    token_ids = model.encode("messages", text, add_special_tokens=False)
    return msgspec.json.encode({"input_tokens": len(token_ids)})
