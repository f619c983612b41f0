"""From a request body to the requests of the core: model, prompt, tokens, options.

Synchronous and without side effects, so that the HTTP application can run a long prompt in a
thread.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Final

import msgspec

from router.core.request import Request
from router.http.asgi import HttpError
from router.http.bodies import (
    ChatBody,
    CompletionBody,
    Prompt,
    Sampled,
    parse,
)
from router.http.choice import OutputOptions
from router.http.messages import flat_messages, invalid
from router.http.values import MAX_NUMBERS, check_values
from router.model import vocab_size
from router.text.chat_template import ChatTemplate
from router.text.stops import StopAutomaton
from router.text.tokenizer import Tokenizer, TooManyTokens
from wire.errors import ErrorCode, WireError, shown
from wire.options import TokenId

# Variables of a chat template that are the server's to set.
_RESERVED: Final = frozenset({"messages", "add_generation_prompt"})


class TokenizeBody(msgspec.Struct, kw_only=True):
    """POST /tokenize: a prompt or messages."""

    model: str | None = None
    prompt: str | None = None
    messages: Annotated[list[dict[str, Any]], msgspec.Meta(min_length=1)] | None = None
    add_special_tokens: bool | None = None
    add_generation_prompt: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None

    def check(self) -> None:
        if (self.prompt is None) == (self.messages is None):
            raise invalid("prompt", "or messages must be given, and not both")
        if self.messages is not None:
            self.messages = flat_messages(self.messages)


class DetokenizeBody(msgspec.Struct, kw_only=True):
    """POST /detokenize."""

    tokens: list[TokenId]
    model: str | None = None

    def check(self) -> None:
        """Nothing beyond the types."""


@dataclass(frozen=True, slots=True)
class RequestContext:
    """Who asks, the seed for those who name none, and the longest sequence the workers take."""

    client: str
    seed: int
    max_model_len: int


@dataclass(frozen=True, slots=True)
class CompletionRequest:
    """One HTTP request, understood: a core request and the text to echo for every choice."""

    body: Sampled
    output: OutputOptions
    requests: Sequence[tuple[Request, str]]

    @property
    def is_chat(self) -> bool:
        return isinstance(self.body, ChatBody)


class RequestParser:
    """Reads bodies for one model."""

    def __init__(self, model_name: str, model_path: Path) -> None:
        self._model_name = model_name
        self._tokenizer = Tokenizer.load(model_path)
        self._template = ChatTemplate.load(model_path)
        self._vocab_size = vocab_size(model_path) or self._tokenizer.vocab_size

    @property
    def has_text(self) -> bool:
        return self._tokenizer.has_text

    def completion(self, raw: bytes, context: RequestContext) -> CompletionRequest:
        """Read the body of /v1/completions.

        Raises:
            HttpError, WireError: It asks for what it cannot have.
        """
        check_values(raw)
        body = parse(CompletionBody, raw)
        self.check_model(body.model)
        prompts = []
        for prompt in body.prompts:
            special = body.add_special_tokens is not False
            token_ids = self._token_ids(prompt, context.max_model_len, add_special_tokens=special)
            prompts.append((token_ids, self._echo(body, prompt)))
        return self._wanted(body, prompts, context)

    def chat(self, raw: bytes, context: RequestContext) -> CompletionRequest:
        """Read the body of /v1/chat/completions.

        Raises:
            HttpError, WireError: It asks for what it cannot have.
        """
        check_values(raw)
        body = parse(ChatBody, raw)
        self.check_model(body.model)
        text = self._render(body, body.messages)
        special = bool(body.add_special_tokens)  # The template writes them itself.
        token_ids = self._token_ids(text, context.max_model_len, add_special_tokens=special)
        return self._wanted(body, [(token_ids, "")], context)

    def tokenize(self, raw: bytes, max_model_len: int | None) -> bytes:
        """Answer /tokenize, in JSON.

        Raises:
            HttpError, WireError: There is no tokenizer, or no template, or a bad body.
        """
        check_values(raw)
        body = parse(TokenizeBody, raw)
        self.check_model(body.model)
        if body.messages is not None:
            text, special = self._render(body, body.messages), bool(body.add_special_tokens)
        else:
            text, special = body.prompt or "", body.add_special_tokens is not False
        try:
            token_ids = self._tokenizer.encode(
                text, add_special_tokens=special, max_tokens=MAX_NUMBERS
            )
        except TooManyTokens as count:
            raise invalid("prompt", f"has {count} tokens, over {MAX_NUMBERS}") from None
        answer = {"tokens": token_ids, "count": len(token_ids), "max_model_len": max_model_len}
        return msgspec.json.encode(answer)

    def detokenize(self, raw: bytes) -> bytes:
        """Answer /detokenize, in JSON; unknown ids give no text.

        Raises:
            HttpError: A bad body.
        """
        check_values(raw)
        body = parse(DetokenizeBody, raw)
        self.check_model(body.model)
        text = self._tokenizer.decode(body.tokens, skip_special_tokens=False)
        return msgspec.json.encode({"prompt": text})

    def check_model(self, model: str | None) -> None:
        """Refuse any model but ours; no name at all means ours.

        Raises:
            HttpError: 404 model_not_found.
        """
        if model is not None and model != self._model_name:
            raise HttpError(
                404,
                f"the model {shown(model)} does not exist here; GET /v1/models lists what does",
                code="model_not_found",
                param="model",
            )

    def _wanted(
        self, body: Sampled, prompts: Sequence[tuple[Sequence[int], str]], context: RequestContext
    ) -> CompletionRequest:
        if body.stops and not self._tokenizer.has_text:
            raise invalid("stop", "needs a tokenizer, and this model has none; use stop_token_ids")
        self._check_biases(body)
        requests = []
        for token_ids, echo in prompts:
            # Where none is wanted, one is drawn all the same, and not shown.
            limit = context.max_model_len - len(token_ids)
            max_tokens = max(limit if body.token_limit is None else body.token_limit, 1)
            for choice in range(body.num_choices):
                options = body.options(choice=choice, seed=context.seed, max_tokens=max_tokens)
                request = Request(tuple(token_ids), options, max_tokens - 1, context.client)
                requests.append((request, echo))
        output = OutputOptions(
            tokenizer=self._tokenizer,
            stops=StopAutomaton(body.stops) if body.stops else None,
            min_tokens=body.min_tokens or 0,
            has_logprobs=body.num_logprobs is not None,
            is_echo_only=body.token_limit == 0,
            has_ids=bool(body.return_token_ids),
            is_eager=bool(body.stream or body.stops),
        )
        return CompletionRequest(body, output, requests)

    def _token_ids(
        self, prompt: Prompt, max_model_len: int, *, add_special_tokens: bool
    ) -> Sequence[int]:
        """The ids of a prompt that leaves the context room for a token at least."""
        try:
            if isinstance(prompt, str):
                return self._tokenizer.encode(
                    prompt,
                    add_special_tokens=add_special_tokens,
                    max_tokens=max_model_len - 1,
                )
            if len(prompt) >= max_model_len:
                raise TooManyTokens(str(len(prompt)))
        except TooManyTokens as count:
            raise WireError(
                ErrorCode.CONTEXT_LENGTH_EXCEEDED,
                f"the model's context length is {max_model_len} tokens; the prompt has {count}, "
                "and at least one more is to be generated",
            ) from None
        if self._vocab_size is not None and max(prompt) >= self._vocab_size:
            raise invalid("prompt", f"token ids must be below {self._vocab_size}")
        return prompt

    def _check_biases(self, body: Sampled) -> None:
        largest = max([token_id for token_id, _ in body.biases], default=0)
        if self._vocab_size is not None and largest >= self._vocab_size:
            raise invalid("logit_bias", f"token ids must be below {self._vocab_size}")

    def _echo(self, body: CompletionBody, prompt: Prompt) -> str:
        if not body.echo:
            return ""
        return prompt if isinstance(prompt, str) else self._tokenizer.decode(prompt)

    def _render(self, body: ChatBody | TokenizeBody, messages: list[dict[str, Any]]) -> str:
        variables = body.chat_template_kwargs or {}
        if taken := _RESERVED & variables.keys():
            raise invalid("chat_template_kwargs", f"must not set {min(taken)}")
        return self._template.render(
            messages,
            add_generation_prompt=body.add_generation_prompt is not False,
            variables=variables,
        )
