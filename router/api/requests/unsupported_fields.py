"""Request fields of OpenAI and vLLM that our endpoints do not support: refused or ignored.

Every field of the two APIs is either a field of our body or listed here.  A refused field is
accepted with its neutral values, and a field without effect on the answer is ignored.  So is an
unknown field, as clients expect.  FIELDS.md lists all fields.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final, NamedTuple

import msgspec

from router.api.errors import invalid


class Refused(NamedTuple):
    """The reason for refusing a field; null and the `neutral` values are accepted."""

    why: str
    neutral: tuple[object, ...] = ()


class Fields:
    """The request fields that an endpoint does not support, with the message for each."""

    def __init__(self, refused: Mapping[str, Refused], without_effect: Mapping[str, str]) -> None:
        self.refused = refused
        self.without_effect = without_effect
        # The decoder skips all other fields.
        values: list[tuple[str, Any, Any]] = [(name, msgspec.Raw, None) for name in refused]
        kind = msgspec.defstruct("Values", values)
        self._none, self._decoder = kind(), msgspec.json.Decoder(kind)

    def that_work(self, body: type[msgspec.Struct]) -> set[str]:
        """Return the supported fields of a body; it may inherit fields that are refused here."""
        return set(body.__struct_fields__) - self.refused.keys()

    def check(self, raw: bytes) -> None:
        """Refuse a body with an unsupported field.

        Raises:
            HttpError: 400 that names the field.
            msgspec.DecodeError: The body is not a JSON object.
        """
        values = self._decoder.decode(raw)
        if values == self._none:
            return
        for name, (why, neutral) in self.refused.items():
            value: msgspec.Raw | None = getattr(values, name)
            if value is not None and msgspec.json.decode(value) not in (None, *neutral):
                raise invalid(name, f"is not supported by this server: {why}")


_REFUSED: Final = {
    "use_beam_search": Refused("it samples", (False,)),
    "watermarking": Refused("answers have no watermark", (False,)),
    "logprob_token_ids": Refused("ask for the likeliest tokens", ([],)),
    "kv_transfer_params": Refused("the router says where KV goes", ({},)),
    "ec_transfer_params": Refused("there are no encoders", ({},)),
    "vllm_xargs": Refused("they are for extensions of vLLM", ({},)),
    "repetition_detection": Refused("use repetition_penalty, or stop"),
    "thinking_token_budget": Refused("limit the tokens of the whole answer", (-1,)),
    "routed_experts_prompt_start": Refused("experts are not reported", (0,)),
    "guided_whitespace_pattern": Refused("JSON has one space after a comma and a colon"),
}
# Fields for images and audio.
_MEDIA: Final = {
    name: Refused("models here read and write text", ({},))
    for name in ("media_io_kwargs", "mm_processor_kwargs")
}
_WITHOUT_EFFECT: Final = {
    "user": "nothing is kept of who asked",
    "session_id": "requests go where their prefix is cached, whatever session they are of",
    "length_penalty": "only beam search has one",
    "early_stopping": "only beam search has it",
    "spaces_between_special_tokens": "no spaces are put between tokens",
    "guided_decoding_backend": "there is one",
    "stream_interval": "streams have a chunk for every token",
    "return_token_offsets": "only of vLLM's endpoints that render prompts",
    "mm_payload": "only of vLLM's endpoints that render prompts",
    "return_mm_kwargs": "only of vLLM's endpoints that render prompts",
}

COMPLETIONS: Final = Fields(
    {
        **_REFUSED,
        "suffix": Refused("it completes the end of a text only", ("",)),
        "prompt_embeds": Refused("send text or token ids", ([],)),
    },
    _WITHOUT_EFFECT,
)

CHAT: Final = Fields(
    {
        **_REFUSED,
        "audio": Refused("models here read and write text", ({},)),
        "modalities": Refused("models here read and write text", (["text"], [])),
        **_MEDIA,
        "functions": Refused("it is the older name of tools", ([],)),
        "function_call": Refused("it is the older name of tool_choice", ("none", "auto")),
        "web_search_options": Refused("nothing is searched"),
        "moderation": Refused("nothing is moderated"),
        "verbosity": Refused("say in the messages how long the answer is to be", ("medium",)),
        "return_prompt_text": Refused("POST /tokenize shows the prompt's tokens", (False,)),
    },
    {
        **_WITHOUT_EFFECT,
        "metadata": "nothing is kept of a request",
        "store": "nothing is kept of a request",
        "safety_identifier": "nothing is kept of who asked",
        "service_tier": "there is one; priority says who is served first",
        "prompt_cache_key": "prefixes are cached by themselves",
        "prompt_cache_options": "prefixes are cached by themselves",
        "prompt_cache_retention": "prefixes are cached as long as there is room",
        "prediction": "it makes answers quicker, not other ones",
    },
)

TOKENIZE: Final = Fields(_MEDIA | {"tools": Refused("leave it out", ([],))}, {})

RESPONSES: Final = Fields(
    {
        **_REFUSED,
        "background": Refused(
            "stream the answer, or wait for it (elsewhere, background can only be used when "
            "`store` is true)",
            (False,),
        ),
        "conversation": Refused("use previous_response_id, or send all items"),
        "context_management": Refused("send the items that the model is to see", ([],)),
        "prompt": Refused("no prompts are stored; send input and instructions"),
        "moderation": Refused("nothing is moderated"),
        "truncation": Refused("too long an input is an error", ("disabled",)),
        "enable_response_messages": Refused("the output is in items", (False,)),
        "previous_input_messages": Refused("send input", ([],)),
        **_MEDIA,
        # Inherited fields that only other endpoints support.
        "n": Refused("a response is one answer", (1,)),
        "max_tokens": Refused("here it is max_output_tokens"),
        "response_format": Refused("here it is text.format", ({"type": "text"},)),
        "prompt_logprobs": Refused("only /v1/completions and /v1/chat/completions have them"),
        "return_token_ids": Refused("only /v1/completions and chats have them", (False,)),
        "return_tokens_as_token_ids": Refused("only /v1/completions and chats do", (False,)),
        "request_id": Refused("ids of responses cannot be chosen; send the header x-request-id"),
        "baton_usage": Refused("only /v1/completions and chats have it", (False,)),
    },
    {
        # The response repeats "user".
        **{name: why for name, why in _WITHOUT_EFFECT.items() if name != "user"},
        "prompt_cache_options": "prefixes are cached by themselves",
        "prompt_cache_retention": "prefixes are cached as long as there is room",
        "service_tier": "there is one; priority says who is served first",
        "max_tool_calls": "it counts calls of built-in tools, and there are none",
    },
)
