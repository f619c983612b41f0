"""The served model: turns prompts and conversations into core requests.

Everything here is synchronous and free of side effects, so the HTTP application can tokenize a long
prompt in a thread.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Final, NamedTuple

from msgspec import structs

from router.api.completions.completion import CompletionRequest, NewAnswer
from router.api.errors import HttpError, invalid
from router.api.requests.bad_words import bad_sequences
from router.api.requests.body import Prompt, Sampled
from router.api.requests.conversation import Conversation
from router.api.requests.defaults import NEUTRAL, Defaults
from router.api.requests.output_constraints import constraint
from router.api.requests.structures import Wanted
from router.api.requests.value_count import MAX_NUMBERS
from router.core.request import Request
from router.text.chat_template import ChatTemplate
from router.text.outline import Outline, outline
from router.text.output_parser import AUTO, AnswerSyntax
from router.text.reasoning import detect
from router.text.stops import StopAutomaton
from router.text.tokenizer import Tokenizer, TooManyTokens
from wire.errors import ErrorCode, WireError, shown
from wire.process.model import fingerprint, vocab_size

# Chat template variables that switch reasoning off or set its effort.
SWITCHES: Final = ("enable_thinking", "thinking")
_EFFORT: Final = "reasoning_effort"
# Shared by all requests, because each new frozenset takes 216 bytes.
_NO_IDS: Final = frozenset[int]()
# Chat template variables that requests must not set.
_RESERVED: Final = frozenset({"messages", "tools", "documents", "add_generation_prompt"})


class RequestContext(NamedTuple):
    """The client of a request, its default seed, and the workers' sequence length limit.

    `client` is the key for fair scheduling.  `seed` is used if the request sets none.
    `max_model_len` is the maximum number of prompt and output tokens of a sequence.
    `cache_salt` returns the salt for workers, given the one that the request sets.
    The router remembers the request as `request_id` unless the body sets another id.
    `begins_trace` means that the router made the `traceparent`.
    """

    client: str
    seed: int
    max_model_len: int
    cache_salt: Callable[[str], str] = str
    request_id: str = ""
    traceparent: str | None = None
    begins_trace: bool = False


class ServedModel:
    """The model of this router, with the tokenizer and chat template from its directory.

    `tool_calls` and `reasoning` name the output parsers (`router.text.output_parser`).
    `trusts_templates` allows requests to send their own chat template.
    `vocab_size` bounds token ids; it is None if neither the config nor the tokenizer says it.
    """

    def __init__(
        self,
        name: str,
        path: Path,
        defaults: Defaults = NEUTRAL,
        *,
        tool_calls: str = AUTO,
        reasoning: str = AUTO,
        trusts_templates: bool = False,
    ) -> None:
        self.name = name
        self._defaults = defaults
        self._fingerprint = f"fp_{fingerprint(path)[:12]}"
        self.tokenizer = Tokenizer.load(path)
        self._template = ChatTemplate.load(path)
        self._trusts_templates = trusts_templates
        self._syntax = AnswerSyntax(
            self._template.source,
            self.tokenizer,
            tool_calls=tool_calls,
            reasoning_marks=reasoning,
        )
        self.vocab_size = vocab_size(path) or self.tokenizer.vocab_size

    @property
    def abilities(self) -> dict[str, Any]:
        """The name of the model, and whether it takes text and chats, for the page."""
        has_text = self.tokenizer.has_text
        return {"model": self.name, "has_text": has_text, "has_chat": has_text and self.has_chat}

    @property
    def has_chat(self) -> bool:
        return bool(self._template.source)

    @property
    def has_reasoning(self) -> bool:
        """Whether the model may generate reasoning before its answer."""
        return self._syntax.has_reasoning

    def check_name(self, name: str | None) -> None:
        """Raise a 404 unless `name` is the served model or None."""
        if name is not None and name != self.name:
            raise HttpError(
                404,
                f"the model {shown(name)} does not exist here; GET /v1/models lists what does",
                code="model_not_found",
                param="model",
            )

    def render(self, conversation: Conversation) -> str:
        if taken := _RESERVED & conversation.variables.keys():
            raise invalid("chat_template_kwargs", f"must not set {min(taken)}")
        template, tools = self._template, conversation.visible_tools
        if conversation.template is not None:
            if not self._trusts_templates:
                raise invalid(
                    "chat_template",
                    "a template can compute for ever, so those of requests are taken only by a "
                    "router with --trust-request-chat-template",
                )
            template = template.replaced(conversation.template)
        if tools and not self._syntax.has_calls:
            raise invalid(
                "tools",
                "the router does not know how this model calls tools: its chat template shows none "
                "of the ways it knows, and --tool-call-parser names none",
            )
        return template.render(
            conversation.messages,
            tools=[tool.described() for tool in tools],
            documents=conversation.documents,
            add_generation_prompt=conversation.add_generation_prompt,
            continue_final_message=conversation.continue_final_message,
            variables=conversation.variables,
        )

    def effort(self, word: str) -> dict[str, Any] | None:
        """Return the chat template variables that set this reasoning effort.

        Return None if the template does not support it.  Any template supports "medium", and one
        without reasoning ignores the effort.
        """
        if word != "none" and self._template_has(_EFFORT):
            return {_EFFORT: word}
        known = [name for name in SWITCHES if self._template_has(name)] if word == "none" else []
        is_nothing = word == "medium" or detect(self._template.source) is None
        return dict.fromkeys(known, False) if known or is_nothing else None

    def variables_of_effort(self, param: str, word: str | None) -> dict[str, Any]:
        """Return the variables for the effort in field `param`; a null field needs none."""
        variables = {} if word is None else self.effort(word)
        if variables is None:
            raise invalid(param, f"this model's chat template has no way to say {word}")
        return variables

    def _template_has(self, variable: str) -> bool:
        return re.search(rf"\b{variable}\b", self._template.source) is not None

    def conversation_request(
        self, conversation: Conversation, body: Sampled, context: RequestContext, answer: NewAnswer
    ) -> CompletionRequest:
        """Convert a body with a conversation to core requests."""
        text = self.render(conversation)
        special = conversation.add_special_tokens
        token_ids = self.prompt(text, body, context, add_special_tokens=special)
        is_reasoning = self._syntax.has_open_reasoning(text, conversation.continued)
        wanted = constraint(self._syntax, conversation, body.wanted, is_reasoning=is_reasoning)
        has_tools = bool(conversation.visible_tools)
        echo = conversation.continued if conversation.is_echoed else ""
        parts = None
        if body.truncate_prompt_tokens is None:
            names = [tool.name for tool in conversation.visible_tools]
            parts = outline(self.tokenizer, text, conversation.messages, names)
        request = self.request(body, [(token_ids, echo)], context, answer, wanted, parts)
        request = structs.replace(request, shows_reasoning=conversation.shows_reasoning)
        if has_tools or self._syntax.has_reasoning:
            reader = partial(
                self._syntax.reader,
                is_reasoning=is_reasoning,
                has_tools=has_tools,
                max_calls=None if conversation.has_parallel_calls else 1,
            )
            shown = request.shown | self._syntax.shown(has_tools=has_tools)
            request = structs.replace(request, reader=reader, shown=shown)
        return request

    def encode(self, param: str, text: str, *, add_special_tokens: bool) -> list[int]:
        """Tokenize the text of field `param`, which may be longer than the context."""
        encode = partial(self.tokenizer.encode, add_special_tokens=add_special_tokens)
        try:
            return encode(text, max_tokens=MAX_NUMBERS)
        except TooManyTokens as count:
            raise invalid(param, f"has {count} tokens, over {MAX_NUMBERS}") from None

    def prompt(
        self, prompt: Prompt, body: Sampled, context: RequestContext, *, add_special_tokens: bool
    ) -> Sequence[int]:
        """Return the token ids of a prompt, truncated as the body requests."""
        num_new = 1 if body.token_limit is None else body.token_limit
        # A prompt that is only echoed may fill the context, as no generated token follows it.
        limit, num_kept = context.max_model_len - min(num_new, 1), body.truncate_prompt_tokens
        if num_kept is not None and num_kept > limit:
            raise invalid("truncate_prompt_tokens", f"the context has room for {limit} tokens")
        max_tokens = limit if num_kept is None else MAX_NUMBERS
        try:
            token_ids = self._token_ids(prompt, max_tokens, add_special_tokens=add_special_tokens)
        except TooManyTokens as count:
            if num_kept is not None:
                raise invalid(
                    "truncate_prompt_tokens",
                    f"the prompt has {count} tokens; one that is to be cut may have {MAX_NUMBERS}",
                ) from None
            more = ", and at least one more is to be generated" if num_new else ""
            raise WireError(
                ErrorCode.CONTEXT_LENGTH_EXCEEDED,
                f"the model's context length is {context.max_model_len} tokens; the prompt has "
                f"{count}{more}",
            ) from None
        if num_kept is None:
            return token_ids
        if num_kept == -1:
            num_kept = max(context.max_model_len - num_new, 1)
        return token_ids[-num_kept:] if body.truncation_side == "left" else token_ids[:num_kept]

    def _token_ids(
        self, prompt: Prompt, max_tokens: int, *, add_special_tokens: bool
    ) -> Sequence[int]:
        if isinstance(prompt, str):
            return self.tokenizer.encode(
                prompt, add_special_tokens=add_special_tokens, max_tokens=max_tokens
            )
        if len(prompt) > max_tokens:
            raise TooManyTokens(str(len(prompt)))
        if self.vocab_size is not None and max(prompt) >= self.vocab_size:
            raise invalid("prompt", f"token ids must be below {self.vocab_size}")
        return prompt

    def request(
        self,
        body: Sampled,
        prompts: Sequence[tuple[Sequence[int], str]],
        context: RequestContext,
        answer: NewAnswer,
        wanted: Wanted | None,
        parts: Outline | None = None,
    ) -> CompletionRequest:
        """Convert a body to core requests, one for each choice of each prompt.

        `prompts` are token ids, each with the text to echo.  The structure `wanted` is only stored:
        `CompletionRequest.constrained_to` applies it later.  `parts` are those of the only prompt.
        """
        if body.stops and not self.tokenizer.has_text:
            raise invalid("stop", "needs a tokenizer, and this model has none; use stop_token_ids")
        self._check_ids("logit_bias", [token_id for token_id, _ in body.biases])
        self._check_ids("allowed_token_ids", body.allowed_token_ids or ())
        structure = "" if wanted is None else wanted.param
        bad = bad_sequences(self.tokenizer, body.bad_words or (), structure)
        client, begins_trace = context.client, context.begins_trace
        name = body.request_id or context.request_id
        shared: dict[str, Any] = {"bad_sequences": bad, "traceparent": context.traceparent}
        shared["cache_salt"] = context.cache_salt(body.cache_salt or "")
        requests = []
        for token_ids, echo in prompts:
            # Workers always generate a token; with max_tokens 0 the response omits it.
            limit = max(self._max_new_tokens(body, context.max_model_len - len(token_ids)), 1)
            options = body.options(seed=context.seed, max_tokens=limit, defaults=self._defaults)
            ids = tuple(token_ids)
            for choice in range(body.num_choices):
                of_choice = structs.replace(options, choice=choice, **shared)
                request = Request(ids, of_choice, limit - 1, client, name, parts, begins_trace)
                requests.append((request, echo))
        return CompletionRequest(
            requests=requests,
            answer=answer,
            num_choices=body.num_choices,
            wanted=wanted,
            tokenizer=self.tokenizer,
            request_id=body.request_id or "",
            fingerprint=self._fingerprint,
            stops=StopAutomaton(body.stops) if body.stops else None,
            min_tokens=body.min_tokens or 0,
            stop_token_ids=frozenset(body.stop_token_ids) if body.stop_token_ids else _NO_IDS,
            has_stop_text=bool(body.include_stop_str_in_output),
            shown=self.tokenizer.special_ids if body.skip_special_tokens is False else _NO_IDS,
            is_streamed=bool(body.stream),
            is_echo_only=body.token_limit == 0,
            has_logprobs=body.num_logprobs is not None,
            has_echo_logprobs=body.has_echo_logprobs,
            has_prompt_logprobs=body.prompt_logprobs is not None,
            has_ids_as_names=bool(body.return_tokens_as_token_ids),
            has_ids=bool(body.return_token_ids),
            has_usage=body.wants_usage,
            has_running_usage=body.wants_usage_always,
            has_baton_usage=bool(body.baton_usage),
        )

    def _max_new_tokens(self, body: Sampled, num_free: int) -> int:
        """Return how many tokens to generate at most, with `num_free` left in the context."""
        if body.token_limit is not None:
            return min(body.token_limit, num_free) if body.is_cut_to_context else body.token_limit
        return min(num_free, self._defaults.max_tokens or num_free)

    def _check_ids(self, param: str, token_ids: Iterable[int]) -> None:
        largest = max(token_ids, default=0)
        if self.vocab_size is not None and largest >= self.vocab_size:
            raise invalid(param, f"token ids must be below {self.vocab_size}, not {largest}")
