"""The request bodies of the OpenAI API: fields, ranges, and the options they become.

Unknown fields are ignored, as clients expect.  A known field that would change the answer and is
not supported is refused in words: an answer that silently is not what was asked for is worse than
none.  `null` always means the default.
"""

from __future__ import annotations

import re
from typing import Annotated, Any, Final, Protocol, TypeVar

import msgspec
from msgspec import Meta, Struct, structs

from router.http.asgi import HttpError
from wire.options import (
    MAX_LOGIT_BIASES,
    MAX_STOP_TOKEN_IDS,
    Bias,
    NumTop,
    Options,
    Penalty,
    RepetitionPenalty,
    TokenId,
)

MAX_CHOICES: Final = 128
MAX_STOPS: Final = 16
DEFAULT_COMPLETION_TOKENS: Final = 16
# Of chat messages; `function` is the older name of `tool`.
ROLES: Final = ("system", "developer", "user", "assistant", "tool", "function")

Positive = Annotated[int, Meta(ge=1, le=2**31 - 1)]
StopString = Annotated[str, Meta(min_length=1, max_length=1024)]
Prompt = str | tuple[int, ...]


class StreamOptions(Struct):
    """`stream_options`; `continuous_usage_stats` is vLLM's, load generators send it."""

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None


class Sampled(Struct, kw_only=True):
    """What both kinds of completion share."""

    model: str | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    n: Annotated[int, Meta(ge=1, le=MAX_CHOICES)] | None = None
    temperature: Annotated[float, Meta(ge=0.0, le=2.0)] | None = None
    top_p: Annotated[float, Meta(gt=0.0, le=1.0)] | None = None
    top_k: Annotated[int, Meta(ge=-1, le=2**31 - 1)] | None = None
    min_p: Annotated[float, Meta(ge=0.0, le=1.0)] | None = None
    seed: Annotated[int, Meta(ge=-(2**63), le=2**63 - 1)] | None = None
    stop: StopString | Annotated[list[StopString], Meta(max_length=MAX_STOPS)] | None = None
    stop_token_ids: Annotated[list[TokenId], Meta(max_length=MAX_STOP_TOKEN_IDS)] | None = None
    max_tokens: Positive | None = None
    min_tokens: Annotated[int, Meta(ge=0, le=2**31 - 1)] | None = None
    ignore_eos: bool | None = None
    repetition_penalty: RepetitionPenalty | None = None
    presence_penalty: Penalty | None = None
    frequency_penalty: Penalty | None = None
    logit_bias: Annotated[dict[str, Bias], Meta(max_length=MAX_LOGIT_BIASES)] | None = None
    priority: Annotated[int, Meta(ge=-100, le=100)] | None = None
    add_special_tokens: bool | None = None
    return_token_ids: bool | None = None

    # Known, and refused unless neutral.
    prompt_logprobs: int | None = None

    @property
    def num_choices(self) -> int:
        return self.n or 1

    @property
    def stops(self) -> list[str]:
        return [self.stop] if isinstance(self.stop, str) else self.stop or []

    @property
    def wants_usage(self) -> bool:
        return bool(self.stream_options and self.stream_options.include_usage)

    @property
    def wants_usage_always(self) -> bool:
        return bool(self.stream_options and self.stream_options.continuous_usage_stats)

    @property
    def token_limit(self) -> int | None:
        """Most tokens to generate; None means as many as the context holds."""
        return self.max_tokens

    @property
    def num_logprobs(self) -> int | None:
        """How many alternatives to report beside each token; None means no logprobs at all."""
        return None

    @property
    def num_prompt_logprobs(self) -> int | None:
        """The same of the prompt's tokens."""
        return None

    @property
    def biases(self) -> tuple[tuple[int, float], ...]:
        """`logit_bias` as (token id, bias).

        Raises:
            HttpError: 400; a key is no token id.
        """
        pairs = []
        for key, bias in (self.logit_bias or {}).items():
            if not (key.isascii() and key.isdigit() and len(key) < 10):
                raise invalid("logit_bias", f"{key[:40]!r} is not a token id")
            pairs.append((int(key), bias))
        return tuple(pairs)

    def options(self, *, choice: int, seed: int, max_tokens: int) -> Options:
        """Return what the workers are told; `seed` is used when the client gave none."""
        return Options(
            temperature=1.0 if self.temperature is None else self.temperature,
            top_p=1.0 if self.top_p is None else self.top_p,
            top_k=max(self.top_k or 0, 0),
            min_p=self.min_p or 0.0,
            repetition_penalty=1.0 if self.repetition_penalty is None else self.repetition_penalty,
            presence_penalty=self.presence_penalty or 0.0,
            frequency_penalty=self.frequency_penalty or 0.0,
            logit_bias=self.biases,
            seed=(seed if self.seed is None else self.seed) & (2**63 - 1),
            choice=choice,
            max_tokens=max_tokens,
            min_tokens=self.min_tokens or 0,
            stop_token_ids=tuple(self.stop_token_ids or ()),
            ignore_eos=bool(self.ignore_eos),
            logprobs=self.num_logprobs,
            prompt_logprobs=self.num_prompt_logprobs,
            priority=self.priority or 0,
        )

    def check(self) -> None:
        """Refuse what no single field's range can say.

        Raises:
            HttpError: 400.
        """
        if self.stream_options is not None and not self.stream:
            raise invalid("stream_options", "only allowed when stream is true")
        if self.min_tokens and self.token_limit and self.min_tokens > self.token_limit:
            raise invalid("min_tokens", f"is over the limit of {self.token_limit} tokens")
        for name, neutral in _NEUTRAL.items():
            value = getattr(self, name, None)
            if value and value != neutral:
                raise invalid(name, "is not supported by this server; leave it out")
        if self.prompt_logprobs is not None:
            raise invalid("prompt_logprobs", "ask for echo and logprobs at /v1/completions instead")


class CompletionBody(Sampled, kw_only=True):
    """POST /v1/completions."""

    prompt: str | list[str | TokenId | list[TokenId]]
    max_tokens: Annotated[int, Meta(ge=0, le=2**31 - 1)] | None = None
    echo: bool | None = None
    logprobs: NumTop | None = None
    best_of: int | None = None
    suffix: str | None = None

    @property
    def token_limit(self) -> int | None:
        return DEFAULT_COMPLETION_TOKENS if self.max_tokens is None else self.max_tokens

    @property
    def num_logprobs(self) -> int | None:
        return self.logprobs

    @property
    def num_prompt_logprobs(self) -> int | None:
        return self.logprobs if self.echo else None

    def options(self, *, choice: int, seed: int, max_tokens: int) -> Options:
        options = super().options(choice=choice, seed=seed, max_tokens=max_tokens)
        if max_tokens == 1 and options.prompt_logprobs is not None:
            # Programs that score texts expect an entry for the one generated token, even if it is
            # EOS, which workers do not send.  So EOS must not end it; the limit of one does.
            return structs.replace(options, ignore_eos=True, stop_token_ids=())
        return options

    @property
    def prompts(self) -> list[Prompt]:
        """The prompts, each text or token ids.

        Raises:
            HttpError: 400; none, an empty one, or strings and ids in one list.
        """
        if isinstance(self.prompt, str):
            return [self.prompt]
        if all(isinstance(item, int) for item in self.prompt) and self.prompt:
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
        if self.suffix:
            raise invalid("suffix", "is not supported by this server; leave it out")
        if self.best_of is not None and self.best_of != self.num_choices:
            raise invalid("best_of", f"must equal n, which is {self.num_choices}")
        if self.max_tokens == 0 and not self.echo:
            raise invalid("max_tokens", "must be at least 1 without echo")
        if len(self.prompts) * self.num_choices > MAX_CHOICES:
            raise invalid("prompt", f"times n is over {MAX_CHOICES} choices")


class ChatBody(Sampled, kw_only=True):
    """POST /v1/chat/completions."""

    messages: Annotated[list[dict[str, Any]], Meta(min_length=1)]
    max_completion_tokens: Positive | None = None
    logprobs: bool | None = None
    top_logprobs: NumTop | None = None
    add_generation_prompt: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None

    # Known, and refused unless neutral.
    tools: list[Any] | None = None
    functions: list[Any] | None = None
    response_format: dict[str, Any] | None = None
    modalities: list[str] | None = None
    audio: dict[str, Any] | None = None

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


class TokenizeBody(Struct, kw_only=True):
    """POST /tokenize: a prompt or messages."""

    model: str | None = None
    prompt: str | None = None
    messages: Annotated[list[dict[str, Any]], Meta(min_length=1)] | None = None
    add_special_tokens: bool | None = None
    add_generation_prompt: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None

    def check(self) -> None:
        if (self.prompt is None) == (self.messages is None):
            raise invalid("prompt", "or messages must be given, and not both")
        if self.messages is not None:
            self.messages = flat_messages(self.messages)


class DetokenizeBody(Struct, kw_only=True):
    """POST /detokenize."""

    tokens: list[TokenId]
    model: str | None = None

    def check(self) -> None:
        """The types say everything."""


_NEUTRAL: Final[dict[str, object]] = {
    "tools": [],
    "functions": [],
    "response_format": {"type": "text"},
    "modalities": ["text"],
    "audio": {},
}


class Body(Protocol):
    """What `parse` reads."""

    model: str | None

    def check(self) -> None:
        """Refuse, with an HttpError, what no single field's range can say."""


_Body = TypeVar("_Body", bound=Body)
_WHERE: Final = re.compile(r"^(.*?)(?: - at `\$\.?(.*?)`)?$", re.DOTALL)


def parse(kind: type[_Body], raw: bytes) -> _Body:
    """Read and check a body.

    Raises:
        HttpError: 400; `param` names the field, the message what is allowed there.
    """
    try:
        body = msgspec.json.decode(raw, type=kind)
    except msgspec.ValidationError as error:
        match = _WHERE.match(str(error))
        assert match is not None
        message, where = match[1], match[2]
        missing = re.search(r"missing required field `(.*?)`", message)
        param = ".".join(filter(None, (where, missing[1] if missing else None))) or None
        raise invalid(param, message[:1].lower() + message[1:]) from error
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise HttpError(400, f"the body is not JSON: {error}", code="invalid_json") from error
    body.check()
    return body


def invalid(param: str | None, problem: str) -> HttpError:
    """Return the 400 that names a field and what is wrong with it."""
    message = f"{param}: {problem}" if param else problem
    return HttpError(400, message, code="invalid_value", param=param)


def flat_messages(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return messages whose contents are strings, as chat templates want them.

    A content may be a list of parts: those of text are joined, any other is refused.

    Raises:
        HttpError: 400; names the message.
    """
    return [_flat_message(f"messages[{index}]", each) for index, each in enumerate(messages)]


def _flat_message(where: str, message: dict[str, Any]) -> dict[str, Any]:
    if message.get("role") not in ROLES:
        raise invalid(f"{where}.role", f"expected one of {', '.join(ROLES)}")
    content = message.get("content")
    if isinstance(content, str) or (content is None and message["role"] == "assistant"):
        return message
    if not isinstance(content, list):
        raise invalid(f"{where}.content", "expected a string or a list of text parts")
    texts = []
    for index, part in enumerate(content):
        if not isinstance(part, dict) or not isinstance(part.get("text"), str):
            raise invalid(f"{where}.content[{index}]", "expected a part of type text")
        texts.append(part["text"])
    return {**message, "content": "\n".join(texts)}
