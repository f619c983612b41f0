"""From a body to a request of the core: what it goes on from, and what is kept of it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from router.api.completions.completion import Completion, CompletionRequest
from router.api.completions.deltas import Delta
from router.api.completions.response import Head
from router.api.errors import HttpError
from router.api.model import RequestContext, ServedModel
from router.api.requests.value_count import MAX_OBJECTS
from router.api.responses import endpoint
from router.api.responses.endpoint import read
from router.api.responses.store import KeptResponse, KeptResponses, previous_id
from tests.router.api.asking import letters
from tests.router.api.scripted import Core, Writer
from tests.router.site import LETTERS
from wire.errors import WireError

ANNA, BEN = RequestContext("anna", 7, 400), RequestContext("ben", 7, 400)


class Talk:
    """A model, and what is kept of its responses."""

    def __init__(self, model: ServedModel) -> None:
        self.kept = KeptResponses()
        self._model = model

    def read(self, context: RequestContext = ANNA, **fields: Any) -> CompletionRequest:
        raw = json.dumps({"input": "hi"} | fields).encode()
        name = previous_id(raw)
        previous = self.kept.get(context.client, name) if name else None
        return read(self.kept, self._model, raw, context, previous)

    def prompt(self, **fields: Any) -> str:
        """The prompt that the model reads."""
        [(request, _)] = self.read(**fields).requests
        return LETTERS.decode(list(request.token_ids))

    def answer(self, text: str, context: RequestContext = ANNA, **fields: Any) -> str:
        """Answer a body, and return the id."""
        request = self.read(context, **fields)
        completion = Completion(Core(), request, Writer())
        completion.submit()
        answer = request.answer(completion, Head("r", 1, "letters"))
        name: str = json.loads(answer.whole([Delta(text, finish_reason="stop")]))["id"]
        return name


@pytest.fixture
def talk(tmp_path: Path) -> Talk:
    return Talk(letters(tmp_path))


def test_a_response_goes_on_from_another(talk: Talk) -> None:
    first = talk.answer("hello", instructions="Be.")
    second = talk.answer("two", input="more", previous_response_id=first)
    wanted = "user:hi\nassistant:hello\nuser:more\nassistant:"
    assert talk.prompt(input="more", previous_response_id=first) == wanted
    again = talk.prompt(input="again", previous_response_id=second, instructions="Now.")
    assert again == f"system:Now.\n{wanted}two\nuser:again\nassistant:"


def test_each_stands_alone(talk: Talk) -> None:
    first = talk.answer("hello")
    second = talk.answer("two", input="more", previous_response_id=first)
    talk.kept.pop("anna", first)
    assert "user:hi\nassistant:hello\n" in talk.prompt(previous_response_id=second)


def test_what_is_not_to_be_kept_is_not(talk: Talk) -> None:
    name = talk.answer("hello", store=False)
    assert len(talk.kept) == 0
    with pytest.raises(HttpError) as caught:
        talk.read(previous_response_id=name)
    assert (caught.value.status, caught.value.param) == (404, "previous_response_id")


def test_nobody_goes_on_from_what_is_anothers(talk: Talk) -> None:
    name = talk.answer("secret", ANNA)
    with pytest.raises(HttpError, match="Response with id"):
        talk.read(BEN, previous_response_id=name)


def test_a_conversation_that_outgrows_a_body_is_refused(talk: Talk) -> None:
    large = json.dumps([{"role": "user", "content": "x" * endpoint.MAX_CONVERSATION_BYTES}])
    talk.kept.keep("resp_large", KeptResponse("anna", b'{"output": []}', large.encode()))
    many = json.dumps([{"role": "user", "content": "x"}] * MAX_OBJECTS)
    talk.kept.keep("resp_many", KeptResponse("anna", b'{"output": []}', many.encode()))
    answer = json.dumps({"output": [{"content": "x"}] * MAX_OBJECTS})
    talk.kept.keep("resp_much", KeptResponse("anna", answer.encode(), b"[]"))
    for name in ("resp_large", "resp_many", "resp_much"):
        with pytest.raises(HttpError) as caught:
            talk.read(previous_response_id=name)
        assert caught.value.status == 413


def test_the_new_input_counts_too(talk: Talk) -> None:
    before = KeptResponse("anna", b'{"output": []}', b"[]" + b" " * 2_000_000)
    talk.kept.keep("resp_1", before)
    num_left = endpoint.MAX_CONVERSATION_BYTES - before.size
    for length, error in ((num_left - 200, WireError), (num_left, HttpError)):
        with pytest.raises(error) as caught:  # the one is too long for the model only
            talk.read(input="x" * length, previous_response_id="resp_1")
        assert ("over" in str(caught.value)) == (error is HttpError)


def test_what_the_model_has_no_room_for(talk: Talk) -> None:
    with pytest.raises(WireError, match="context length is 400"):
        talk.read(input="x" * 500)
    with pytest.raises(HttpError, match="does not exist"):
        talk.read(model="gpt-9")
