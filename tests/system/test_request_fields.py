"""Fields of requests on a real cluster: each changes the answer as its name says."""

from __future__ import annotations

import json
import re
from typing import Any

import httpx
import pytest
from jsonschema import Draft202012Validator

from router.text.tokenizer import Tokenizer
from tests.clients.openai_schema import validate
from tests.cluster import Cluster
from wire.process.model import DEMO

TOKENIZER = Tokenizer.load(DEMO)
STORY = "Once upon a time there was a little fox who lived near the river. Every day the fox"
EOS = "0"
MESSAGES = [{"role": "user", "content": "Who are you?"}]
GREEDY = {"temperature": 0, "max_tokens": 24, "ignore_eos": True}
PERSON = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 9}, "age": {"type": "integer"}},
    "required": ["name", "age"],
    "additionalProperties": False,
}
EBNF = 'root ::= "<" word ("," word)? ">"\nword ::= [a-z]{1,5}'


def post(cluster: Cluster, path: str, **fields: Any) -> httpx.Response:
    return httpx.post(f"{cluster.http}{path}", json=fields, timeout=60, trust_env=False)


def complete(cluster: Cluster, **fields: Any) -> dict[str, Any]:
    response = post(cluster, "/v1/completions", **{"prompt": STORY, **GREEDY} | fields)
    assert response.status_code == 200, response.text
    body: dict[str, Any] = response.json()
    if not fields.get("echo"):  # whose first token has no log-probability; OpenAI's is null too
        validate("CreateCompletionResponse", body)
    return body


def chat(cluster: Cluster, **fields: Any) -> dict[str, Any]:
    response = post(cluster, "/v1/chat/completions", **{"messages": MESSAGES, **GREEDY} | fields)
    assert response.status_code == 200, response.text
    body: dict[str, Any] = response.json()
    validate("CreateChatCompletionResponse", body)
    return body


def text_of(body: dict[str, Any]) -> str:
    choice = body["choices"][0]
    return str(choice["text"] if "text" in choice else choice["message"]["content"])


def usage_of(body: dict[str, Any]) -> int:
    return int(body["usage"]["completion_tokens"])


@pytest.mark.parametrize(
    ("ask", "fields"),
    [
        (complete, {"response_format": {"type": "json_schema", "json_schema": {"schema": PERSON}}}),
        (chat, {"structured_outputs": {"json": PERSON}}),
        (chat, {"guided_json": json.dumps(PERSON)}),
    ],
)
def test_an_answer_matches_its_schema(cluster: Cluster, ask: Any, fields: Any) -> None:
    body = ask(cluster, **fields, temperature=1, seed=3, max_tokens=200)
    Draft202012Validator(PERSON).validate(json.loads(text_of(body)))
    assert body["choices"][0]["finish_reason"] == "stop"


@pytest.mark.parametrize(
    ("ask", "fields", "pattern"),
    [
        (chat, {"structured_outputs": {"choice": ["red", 'dark "red"']}}, 'red|dark "red"'),
        (complete, {"structured_outputs": {"regex": "[a-c]{3}-[0-9]{2}"}}, "[a-c]{3}-[0-9]{2}"),
        (complete, {"guided_grammar": EBNF}, "<[a-z]{1,5}(,[a-z]{1,5})?>"),
        (chat, {"structured_outputs": {"grammar": 'start: "a" /b+/ "c"'}}, "ab+c"),
    ],
)
def test_an_answer_matches_its_pattern(
    cluster: Cluster, ask: Any, fields: Any, pattern: str
) -> None:
    for seed in range(4):
        body = ask(cluster, **fields, temperature=1, seed=seed, max_tokens=200)
        assert re.fullmatch(pattern, text_of(body))


@pytest.mark.parametrize("position", [0, 5])
def test_a_stop_token_is_named(cluster: Cluster, position: int) -> None:
    """The first is drawn by a prefill worker, which says so in another frame."""
    ids = complete(cluster, return_token_ids=True)["choices"][0]["token_ids"]
    first = ids.index(ids[position])
    for is_shown in (False, True):
        body = complete(
            cluster,
            stop_token_ids=[ids[position]],
            include_stop_str_in_output=is_shown,
            return_token_ids=True,
        )
        [choice] = body["choices"]
        assert (choice["finish_reason"], choice["stop_reason"]) == ("stop", ids[position])
        assert choice["token_ids"] == ids[: first + 1]
        assert usage_of(body) == first + 1
        assert choice["text"] == TOKENIZER.decode(ids[: first + is_shown])


@pytest.mark.parametrize(
    "held", [{"logit_bias": {EOS: 100}, "max_tokens": 1}, {"structured_outputs": {"regex": "fox"}}]
)
@pytest.mark.parametrize("echo", [False, True])
def test_eos_has_its_scores_as_any_token(cluster: Cluster, held: Any, echo: bool) -> None:
    body = complete(
        cluster,
        logprobs=2,
        echo=echo,
        return_token_ids=True,
        return_tokens_as_token_ids=True,
        ignore_eos=False,
        **held,
    )
    [choice] = body["choices"]
    assert choice["finish_reason"] == "stop"
    assert choice["token_ids"][-1] in TOKENIZER.special_ids
    all_ids = [*(choice["prompt_token_ids"] if echo else ()), *choice["token_ids"]]
    assert choice["logprobs"]["tokens"] == [f"token_id:{each}" for each in all_ids]
    assert choice["logprobs"]["token_logprobs"][-1] < 0
    assert choice["logprobs"]["text_offset"][-1] == len(choice["text"])


def test_prompt_logprobs_are_those_of_an_echo(cluster: Cluster) -> None:
    [text] = complete(cluster, prompt_logprobs=2, return_token_ids=True)["choices"]
    [echo] = complete(cluster, logprobs=2, echo=True)["choices"]
    rows, ids = text["prompt_logprobs"], text["prompt_token_ids"]
    assert rows[0] is None and len(rows) == len(ids)
    scores = echo["logprobs"]["token_logprobs"]
    for row, token_id, score in zip(rows[1:], ids[1:], scores[1:], strict=False):
        assert row[str(token_id)]["logprob"] == pytest.approx(score, abs=1e-6)
        assert row[str(token_id)]["decoded_token"] == TOKENIZER.token_text(token_id)
        assert {entry["rank"] for entry in row.values()} >= {1, 2}
    body = chat(cluster, prompt_logprobs=0, return_token_ids=True)
    assert len(body["prompt_logprobs"]) == len(body["prompt_token_ids"])
    assert all(len(row) == 1 for row in body["prompt_logprobs"][1:])


def test_an_answer_goes_on_with_a_message(cluster: Cluster) -> None:
    begun = [*MESSAGES, {"role": "assistant", "content": "I am a"}]
    asked = {"messages": begun, "continue_final_message": True, "return_token_ids": True}
    body = chat(cluster, **asked)
    assert TOKENIZER.decode(body["prompt_token_ids"]).endswith("I am a")
    echoed = chat(cluster, **asked, echo=True)
    assert text_of(echoed) == "I am a" + text_of(body)
    tokens = post(
        cluster,
        "/tokenize",
        messages=begun,
        continue_final_message=True,
        return_token_strs=True,
    ).json()
    assert tokens["tokens"] == body["prompt_token_ids"]
    assert len(tokens["token_strs"]) == tokens["count"]
