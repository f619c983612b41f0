"""Bodies of requests for the tests of the API, and what is understood of them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from router.api import chat, text
from router.api.chat import ChatBody
from router.api.completions.completion import CompletionRequest
from router.api.errors import HttpError
from router.api.model import RequestContext, ServedModel
from router.api.requests.body import parse
from router.api.requests.unsupported_fields import CHAT as CHAT_FIELDS
from router.api.requests.unsupported_fields import COMPLETIONS as COMPLETION_FIELDS
from router.api.text import CompletionBody
from tests.router.site import write_model

CHAT = [{"role": "user", "content": "hi"}]
FIELDS = {CompletionBody: COMPLETION_FIELDS, ChatBody: CHAT_FIELDS}
CONTEXT = RequestContext("10.0.0.1", 77, 100)


def raw(**fields: Any) -> bytes:
    return json.dumps(fields).encode()


def completion(**fields: Any) -> CompletionBody:
    return parse(CompletionBody, raw(**{"prompt": "hi"} | fields), FIELDS[CompletionBody])


def chatting(**fields: Any) -> ChatBody:
    return parse(ChatBody, raw(**{"messages": CHAT} | fields), FIELDS[ChatBody])


def refusal(kind: Any, **fields: Any) -> HttpError:
    base = {"prompt": "hi"} if kind is CompletionBody else {"messages": CHAT}
    with pytest.raises(HttpError) as caught:
        parse(kind, raw(**base | fields), FIELDS.get(kind))
    assert caught.value.status == 400
    return caught.value


def letters(path: Path, *, has_text: bool = True) -> ServedModel:
    """A model whose tokens are letters."""
    return ServedModel("letters", write_model(path, text=has_text))


def complete(model: ServedModel, /, **fields: Any) -> CompletionRequest:
    return text.read(model, raw(**fields), CONTEXT)


def converse(model: ServedModel, /, **fields: Any) -> CompletionRequest:
    return chat.read(model, raw(**{"messages": CHAT} | fields), CONTEXT)
