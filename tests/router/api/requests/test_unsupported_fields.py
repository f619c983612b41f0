"""Every field that OpenAI's schema and vLLM's server know has an answer, and it is the one we give.

The names were read from OpenAI's openapi.yaml and from the request models of vLLM 0.32.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
from functools import partial
from typing import Any

import pytest
from msgspec import Struct, inspect, structs

from router.api import tokenize
from router.api.chat import ChatAnswer, ChatBody
from router.api.completions.completion import CompletionRequest
from router.api.errors import HttpError
from router.api.model import ServedModel
from router.api.requests.unsupported_fields import (
    CHAT,
    COMPLETIONS,
    RESPONSES,
    TOKENIZE,
    Fields,
    Refused,
)
from router.api.responses import endpoint
from router.api.responses.body import ResponseBody
from router.api.responses.store import KeptResponses
from router.api.text import CompletionBody
from router.api.tokenize import TokenizeBody
from scripts.fields import WITHOUT_EFFECT, working
from tests.cluster import ROOT
from tests.router.api.asking import CONTEXT, complete, converse, raw
from tests.router.site import write_model
from wire.errors import WireError

OPENAI_CHAT = """
    audio frequency_penalty function_call functions logit_bias logprobs max_completion_tokens
    max_tokens messages metadata modalities model moderation n parallel_tool_calls prediction
    presence_penalty prompt_cache_key prompt_cache_options prompt_cache_retention reasoning_effort
    response_format safety_identifier seed service_tier stop store stream stream_options temperature
    tool_choice tools top_logprobs top_p user verbosity web_search_options
"""
OPENAI_COMPLETIONS = """
    best_of echo frequency_penalty logit_bias logprobs max_tokens model n presence_penalty prompt
    seed stop stream stream_options suffix temperature top_p user
"""
VLLM = """
    add_special_tokens allowed_token_ids bad_words cache_salt ec_transfer_params ignore_eos
    include_stop_str_in_output kv_transfer_params length_penalty logprob_token_ids min_p min_tokens
    mm_payload priority prompt_logprobs repetition_detection repetition_penalty request_id
    response_format return_mm_kwargs return_token_ids return_token_offsets
    return_tokens_as_token_ids routed_experts_prompt_start session_id skip_special_tokens
    spaces_between_special_tokens stop_token_ids stream_interval structured_outputs
    thinking_token_budget top_k truncate_prompt_tokens truncation_side use_beam_search vllm_xargs
    watermarking
    early_stopping guided_choice guided_decoding_backend guided_grammar guided_json guided_regex
    guided_whitespace_pattern
"""
VLLM_COMPLETIONS = "prompt_embeds"
VLLM_CHAT = """
    add_generation_prompt chat_template chat_template_kwargs continue_final_message documents echo
    include_reasoning media_io_kwargs mm_processor_kwargs return_prompt_text
"""
OPENAI_RESPONSES = """
    background context_management conversation include input instructions max_output_tokens
    max_tool_calls metadata model moderation parallel_tool_calls previous_response_id prompt
    prompt_cache_key prompt_cache_options prompt_cache_retention reasoning safety_identifier
    service_tier store stream stream_options temperature text tool_choice tools top_logprobs top_p
    truncation user
"""
VLLM_RESPONSES = """
    chat_template_kwargs enable_response_messages frequency_penalty include_reasoning logit_bias
    media_io_kwargs mm_processor_kwargs presence_penalty previous_input_messages seed stop
"""
# What clients of the other endpoints may send to it.
STRANGE_RESPONSES = "max_tokens n"
VLLM_TOKENIZE = """
    add_generation_prompt add_special_tokens chat_template chat_template_kwargs
    continue_final_message media_io_kwargs messages mm_processor_kwargs model prompt
    return_token_strs tools
"""
OURS = {"baton_usage"}

TEMPLATE = (
    "{% for m in messages %}{{ m.role }}:{{ m.content }}{% endfor %}"
    "{{ documents }}{{ colour }}{{ reasoning_effort }}"
    "{{ tools | length if tools }}{# calls: <tool_call> #}"
    "{% if add_generation_prompt %}assistant:{% endif %}"
)

# Values that change what is asked of the workers or shown of their answers, each with the fields
# that must be there too; of fields that are not here, any value of their type does.
SAMPLES = {inspect.BoolType: True, inspect.IntType: 2, inspect.FloatType: 0.5}
SCHEMA = {"type": "object"}
SHARED: dict[str, tuple[object, dict[str, Any]]] = {
    "allowed_token_ids": ([5], {}),
    "bad_words": (["a"], {}),
    "cache_salt": ("mine", {}),
    "guided_choice": (["a"], {}),
    "guided_grammar": ("start: /a/", {}),
    "guided_json": (SCHEMA, {}),
    "guided_regex": ("a+", {}),
    "logit_bias": ({"5": 1}, {}),
    "model": ("another", {}),
    "request_id": ("mine", {}),
    "response_format": ({"type": "json_object"}, {}),
    "skip_special_tokens": (False, {}),
    "stop": ("x", {}),
    "stop_token_ids": ([5], {}),
    "stream_options": ({"include_usage": True}, {"stream": True}),
    "structured_outputs": ({"regex": "a+"}, {}),
    "truncation_side": ("left", {"truncate_prompt_tokens": 1}),
}
TOOL = {"type": "function", "function": {"name": "get"}}
FLAT = {"type": "function", "name": "get"}
CHANGES: dict[str, dict[str, tuple[object, dict[str, Any]]]] = {
    "completions": SHARED
    | {
        "add_special_tokens": (False, {}),
        "prompt": ("ho", {}),
    },
    "chat": SHARED
    | {
        "add_generation_prompt": (False, {}),
        "chat_template": ("another", {}),
        "chat_template_kwargs": ({"colour": "red"}, {}),
        "documents": ([{"title": "t", "text": "d"}], {}),
        "echo": (True, {"add_generation_prompt": False}),
        "include_reasoning": (False, {}),
        "parallel_tool_calls": (False, {"tools": [TOOL], "tool_choice": "required"}),
        "tool_choice": ("required", {"tools": [TOOL]}),
        "tools": ([TOOL], {}),
        "messages": ([{"role": "user", "content": "ho"}], {}),
        "reasoning_effort": ("high", {}),
        "top_logprobs": (1, {"logprobs": True}),
    },
    "responses": {name: how for name, how in SHARED.items() if name not in RESPONSES.refused}
    | {
        "chat_template_kwargs": ({"colour": "red"}, {}),
        "include_reasoning": (False, {}),
        "include": (["message.output_text.logprobs"], {}),
        "input": ("ho", {}),
        "instructions": ("Be brief.", {}),
        "metadata": ({"a": "b"}, {}),
        "parallel_tool_calls": (False, {}),
        "previous_response_id": ("resp_1", {}),
        "prompt_cache_key": ("a", {}),
        "reasoning": ({"effort": "low"}, {}),
        "safety_identifier": ("a", {}),
        "store": (False, {}),
        "stream_options": ({"include_obfuscation": True}, {"stream": True}),
        "text": ({"format": {"type": "json_object"}}, {}),
        "tool_choice": ("none", {"tools": [FLAT]}),
        "tools": ([FLAT], {}),
        "top_logprobs": (1, {"include": ["message.output_text.logprobs"]}),
        "user": ("anna", {}),
    },
    "tokenize": {
        "add_generation_prompt": (False, {}),
        "chat_template": ("another", {}),
        "chat_template_kwargs": ({"colour": "red"}, {}),
        "messages": ([{"role": "user", "content": "ho"}], {}),
        "model": ("another", {}),
        "prompt": ("ho", {"messages": None}),
    },
}
KINDS: dict[str, tuple[Any, Fields, set[str]]] = {
    "completions": (
        CompletionBody,
        COMPLETIONS,
        set((OPENAI_COMPLETIONS + VLLM + VLLM_COMPLETIONS).split()),
    ),
    "chat": (ChatBody, CHAT, set((OPENAI_CHAT + VLLM + VLLM_CHAT).split())),
    "responses": (
        ResponseBody,
        RESPONSES,
        set((OPENAI_RESPONSES + VLLM + VLLM_RESPONSES + STRANGE_RESPONSES).split()),
    ),
    "tokenize": (TokenizeBody, TOKENIZE, set(VLLM_TOKENIZE.split())),
}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> ServedModel:
    path = write_model(tmp_path_factory.mktemp("model"))
    (path / "tokenizer_config.json").write_text(json.dumps({"chat_template": TEMPLATE}))
    return ServedModel("letters", path, trusts_templates=True)


def outcome(model: ServedModel, kind: str, /, **fields: Any) -> object:
    """The parsed body, or the refusal."""
    try:
        if kind == "completions":
            return settled(complete(model, **{"prompt": "hi"} | fields))
        if kind == "chat":
            return settled(converse(model, **fields))
        if kind == "responses":
            return respond(model, **fields)
        said = {"messages": [{"role": "user", "content": "hi"}]} | fields
        return tokenize.tokenize(model, raw(**said), 100)
    except (HttpError, WireError) as error:
        return str(error)


def settled(asked: CompletionRequest) -> object:
    """A request with its structure, and with its reader as what that was made with."""
    asked = asked if asked.wanted is None else asked.constrained_to(asked.wanted.to_structure())
    made_with = asked.reader.keywords if isinstance(asked.reader, partial) else None
    return structs.replace(asked, reader=None), made_with


def respond(model: ServedModel, /, **fields: Any) -> object:
    """The parsed body of /v1/responses, and the fields that its response repeats."""
    asked = endpoint.read(KeptResponses(), model, raw(**{"input": "hi"} | fields), CONTEXT)
    assert isinstance(asked.answer, partial)
    echo = {name: bytes(said) for name, said in asked.answer.keywords["fixed"].echo.items()}
    # The id of a response is random, and so is the name of its request.
    requests = [(structs.replace(request, name=""), prefix) for request, prefix in asked.requests]
    return settled(structs.replace(asked, answer=ChatAnswer, requests=requests)), echo


@pytest.mark.parametrize("kind", KINDS)
def test_every_known_field_has_one_answer(kind: str) -> None:
    body, fields, known = KINDS[kind]
    works = working(body, fields)
    answers = [works, set(fields.refused), set(WITHOUT_EFFECT[kind])]
    assert sum(map(len, answers)) == len(set.union(*answers)), "a field has two answers"
    assert set.union(*answers) - OURS == known


def sample(body: type[Struct], name: str) -> object:
    info = inspect.type_info(body)
    assert isinstance(info, inspect.StructType)
    [kind] = [field.type for field in info.fields if field.name == name]
    kinds = kind.types if isinstance(kind, inspect.UnionType) else (kind,)
    [value] = [SAMPLES[type(each)] for each in kinds if type(each) in SAMPLES]
    return value


@pytest.mark.parametrize(
    ("kind", "name"),
    [(kind, name) for kind in CHANGES for name in sorted(working(*KINDS[kind][:2]))],
)
def test_a_field_that_works_makes_a_difference(model: ServedModel, kind: str, name: str) -> None:
    value, others = CHANGES[kind].get(name) or (sample(KINDS[kind][0], name), {})
    assert outcome(model, kind, **others, **{name: value}) != outcome(model, kind, **others)


@pytest.mark.parametrize("kind", KINDS)
def test_a_reason_names_no_field_that_only_other_endpoints_have(kind: str) -> None:
    fields = KINDS[kind][1]
    works = {each: working(its, of) for each, (its, of, _) in KINDS.items()}
    # Names that are words of the language too say nothing.
    others = {name for name in set.union(*works.values()) if "_" in name or name == "logprobs"}
    for name, refused in fields.refused.items():
        named = set(re.findall(r"\w+", refused.why)) - {name}
        assert not named & (others - works[kind]), name


@pytest.mark.parametrize(
    ("kind", "name", "refused"),
    [(kind, *each) for kind, (_, fields, _) in KINDS.items() for each in fields.refused.items()],
)
def test_a_field_that_does_not_is_refused_by_its_name(
    model: ServedModel, kind: str, name: str, refused: Refused
) -> None:
    before = outcome(model, kind)
    for value in (None, *refused.neutral):
        assert outcome(model, kind, **{name: value}) == before
    for value in ("something", ["something"], {"some": "thing"}, 7):
        said = outcome(model, kind, **{name: value})
        assert isinstance(said, str) and said.startswith(f"{name}: ") and refused.why in said


@pytest.mark.parametrize(
    ("kind", "name"),
    [(kind, name) for kind, names in WITHOUT_EFFECT.items() for name in names],
)
def test_a_field_without_effect_has_none(model: ServedModel, kind: str, name: str) -> None:
    for value in ("something", ["something"], {"some": "thing"}, 7):
        assert outcome(model, kind, **{name: value}) == outcome(model, kind)


def test_what_nobody_knows_is_ignored(model: ServedModel) -> None:
    assert outcome(model, "chat", no_such_field=[1]) == outcome(model, "chat")


def test_the_document_is_what_the_code_says() -> None:
    command = [sys.executable, str(ROOT / "scripts/fields.py"), "--check"]
    checked = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert checked.returncode == 0, checked.stderr
