"""Fields that several request bodies share, their ranges, and their conversion to options.

Unsupported fields of other servers are in `router.api.requests.unsupported_fields`.  `null` always
means the default.  A number may be a string, because some JSON libraries write "5" for 5.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from functools import cache
from typing import Annotated, Final, Literal, TypeVar

import msgspec
from msgspec import Meta, Struct, inspect

from router.api.errors import HttpError, invalid, listed
from router.api.requests.defaults import NEUTRAL, Defaults
from router.api.requests.structures import (
    ResponseFormat,
    StructuredOutputs,
    Wanted,
    one_of,
    wanted_of_format,
    wanted_of_guided,
    wanted_of_structured,
)
from router.api.requests.unsupported_fields import Fields
from router.api.requests.value_count import check_values
from wire.options import (
    MAX_ALLOWED_TOKEN_IDS,
    MAX_BAD_SEQUENCES,
    MAX_CACHE_SALT_LENGTH,
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
# Fields whose default comes from the model; so does `top_k`, whose values 0 and -1 are the same.
SAMPLING: Final = (
    "temperature",
    "top_p",
    "min_p",
    "repetition_penalty",
    "presence_penalty",
    "frequency_penalty",
)

Positive = Annotated[int, Meta(ge=1, le=2**31 - 1)]
StopString = Annotated[str, Meta(min_length=1, max_length=1024)]
# A word has up to two token sequences.
BadWords = Annotated[list[StopString], Meta(max_length=MAX_BAD_SEQUENCES // 2)]
AllowedTokenIds = Annotated[list[TokenId], Meta(min_length=1, max_length=MAX_ALLOWED_TOKEN_IDS)]
# -1 truncates to the free part of the context.
Truncation = Annotated[int, Meta(ge=-1, le=2**31 - 1)]
CacheSalt = Annotated[str, Meta(min_length=1, max_length=MAX_CACHE_SALT_LENGTH)]
RequestId = Annotated[str, Meta(pattern=r"^[A-Za-z0-9._-]{1,128}\Z")]
Prompt = str | tuple[int, ...]


class StreamOptions(Struct):
    """`stream_options`; `continuous_usage_stats` is from vLLM, and load generators send it."""

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None


class Body(Struct, kw_only=True):
    """A request body; without `model` it is for the served model."""

    model: str | None = None

    def check(self) -> None:
        """Validate fields whose valid values depend on other fields."""


class Sampled(Body, kw_only=True):
    """The sampling fields that all completion endpoints share."""

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
    return_tokens_as_token_ids: bool | None = None
    prompt_logprobs: NumTop | None = None
    include_stop_str_in_output: bool | None = None
    skip_special_tokens: bool | None = None
    truncate_prompt_tokens: Truncation | None = None
    truncation_side: Literal["left", "right"] | None = None
    allowed_token_ids: AllowedTokenIds | None = None
    bad_words: BadWords | None = None
    request_id: RequestId | None = None
    cache_salt: CacheSalt | None = None
    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputs | None = None
    guided_json: msgspec.Raw = msgspec.field(default_factory=msgspec.Raw)
    guided_regex: str | None = None
    guided_choice: list[str] | None = None
    guided_grammar: str | None = None
    # An extension: adds the key `baton` to `usage`.
    baton_usage: bool | None = None

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
        """The maximum number of tokens to generate; None means up to the end of the context."""
        return self.max_tokens

    @property
    def is_cut_to_context(self) -> bool:
        """Whether to lower `token_limit` to the free part of the context, not fail."""
        return False

    @property
    def num_logprobs(self) -> int | None:
        """How many alternatives to return for each token; None means no log-probabilities."""
        return None

    @property
    def num_prompt_logprobs(self) -> int | None:
        """How many alternatives to return for each prompt token."""
        return self.prompt_logprobs

    @property
    def has_echo_logprobs(self) -> bool:
        """Whether `logprobs` begins with the prompt's tokens."""
        return False

    @property
    def wanted(self) -> Wanted | None:
        """The structure that the answer's text must match."""
        found = [
            *wanted_of_format(self.response_format),
            *wanted_of_structured(self.structured_outputs),
            *wanted_of_guided(
                "guided_",
                self.guided_json,
                self.guided_regex,
                self.guided_choice,
                self.guided_grammar,
            ),
        ]
        return one_of(found)

    @property
    def biases(self) -> tuple[tuple[int, float], ...]:
        """`logit_bias` as pairs of token id and bias."""
        biases = self.logit_bias
        if not biases:
            return ()
        bad = [key for key in biases if not (key.isascii() and key.isdigit() and len(key) < 10)]
        if bad:
            raise invalid("logit_bias", f"expected token ids as keys, not {listed(bad)}")
        return tuple([(int(key), bias) for key, bias in biases.items()])

    def options(self, *, seed: int, max_tokens: int, defaults: Defaults = NEUTRAL) -> Options:
        """Return the options for workers; `seed` is the default seed."""
        sampling = {
            name: getattr(defaults, name) if (value := getattr(self, name)) is None else value
            for name in SAMPLING
        }
        return Options(
            **sampling,
            top_k=max(defaults.top_k if self.top_k is None else self.top_k, 0),
            logit_bias=self.biases,
            seed=(seed if self.seed is None else self.seed) & (2**63 - 1),
            max_tokens=max_tokens,
            min_tokens=self.min_tokens or 0,
            stop_token_ids=tuple(self.stop_token_ids or ()),
            allowed_token_ids=tuple(self.allowed_token_ids or ()),
            ignore_eos=bool(self.ignore_eos),
            logprobs=self.num_logprobs,
            prompt_logprobs=self.num_prompt_logprobs,
            # As in vLLM, the request with the lowest number is served first.
            priority=-(self.priority or 0),
        )

    def check(self) -> None:
        if self.stream_options is not None and not self.stream:
            raise invalid("stream_options", "only allowed when stream is true")
        if self.min_tokens and self.token_limit and self.min_tokens > self.token_limit:
            raise invalid("min_tokens", f"is over the limit of {self.token_limit} tokens")
        if self.prompt_logprobs is not None and self.stream:
            raise invalid("prompt_logprobs", "only in an answer that is not streamed")
        if self.truncate_prompt_tokens == 0:
            raise invalid("truncate_prompt_tokens", "0 leaves no prompt")


_Body = TypeVar("_Body", bound=Body)
# Cached: it takes milliseconds, and an invalid request must not delay others.
_type_info: Final = cache(inspect.type_info)
_WHERE: Final = re.compile(r"^(.*?)(?: - at `\$\.?(.*?)`)?$", re.DOTALL)


def parse(kind: type[_Body], raw: bytes, fields: Fields | None = None) -> _Body:
    """Decode and validate a body; `fields` are the ones that its endpoint does not support."""
    check_values(raw)
    try:
        if fields is not None:
            fields.check(raw)
        body = msgspec.json.decode(raw, type=kind, strict=False)
    except msgspec.ValidationError as error:
        raise misfit(error, kind) from error
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise HttpError(400, f"the body is not JSON: {error}", code="invalid_json") from error
    body.check()
    return body


def misfit(error: msgspec.ValidationError, kind: type, place: str = "") -> HttpError:
    """Return the 400 for a value at the path `place` that does not have the type `kind`."""
    match = _WHERE.match(str(error))
    assert match is not None
    message, where = match[1], match[2]
    missing = re.search(r"missing required field `(.*?)`", message)
    inside = ".".join(filter(None, (where, missing[1] if missing else None)))
    problem = message[:1].lower() + message[1:]
    if missing or message.startswith("Invalid"):
        words = _words(_type_info(kind), re.findall(r"[^.[]+", inside))
        problem += f": expected {' or '.join(words)}" if words else ""
    return invalid(".".join(filter(None, (place, inside))) or None, problem)


def _words(kind: inspect.Type, path: Sequence[str]) -> list[str]:
    """Return the values allowed at `path` of the type `kind`, if it is an enumeration there."""
    inner: Sequence[inspect.Type] = ()
    match kind:
        case inspect.UnionType(types):
            return [word for each in types for word in _words(each, path)]
        case inspect.LiteralType(values) if not path:
            return [str(value) for value in values]
        case inspect.ListType(item_type=item) | inspect.DictType(value_type=item) if path:
            inner = (item,)
        case inspect.StructType() if path and path[0] == kind.tag_field:
            return [str(kind.tag)]
        case inspect.StructType() if path:
            inner = [field.type for field in kind.fields if field.encode_name == path[0]]
    return [word for each in inner for word in _words(each, path[1:])]
