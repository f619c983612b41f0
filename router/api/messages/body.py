"""POST /v1/messages and count_tokens: request bodies, and the core requests made of them.

Every field of Anthropic's API has an answer here: it works; or its type takes only what changes
nothing, such as `null`; or it is said to have no effect.  A field that is not here is refused, as
Anthropic does.
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
from router.api.model import SWITCHES, Asker, ServedModel
from router.api.requests.body import MAX_STOPS, Body, Sampled, StopString, parse
from router.api.requests.conversation import (
    MAX_TOOLS,
    Conversation,
    Tool,
    ToolChoice,
    ToolName,
    check_tools,
)
from router.api.requests.structures import Wanted, wanted_schema

# Far beyond what a context holds: a limit that is reached is the context's.
MAX_TOKENS: Final = 2**31 - 1


class ClientTool(Strict, tag="custom"):
    """A tool that the client runs.

    With `eager_input_streaming` its arguments are streamed as the model writes them, else together.
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
    """`budget_tokens` has no effect: `max_tokens` bounds thoughts and answer together."""

    type: Literal["enabled", "adaptive", "disabled"]
    budget_tokens: int | None = None
    display: Literal["summarized"] | None = None


class OutputFormat(Struct, forbid_unknown_fields=True):
    type: Literal["json_schema"]
    schema: msgspec.Raw


class OutputConfig(Struct, forbid_unknown_fields=True):
    """`high` is how much effort there is without telling."""

    effort: Literal["low", "medium", "high", "xhigh", "max"] | None = None
    format: OutputFormat | None = None


class ContextManagement(Struct, forbid_unknown_fields=True):
    edits: Nothing = None


class PromptBody(Body, kw_only=True, forbid_unknown_fields=True):
    """POST /v1/messages/count_tokens: what makes the prompt."""

    model: str
    messages: Annotated[list[Message], Meta(min_length=1)]
    system: str | list[Any] | None = None
    tools: Annotated[list[Any], Meta(max_length=MAX_TOOLS)] | None = None
    tool_choice: Choice | None = None
    thinking: ThinkingMode | None = None
    output_config: OutputConfig | None = None
    context_management: ContextManagement | None = None
    mcp_servers: Nothing = None

    # Without effect on the answer.
    cache_control: dict[str, Any] | None = None
    speed: Literal["standard"] | None = None

    def conversation(self, model: ServedModel) -> Conversation:
        """Return what is said so far, and the tools."""
        chat = Chat()
        if self.system:
            chat.say("system", text_of(self.system, "system"))
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
            # A last message of the assistant's is the beginning of the answer.
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
        """The variables that tell a template whether to think."""
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
    """How the answer is drawn, as other endpoints know it."""

    output_format: OutputFormat | None = None

    @property
    def wanted(self) -> Wanted | None:
        if self.output_format is None:
            return None
        return wanted_schema("output_config.format.schema", self.output_format.schema)

    @property
    def is_cut_to_room(self) -> bool:
        return True  # agents name the most tokens that they can take


class MessagesBody(PromptBody, kw_only=True):
    """POST /v1/messages."""

    max_tokens: Annotated[int, Meta(ge=1, le=MAX_TOKENS)]
    stream: bool | None = None
    stop_sequences: Annotated[list[StopString], Meta(max_length=MAX_STOPS)] | None = None
    temperature: Annotated[float, Meta(ge=0.0, le=2.0)] | None = None
    top_p: Annotated[float, Meta(gt=0.0, le=1.0)] | None = None
    top_k: Annotated[int, Meta(ge=0, le=2**31 - 1)] | None = None
    seed: Annotated[int, Meta(ge=-(2**63), le=2**63 - 1)] | None = None  # ours
    container: None = None
    inference_geo: None = None

    # Without effect on the answer.
    metadata: dict[str, Any] | None = None
    service_tier: Literal["auto", "standard_only"] | None = None
    diagnostics: dict[str, Any] | None = None

    @property
    def sampled(self) -> MessageSampled:
        """How the answer is drawn."""
        config = self.output_config or OutputConfig()
        same = ("stream", "temperature", "top_p", "top_k", "seed", "max_tokens")
        return MessageSampled(
            **{name: getattr(self, name) for name in same},
            stop=self.stop_sequences,
            output_format=config.format,
        )


def read(model: ServedModel, raw: bytes, asker: Asker) -> CompletionRequest:
    """Understand a body."""
    body = parse(MessagesBody, raw)
    model.check_name(body.model)
    conversation = body.conversation(model)
    eager = [tool["name"] for tool in body.tools or () if tool.get("eager_input_streaming")]
    answer = partial(MessageAnswer, max_tokens=body.max_tokens, eager=frozenset(eager))
    return model.converse(conversation, body.sampled, asker, answer)


def count_tokens(model: ServedModel, raw: bytes) -> bytes:
    """Answer count_tokens, in JSON."""
    body = parse(PromptBody, raw)
    model.check_name(body.model)
    text = model.render(body.conversation(model))
    token_ids = model.encode("messages", text, add_special_tokens=False)
    return msgspec.json.encode({"input_tokens": len(token_ids)})
