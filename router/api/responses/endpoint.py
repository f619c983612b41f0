"""POST /v1/responses: converts a body and the response it continues to a core request."""

from __future__ import annotations

import secrets
from functools import partial
from typing import Final

import msgspec

from router.api.completions.completion import CompletionRequest
from router.api.errors import HttpError
from router.api.model import RequestContext, ServedModel
from router.api.requests.body import parse
from router.api.requests.unsupported_fields import RESPONSES
from router.api.requests.value_count import check_values
from router.api.responses.body import ResponseBody
from router.api.responses.items import Item, encode_items
from router.api.responses.response import FixedFields, ResponseAnswer, response_id
from router.api.responses.store import KeptResponse, KeptResponses

# The maximum size in bytes of a stored conversation and a body that continues it.
MAX_CONVERSATION_BYTES: Final = 2 * 1024 * 1024


class _Answer(msgspec.Struct):
    output: list[Item]


def read(
    kept: KeptResponses,
    model: ServedModel,
    raw: bytes,
    context: RequestContext,
    previous: KeptResponse | None = None,
) -> CompletionRequest:
    """Parse and validate a body that may continue the stored response `previous`."""
    body = parse(ResponseBody, raw, RESPONSES)
    model.check_name(body.model)
    items = body.items
    if (name := body.previous_response_id) is not None:
        if previous is None:
            raise kept.missing(name, "previous_response_id")
        items = [*_items_of(previous, len(raw)), *items]
    key = secrets.token_hex(16)
    context = context._replace(request_id=key)
    before = encode_items(items, key) if body.is_kept else b""

    def keep(response: bytes) -> None:
        if body.is_kept:
            kept.keep(response_id(key), KeptResponse(context.client, response, before))

    answer = partial(ResponseAnswer, fixed=FixedFields(key, body.echo(), keep))
    return model.conversation_request(body.conversation(items, model), body, context, answer)


def _items_of(previous: KeptResponse, num_more: int) -> list[Item]:
    if previous.size + num_more > MAX_CONVERSATION_BYTES:
        raise HttpError(
            413,
            f"the conversation before and this input are over {MAX_CONVERSATION_BYTES} bytes: "
            "begin another with what matters of it",
            code="conversation_too_large",
            param="previous_response_id",
        )
    check_values(previous.input)
    check_values(previous.answer)
    before = msgspec.json.decode(previous.input, type=list[Item])
    return before + msgspec.json.decode(previous.answer, type=_Answer).output
