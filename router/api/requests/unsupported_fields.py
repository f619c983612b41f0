"""Request fields of OpenAI and vLLM that our endpoints refuse.

A refused field is accepted with its neutral values.  Fields without effect on the answer are
ignored, and so is an unknown field, as clients expect.  FIELDS.md lists all fields, and
`scripts/fields.py` those without effect.
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
    """The request fields that an endpoint refuses, with the message for each."""

    def __init__(self, refused: Mapping[str, Refused]) -> None:
        self.refused = refused
        # The decoder skips all other fields.
        values: list[tuple[str, Any, Any]] = [(name, msgspec.Raw, None) for name in refused]
        kind = msgspec.defstruct("Values", values)
        self._none, self._decoder = kind(), msgspec.json.Decoder(kind)

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

COMPLETIONS: Final = Fields(
    {
        **_REFUSED,
        "suffix": Refused("it completes the end of a text only", ("",)),
        "prompt_embeds": Refused("send text or token ids", ([],)),
    }
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
)

TOKENIZE: Final = Fields(_MEDIA | {"tools": Refused("leave it out", ([],))})

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
)
