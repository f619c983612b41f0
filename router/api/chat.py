"""POST /v1/chat/completions: a conversation, and the assistant's next message."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from msgspec import Meta, Struct

from router.api.completions.chunks import CompletionAnswer, ending, prompt_ids
from router.api.completions.completion import Choice, CompletionRequest
from router.api.completions.deltas import Delta
from router.api.completions.logprobs import chat_logprobs, encoded, prompt_logprobs
from router.api.errors import invalid
from router.api.model import Asker, ServedModel
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
    """A tool of type function: its name, and the JSON schema of its arguments."""

    name: ToolName
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class ToolBody(Struct):
    """One of `tools`."""

    function: FunctionBody
    type: Literal["function"] = "function"


class FunctionName(Struct):
    """The function of a `tool_choice`."""

    name: str


class NamedTool(Struct, tag_field="type", tag="function"):
    """A `tool_choice` that names one."""

    function: FunctionName


class AllowedTools(Struct):
    """Those of `tools` that may be called, or must be."""

    mode: Literal["auto", "required"]
    tools: Annotated[list[NamedTool], Meta(min_length=1, max_length=MAX_TOOLS)]


class AllowedChoice(Struct, tag_field="type", tag="allowed_tools"):
    """A `tool_choice` that names several."""

    allowed_tools: AllowedTools


class ChatBody(Sampled, kw_only=True):
    """POST /v1/chat/completions."""

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


def read(model: ServedModel, raw: bytes, asker: Asker) -> CompletionRequest:
    """Understand a body."""
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
    return model.converse(conversation, body, asker, answer)


class ChatAnswer(CompletionAnswer):
    """A chat completion, whole or as chunks."""

    id_prefix = "chatcmpl"
    kind, chunk_kind = "chat.completion", "chat.completion.chunk"
    # What stands for the content of a message that only calls tools.
    no_content: str | None = None

    def entry(self, choice: Choice, piece: Delta) -> dict[str, Any]:
        return {
            "index": choice.index,
            "message": _message(piece, choice.prefix, self.no_content),
            "logprobs": encoded(chat_logprobs, choice, piece.scores),
            **ending(choice, piece),
        }

    def delta(self, choice: Choice, piece: Delta, *, is_first: bool) -> dict[str, Any]:
        delta = _said(piece)
        if is_first:
            delta["content"] = choice.prefix + delta.get("content", "")
            return {"delta": {"role": "assistant"} | delta}
        if not delta and piece.finish_reason is None:
            delta = {"content": ""}
        return {"delta": delta}

    def about_prompt(self, choice: Choice, piece: Delta) -> dict[str, Any]:
        scores = {} if choice.request.is_streamed else prompt_logprobs(choice, piece)
        return prompt_ids(choice) | scores

    logprobs = staticmethod(chat_logprobs)


class ForcedAnswer(ChatAnswer):
    """The answer where a tool must be called: clients of vLLM take the length of its content."""

    no_content = ""


def _message(piece: Delta, prefix: str, no_content: str | None) -> dict[str, Any]:
    said = _said(piece)
    if prefix:
        said["content"] = prefix + said.get("content", "")
    calls = said.get("tool_calls", ())
    for call in calls:
        del call["index"]
    empty = no_content if calls else ""
    return {"role": "assistant", "content": empty, "refusal": None, "annotations": []} | said


def _said(piece: Delta) -> dict[str, Any]:
    """Return what a piece adds to a message: content, reasoning, tool calls."""
    said: dict[str, Any] = {}
    calls: dict[int, dict[str, Any]] = {}
    for part in (Content(piece.text),) if piece.parts is None else piece.parts:
        match part:
            case Content(text) if text:
                said["content"] = said.get("content", "") + text
            case Reasoning(text) if text:
                said["reasoning_content"] = said.get("reasoning_content", "") + text
            case CallStart(index, name):
                function = {"name": name, "arguments": ""}
                about = {"id": new_call_id(), "type": "function", "function": function}
                calls[index] = {"index": index, **about}
            case CallArguments(index, text):
                call = calls.setdefault(index, {"index": index, "function": {"arguments": ""}})
                call["function"]["arguments"] += text
    return said | {"tool_calls": list(calls.values())} if calls else said
