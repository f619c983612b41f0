"""The served model as requests see it: its name, tokenizer, template and vocabulary.

Synchronous and without side effects, so that the HTTP application can read a long prompt in a
thread.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Final, NamedTuple

from msgspec import structs

from router.api.completions.completion import CompletionRequest, NewAnswer
from router.api.errors import HttpError, invalid
from router.api.requests.body import Prompt, Sampled
from router.api.requests.conversation import Conversation
from router.api.requests.defaults import NEUTRAL, Defaults
from router.api.requests.output_constraints import held
from router.api.requests.structures import Wanted
from router.api.requests.value_count import MAX_NUMBERS
from router.core.request import Request
from router.text.chat_template import ChatTemplate
from router.text.output_parser import AUTO, AnswerSyntax
from router.text.reasoning import detect
from router.text.stops import StopAutomaton
from router.text.tokenizer import Tokenizer, TooManyTokens
from wire.errors import ErrorCode, WireError, shown
from wire.options import MAX_BAD_SEQUENCE_LENGTH
from wire.process.model import fingerprint, vocab_size

# Variables of a chat template by which reasoning is switched off, and how much there is of it.
SWITCHES: Final = ("enable_thinking", "thinking")
_EFFORT: Final = "reasoning_effort"
# One for all requests: Python makes a new one of 216 bytes each time.
_NO_IDS: Final = frozenset[int]()
# Variables of a chat template that only the router sets.
_RESERVED: Final = frozenset({"messages", "tools", "documents", "add_generation_prompt"})


class Asker(NamedTuple):
    """The client of a request, and the limits that apply to it.

    `client` is the key of fair scheduling, `seed` is used if the request names none, and
    `max_model_len` is the longest sequence that the workers take.
    """

    client: str
    seed: int
    max_model_len: int


class ServedModel:
    """The one model of this router; `tokenizer` and template are read from its directory.

    `tool_calls` and `reasoning` name what its answers are read as (`router.text.output_parser`);
    with `trusts_templates` requests may bring a chat template of their own.
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
        self._vocab_size = vocab_size(path) or self.tokenizer.vocab_size

    @property
    def has_reasoning(self) -> bool:
        """Whether the model may reason before it answers."""
        return self._syntax.has_reasoning

    def check_name(self, name: str | None) -> None:
        """Refuse any model but ours; no name at all means ours."""
        if name is not None and name != self.name:
            raise HttpError(
                404,
                f"the model {shown(name)} does not exist here; GET /v1/models lists what does",
                code="model_not_found",
                param="model",
            )

    def render(self, conversation: Conversation) -> str:
        """Return a conversation as the text that the model goes on from."""
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
        """Return the variables that make the chat template ask for this much reasoning.

        None: it cannot.  A template that says nothing of reasoning has no efforts to tell apart.
        """
        if word != "none" and self._speaks_of(_EFFORT):
            return {_EFFORT: word}
        known = [name for name in SWITCHES if self._speaks_of(name)] if word == "none" else []
        is_nothing = word == "medium" or detect(self._template.source) is None
        return dict.fromkeys(known, False) if known or is_nothing else None

    def variables_of_effort(self, param: str, word: str | None) -> dict[str, Any]:
        """Return the same for a field of a body, which may leave it to the model."""
        variables = {} if word is None else self.effort(word)
        if variables is None:
            raise invalid(param, f"this model's chat template has no way to say {word}")
        return variables

    def _speaks_of(self, variable: str) -> bool:
        return re.search(rf"\b{variable}\b", self._template.source) is not None

    def converse(
        self, conversation: Conversation, body: Sampled, asker: Asker, answer: NewAnswer
    ) -> CompletionRequest:
        """Return the core requests of a body that continues a conversation."""
        text = self.render(conversation)
        special = conversation.add_special_tokens
        token_ids = self.prompt(text, body, asker, add_special_tokens=special)
        is_reasoning = self._syntax.has_open_reasoning(text, conversation.continued)
        wanted = held(self._syntax, conversation, body.wanted, is_reasoning=is_reasoning)
        has_tools = bool(conversation.visible_tools)
        echo = conversation.continued if conversation.is_echoed else ""
        asked = self.request(body, [(token_ids, echo)], asker, answer, wanted)
        asked = structs.replace(asked, shows_reasoning=conversation.shows_reasoning)
        if has_tools or self._syntax.has_reasoning:
            reader = partial(
                self._syntax.reader,
                is_reasoning=is_reasoning,
                has_tools=has_tools,
                max_calls=None if conversation.has_parallel_calls else 1,
            )
            shown = asked.shown | self._syntax.shown(has_tools=has_tools)
            asked = structs.replace(asked, reader=reader, shown=shown)
        return asked

    def encode(self, param: str, text: str, *, add_special_tokens: bool) -> list[int]:
        """Return the tokens of the text of field `param`, which need not fit the context."""
        encode = partial(self.tokenizer.encode, add_special_tokens=add_special_tokens)
        try:
            return encode(text, max_tokens=MAX_NUMBERS)
        except TooManyTokens as count:
            raise invalid(param, f"has {count} tokens, over {MAX_NUMBERS}") from None

    def prompt(
        self, prompt: Prompt, body: Sampled, asker: Asker, *, add_special_tokens: bool
    ) -> Sequence[int]:
        """Return the ids of a prompt, cut to as many as the body says."""
        wanted = 1 if body.token_limit is None else body.token_limit
        # A prompt that is only echoed may fill the context: the token after it is never read.
        most, num_kept = asker.max_model_len - min(wanted, 1), body.truncate_prompt_tokens
        if num_kept is not None and num_kept > most:
            raise invalid("truncate_prompt_tokens", f"the context has room for {most} tokens")
        max_tokens = most if num_kept is None else MAX_NUMBERS
        try:
            found = self._token_ids(prompt, max_tokens, add_special_tokens=add_special_tokens)
        except TooManyTokens as count:
            if num_kept is not None:
                raise invalid(
                    "truncate_prompt_tokens",
                    f"the prompt has {count} tokens; one that is to be cut may have {MAX_NUMBERS}",
                ) from None
            more = ", and at least one more is to be generated" if wanted else ""
            raise WireError(
                ErrorCode.CONTEXT_LENGTH_EXCEEDED,
                f"the model's context length is {asker.max_model_len} tokens; the prompt has "
                f"{count}{more}",
            ) from None
        if num_kept is None:
            return found
        if num_kept == -1:
            num_kept = max(asker.max_model_len - wanted, 1)
        return found[-num_kept:] if body.truncation_side == "left" else found[:num_kept]

    def _token_ids(
        self, prompt: Prompt, max_tokens: int, *, add_special_tokens: bool
    ) -> Sequence[int]:
        if isinstance(prompt, str):
            return self.tokenizer.encode(
                prompt, add_special_tokens=add_special_tokens, max_tokens=max_tokens
            )
        if len(prompt) > max_tokens:
            raise TooManyTokens(str(len(prompt)))
        if self._vocab_size is not None and max(prompt) >= self._vocab_size:
            raise invalid("prompt", f"token ids must be below {self._vocab_size}")
        return prompt

    def request(
        self,
        body: Sampled,
        prompts: Sequence[tuple[Sequence[int], str]],
        asker: Asker,
        answer: NewAnswer,
        wanted: Wanted | None,
    ) -> CompletionRequest:
        """Return what a body asks of the core, for prompts as ids, each with the text to echo.

        The answers are not held to what is `wanted` of them yet: see `CompletionRequest.held_to`.
        """
        if body.stops and not self.tokenizer.has_text:
            raise invalid("stop", "needs a tokenizer, and this model has none; use stop_token_ids")
        self._check_ids("logit_bias", [token_id for token_id, _ in body.biases])
        self._check_ids("allowed_token_ids", body.allowed_token_ids or ())
        structure = "" if wanted is None else wanted.param
        bad = bad_sequences(self.tokenizer, body.bad_words or (), structure)
        requests = []
        for token_ids, echo in prompts:
            # Workers always generate a token; where none is asked for, it is not shown.
            max_tokens = max(self._most_tokens(body, asker.max_model_len - len(token_ids)), 1)
            options = body.options(seed=asker.seed, max_tokens=max_tokens, defaults=self._defaults)
            for choice in range(body.num_choices):
                of_choice = structs.replace(options, choice=choice, bad_sequences=bad)
                request = Request(tuple(token_ids), of_choice, max_tokens - 1, asker.client)
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

    def _most_tokens(self, body: Sampled, room: int) -> int:
        """Return how many tokens to generate, where there is room for so many."""
        if body.token_limit is not None:
            return min(body.token_limit, room) if body.is_cut_to_room else body.token_limit
        return min(room, self._defaults.max_tokens or room)

    def _check_ids(self, param: str, token_ids: Iterable[int]) -> None:
        largest = max(token_ids, default=0)
        if self._vocab_size is not None and largest >= self._vocab_size:
            raise invalid(param, f"token ids must be below {self._vocab_size}, not {largest}")


def bad_sequences(
    tokenizer: Tokenizer, words: Sequence[str], structure: str = ""
) -> tuple[tuple[int, ...], ...]:
    """Return the tokens of each of `bad_words`: as it begins a text, and as it follows a space.

    The latter only where the space is a part of a token of the word.  Spellings of other tokens are
    not found, as in vLLM.  Where the answer is held to the field `structure`, other tokens may have
    to spell the word: a request that asks for both is refused.
    """
    if words and structure:
        raise invalid(
            "bad_words",
            f"the answer is held to {structure}, which can be met with other tokens that spell the "
            "same words; leave them out there, and send no bad_words",
        )
    if words and not tokenizer.has_text:
        raise invalid("bad_words", "needs a tokenizer, and this model has none")
    found = []
    for index, word in enumerate(words):
        bare, spaced = (
            tuple(tokenizer.encode(text, add_special_tokens=False))
            for text in (word.lstrip(), " " + word.lstrip())
        )
        if not 1 <= len(bare) <= MAX_BAD_SEQUENCE_LENGTH:
            expected = f"not 1 to {MAX_BAD_SEQUENCE_LENGTH}"
            raise invalid(f"bad_words[{index}]", f"has {len(bare)} tokens, {expected}")
        found.append(bare)
        if spaced[-len(bare) :] != bare:
            found.append(spaced)
    return tuple(found)
