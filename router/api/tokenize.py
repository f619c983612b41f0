"""POST /tokenize and POST /detokenize: convert between text and token ids."""

from __future__ import annotations

from typing import Annotated, Any

import msgspec
from msgspec import Meta

from router.api.errors import invalid
from router.api.model import ServedModel
from router.api.requests.body import Body, parse
from router.api.requests.conversation import (
    ChatMessage,
    Conversation,
    flat_messages,
    has_generation_prompt,
)
from router.api.requests.unsupported_fields import TOKENIZE
from wire.options import TokenId


class TokenizeBody(Body, kw_only=True):
    """The request body of POST /tokenize: either a prompt or messages."""

    prompt: str | None = None
    messages: Annotated[list[ChatMessage], Meta(min_length=1)] | None = None
    add_special_tokens: bool | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template: str | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    return_token_strs: bool | None = None

    def check(self) -> None:
        if (self.prompt is None) == (self.messages is None):
            raise invalid("prompt", "or messages must be given, and not both")
        if self.messages is not None:
            self.messages = flat_messages(self.messages)


class DetokenizeBody(Body, kw_only=True):
    """The request body of POST /detokenize."""

    tokens: list[TokenId]


def tokenize(model: ServedModel, raw: bytes, max_model_len: int | None) -> bytes:
    """Return the JSON response of POST /tokenize."""
    body = parse(TokenizeBody, raw, TOKENIZE)
    model.check_name(body.model)
    if body.messages is not None:
        conversation = Conversation(
            messages=body.messages,
            add_generation_prompt=has_generation_prompt(
                body.add_generation_prompt, body.continue_final_message
            ),
            continue_final_message=bool(body.continue_final_message),
            template=body.chat_template,
            variables=body.chat_template_kwargs or {},
        )
        text = model.render(conversation)
        special = bool(body.add_special_tokens)
    else:
        text, special = body.prompt or "", body.add_special_tokens is not False
    sent = "prompt" if body.messages is None else "messages"
    token_ids = model.encode(sent, text, add_special_tokens=special)
    answer: dict[str, Any] = {
        "tokens": token_ids,
        "count": len(token_ids),
        "max_model_len": max_model_len,
    }
    if body.return_token_strs:
        entry = model.tokenizer.vocabulary_entry
        answer["token_strs"] = [entry(token_id) for token_id in token_ids]
    return msgspec.json.encode(answer)


def detokenize(model: ServedModel, raw: bytes) -> bytes:
    """Return the JSON response of POST /detokenize; unknown ids have no text."""
    body = parse(DetokenizeBody, raw)
    model.check_name(body.model)
    text = model.tokenizer.decode(body.tokens, skip_special_tokens=False)
    return msgspec.json.encode({"prompt": text})
