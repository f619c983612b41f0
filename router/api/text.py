"""POST /v1/completions: generates the text after a prompt of text or token ids."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, Final

from msgspec import Meta

from router.api.completions.chunks import CompletionAnswer, ending, prompt_ids
from router.api.completions.completion import Choice, CompletionRequest
from router.api.completions.deltas import Delta
from router.api.completions.logprobs import completion_logprobs, encoded, prompt_logprobs
from router.api.errors import invalid
from router.api.model import RequestContext, ServedModel
from router.api.requests.body import MAX_CHOICES, Prompt, Sampled, parse
from router.api.requests.unsupported_fields import COMPLETIONS
from wire.options import NumTop, TokenId

DEFAULT_MAX_TOKENS: Final = 16


class CompletionBody(Sampled, kw_only=True):
    """The request body of POST /v1/completions."""

    prompt: str | list[str | TokenId | list[TokenId]]
    max_tokens: Annotated[int, Meta(ge=0, le=2**31 - 1)] | None = None
    echo: bool | None = None
    logprobs: NumTop | None = None
    best_of: int | None = None

    @property
    def token_limit(self) -> int | None:
        return DEFAULT_MAX_TOKENS if self.max_tokens is None else self.max_tokens

    @property
    def num_logprobs(self) -> int | None:
        return self.logprobs

    @property
    def num_prompt_logprobs(self) -> int | None:
        return self.logprobs if self.has_echo_logprobs else self.prompt_logprobs

    @property
    def has_echo_logprobs(self) -> bool:
        return bool(self.echo) and self.logprobs is not None

    @property
    def prompts(self) -> list[Prompt]:
        """The prompts as a list; each is text or token ids."""
        if isinstance(self.prompt, str):
            return [self.prompt]
        if set(map(type, self.prompt)) == {int}:
            return [tuple(self.prompt)]  # type: ignore[arg-type]
        prompts: list[Prompt] = []
        for index, item in enumerate(self.prompt):
            if isinstance(item, int):
                raise invalid("prompt", "mixes token ids with whole prompts")
            if not item:
                raise invalid(f"prompt[{index}]", "is empty")
            prompts.append(item if isinstance(item, str) else tuple(item))
        if not prompts:
            raise invalid("prompt", "is empty")
        return prompts

    def check(self) -> None:
        super().check()
        if self.has_echo_logprobs and self.prompt_logprobs not in (None, self.logprobs):
            raise invalid("prompt_logprobs", "must equal logprobs where the prompt is echoed")
        if self.best_of is not None and self.best_of != self.num_choices:
            raise invalid("best_of", f"must equal n, which is {self.num_choices}")
        if self.max_tokens == 0 and not self.echo:
            raise invalid("max_tokens", "must be at least 1 without echo")


def read(model: ServedModel, raw: bytes, context: RequestContext) -> CompletionRequest:
    """Parse and validate a request body, and return its core requests."""
    body = parse(CompletionBody, raw, COMPLETIONS)
    model.check_name(body.model)
    special = body.add_special_tokens is not False
    sent, prompts = body.prompts, []
    if len(sent) * body.num_choices > MAX_CHOICES:
        raise invalid("prompt", f"times n is over {MAX_CHOICES} choices")
    for prompt in sent:
        token_ids = model.prompt(prompt, body, context, add_special_tokens=special)
        prompts.append((token_ids, _echo(model, body, prompt, token_ids)))
    return model.request(body, prompts, context, TextAnswer, body.wanted)


def _echo(
    model: ServedModel, body: CompletionBody, prompt: Prompt, token_ids: Sequence[int]
) -> str:
    if not body.echo:
        return ""
    if isinstance(prompt, str) and body.truncate_prompt_tokens is None:
        return prompt
    # Special tokens that the client sent as ids are part of its prompt.
    return model.tokenizer.decode(token_ids, skip_special_tokens=isinstance(prompt, str))


class TextAnswer(CompletionAnswer):
    """Renders a text completion as one body or as chunks."""

    id_prefix = "cmpl"
    kind = chunk_kind = "text_completion"

    def entry(self, choice: Choice, delta: Delta) -> dict[str, Any]:
        return {
            "index": choice.index,
            "text": choice.prefix + delta.text,
            "logprobs": encoded(completion_logprobs, choice, delta.scores),
            **ending(choice, delta),
            "prompt_token_ids": None,
            **prompt_ids(choice),
            **prompt_logprobs(choice, delta),
        }

    def delta(self, choice: Choice, delta: Delta, *, is_first: bool) -> dict[str, Any]:
        if not is_first:
            return {"text": delta.text}
        return {"text": choice.prefix + delta.text, **prompt_ids(choice)}

    logprobs = staticmethod(completion_logprobs)
