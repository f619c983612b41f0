"""From a request body to the requests of the core: model, prompt, tokens, options.

Synchronous and without side effects, so that the HTTP application can run a long prompt in a
thread.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final, TypeVar

import msgspec

from router.core.request import Request
from router.http.asgi import HttpError
from router.http.bodies import (
    Body,
    ChatBody,
    CompletionBody,
    DetokenizeBody,
    Prompt,
    Sampled,
    TokenizeBody,
    invalid,
    parse,
)
from router.http.completion import CompletionRequest
from router.http.limits import MAX_NUMBERS, check_values
from router.text.chat_template import ChatTemplate
from router.text.stops import StopAutomaton
from router.text.tokenizer import Tokenizer, TooManyTokens
from wire.errors import ErrorCode, WireError, shown
from wire.process.model import vocab_size

# Variables of a chat template that only the router sets.
_RESERVED: Final = frozenset({"messages", "add_generation_prompt"})


_Body = TypeVar("_Body", bound=Body)


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

    def completion(
        self, raw: bytes, *, asker: str, seed: int, max_model_len: int
    ) -> CompletionRequest:
        """Read the body of /v1/completions.

        `seed` is for who names none, `max_model_len` the longest sequence that the workers take.

        Raises:
            HttpError, WireError: It asks for what it cannot have.
        """
        body = self._read(CompletionBody, raw)
        special = body.add_special_tokens is not False
        prompts = [
            (
                self._token_ids(each, max_model_len, add_special_tokens=special),
                self._echo(body, each),
            )
            for each in body.prompts
        ]
        return self._asked(body, prompts, asker, seed, max_model_len)

    def chat(self, raw: bytes, *, asker: str, seed: int, max_model_len: int) -> CompletionRequest:
        """Read the body of /v1/chat/completions; the same as `completion` otherwise."""
        body = self._read(ChatBody, raw)
        text = self._render(body, body.messages)
        special = bool(body.add_special_tokens)  # The template writes them itself.
        token_ids = self._token_ids(text, max_model_len, add_special_tokens=special)
        return self._asked(body, [(token_ids, "")], asker, seed, max_model_len)

    def tokenize(self, raw: bytes, max_model_len: int | None) -> bytes:
        """Answer /tokenize, in JSON.

        Raises:
            HttpError, WireError: There is no tokenizer, or no template, or a bad body.
        """
        body = self._read(TokenizeBody, raw)
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
        body = self._read(DetokenizeBody, raw)
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

    def _read(self, kind: type[_Body], raw: bytes) -> _Body:
        check_values(raw)
        body = parse(kind, raw)
        self.check_model(body.model)
        return body

    def _asked(
        self,
        body: Sampled,
        prompts: Sequence[tuple[Sequence[int], str]],
        asker: str,
        seed: int,
        max_model_len: int,
    ) -> CompletionRequest:
        if body.stops and not self._tokenizer.has_text:
            raise invalid("stop", "needs a tokenizer, and this model has none; use stop_token_ids")
        self._check_biases(body)
        requests = []
        for token_ids, echo in prompts:
            # Workers always generate a token; where none is asked for, it is not shown.
            limit = max_model_len - len(token_ids)
            max_tokens = max(limit if body.token_limit is None else body.token_limit, 1)
            for choice in range(body.num_choices):
                options = body.options(choice=choice, seed=seed, max_tokens=max_tokens)
                requests.append((Request(tuple(token_ids), options, max_tokens - 1, asker), echo))
        return CompletionRequest(
            requests=requests,
            num_choices=body.num_choices,
            tokenizer=self._tokenizer,
            stops=StopAutomaton(body.stops) if body.stops else None,
            min_tokens=body.min_tokens or 0,
            is_chat=isinstance(body, ChatBody),
            is_streamed=bool(body.stream),
            is_echo_only=body.token_limit == 0,
            has_logprobs=body.num_logprobs is not None,
            has_ids=bool(body.return_token_ids),
            has_usage=body.wants_usage,
            has_running_usage=body.wants_usage and body.wants_usage_always,
        )

    def _token_ids(
        self, prompt: Prompt, max_model_len: int, *, add_special_tokens: bool
    ) -> Sequence[int]:
        """The ids of a prompt; one that leaves no room for a token after it is refused."""
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
