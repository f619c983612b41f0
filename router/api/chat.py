"""POST /v1/chat/completions: generates the assistant's next message in a conversation."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from msgspec import Meta, Struct

from router.api.completions.chunks import CompletionAnswer, ending, prompt_ids
from router.api.completions.completion import Choice, CompletionRequest
from router.api.completions.deltas import Delta
from router.api.completions.logprobs import chat_logprobs, encoded, prompt_logprobs
from router.api.errors import invalid
from router.api.model import RequestContext, ServedModel
from router.api.requests.body import Positive, Sampled, parse
from router.api.requests.conversation import (
    MAX_TOOLS,
    ChatMessage,
    Conversation,
    Effort,
    Tool,
    ToolChoice,
    ToolName,
    check_tools,
    flat_messages,
    has_generation_prompt,
    new_call_id,
    tool_choice,
)
from router.api.requests.unsupported_fields import CHAT
from router.text.output_parts import CallArguments, CallStart, Content, Reasoning
from wire.options import NumTop


class FunctionBody(Struct):
    """The function of a tool; `parameters` is the JSON schema of its arguments."""

    name: ToolName
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class ToolBody(Struct):
    """An entry of `tools`."""

    function: FunctionBody
    type: Literal["function"] = "function"


class FunctionName(Struct):
    """The function that a `tool_choice` names."""

    name: str


class NamedTool(Struct, tag_field="type", tag="function"):
    """A `tool_choice` that names one tool, or an entry of `allowed_tools`."""

    function: FunctionName


class AllowedTools(Struct):
    """The subset of `tools` that the model may call (auto) or must call (required)."""

    mode: Literal["auto", "required"]
    tools: Annotated[list[NamedTool], Meta(min_length=1, max_length=MAX_TOOLS)]


class AllowedChoice(Struct, tag_field="type", tag="allowed_tools"):
    """A `tool_choice` that names several tools."""

    allowed_tools: AllowedTools


class ChatBody(Sampled, kw_only=True):
    """The request body of POST /v1/chat/completions."""

    messages: Annotated[list[ChatMessage], Meta(min_length=1)]
    max_completion_tokens: Positive | None = None
    logprobs: bool | None = None
    top_logprobs: NumTop | None = None
    echo: bool | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template: str | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    documents: list[dict[str, str]] | None = None

    tools: Annotated[list[ToolBody], Meta(max_length=MAX_TOOLS)] | None = None
    tool_choice: str | NamedTool | AllowedChoice | None = None
    parallel_tool_calls: bool | None = None
    reasoning_effort: Effort | None = None
    include_reasoning: bool | None = None

    @property
    def token_limit(self) -> int | None:
        return self.max_completion_tokens or self.max_tokens

    @property
    def num_logprobs(self) -> int | None:
        return self.top_logprobs or 0 if self.logprobs else None

    def check(self) -> None:
        super().check()
        if self.top_logprobs and not self.logprobs:
            raise invalid("top_logprobs", "only allowed when logprobs is true")
        self.messages = flat_messages(self.messages)
        place = "tool_choice.allowed_tools.tools[{}].function.name"
        check_tools(self.known_tools, self.choice_of_tool, place)

    @property
    def known_tools(self) -> list[Tool]:
        functions = [tool.function for tool in self.tools or ()]
        return [
            Tool(it.name, it.description or "", it.parameters, bool(it.strict)) for it in functions
        ]

    @property
    def choice_of_tool(self) -> ToolChoice:
        match self.tool_choice:
            case NamedTool(function):
                return ToolChoice("named", (function.name,))
            case AllowedChoice(allowed):
                return ToolChoice(allowed.mode, tuple([it.function.name for it in allowed.tools]))
            case word:
                return tool_choice(word)

    @property
    def has_generation_prompt(self) -> bool:
        return has_generation_prompt(self.add_generation_prompt, self.continue_final_message)


def read(model: ServedModel, raw: bytes, context: RequestContext) -> CompletionRequest:
    """Parse and validate a body; return its core requests and the class that renders the answer."""
    body = parse(ChatBody, raw, CHAT)
    model.check_name(body.model)
    conversation = Conversation(
        messages=body.messages,
        tools=body.known_tools,
        tool_choice=body.choice_of_tool,
        has_parallel_calls=body.parallel_tool_calls is not False,
        add_generation_prompt=body.has_generation_prompt,
        add_special_tokens=bool(body.add_special_tokens),
        continue_final_message=bool(body.continue_final_message),
        is_echoed=bool(body.echo),
        template=body.chat_template,
        documents=body.documents or (),
        variables={
            **model.variables_of_effort("reasoning_effort", body.reasoning_effort),
            **(body.chat_template_kwargs or {}),
        },
        shows_reasoning=body.include_reasoning is not False,
    )
    is_forced = conversation.tool_choice.mode in ("required", "named")
    answer = ForcedAnswer if is_forced else ChatAnswer
    return model.conversation_request(conversation, body, context, answer)


class ChatAnswer(CompletionAnswer):
    """Renders a chat completion as one body or as chunks."""

    id_prefix = "chatcmpl"
    kind, chunk_kind = "chat.completion", "chat.completion.chunk"
    # The content of a message that consists of tool calls only.
    no_content: str | None = None

    def entry(self, choice: Choice, delta: Delta) -> dict[str, Any]:
        return {
            "index": choice.index,
            "message": _message(delta, choice.prefix, self.no_content),
            "logprobs": encoded(chat_logprobs, choice, delta.scores),
            **ending(choice, delta),
        }

    def delta(self, choice: Choice, delta: Delta, *, is_first: bool) -> dict[str, Any]:
        fields = _message_fields(delta)
        if is_first:
            fields["content"] = choice.prefix + fields.get("content", "")
            return {"delta": {"role": "assistant"} | fields}
        if not fields and delta.finish_reason is None:
            fields = {"content": ""}
        return {"delta": fields}

    def about_prompt(self, choice: Choice, delta: Delta) -> dict[str, Any]:
        scores = {} if choice.request.is_streamed else prompt_logprobs(choice, delta)
        return prompt_ids(choice) | scores

    logprobs = staticmethod(chat_logprobs)


class ForcedAnswer(ChatAnswer):
    """Renders an answer that must call a tool: vLLM's clients expect content "", not null."""

    no_content = ""


def _message(delta: Delta, prefix: str, no_content: str | None) -> dict[str, Any]:
    message = _message_fields(delta)
    if prefix:
        message["content"] = prefix + message.get("content", "")
    calls = message.get("tool_calls", ())
    for call in calls:
        del call["index"]
    empty = no_content if calls else ""
    return {"role": "assistant", "content": empty, "refusal": None, "annotations": []} | message


def _message_fields(delta: Delta) -> dict[str, Any]:
    """Return the fields that a delta adds to a message: content, reasoning and tool calls."""
    fields: dict[str, Any] = {}
    calls: dict[int, dict[str, Any]] = {}
    for part in (Content(delta.text),) if delta.parts is None else delta.parts:
        match part:
            case Content(text) if text:
                fields["content"] = fields.get("content", "") + text
            case Reasoning(text) if text:
                fields["reasoning_content"] = fields.get("reasoning_content", "") + text
            case CallStart(index, name):
                function = {"name": name, "arguments": ""}
                head = {"index": index, "id": new_call_id(), "type": "function"}
                calls[index] = head | {"function": function}
            case CallArguments(index, text):
                call = calls.setdefault(index, {"index": index, "function": {"arguments": ""}})
                call["function"]["arguments"] += text
    return fields | {"tool_calls": list(calls.values())} if calls else fields
