"""litellm: tools, structured output, streams, responses, and Anthropic's API behind one call."""

import json
import sys

import litellm
from questions import QUESTION, TOOLS, Person, check_call

URL, MODEL = sys.argv[1:]
litellm.suppress_debug_info = True
MESSAGES = [{"role": "user", "content": QUESTION}]


def ask(**fields: object) -> object:
    asked = {"model": f"openai/{MODEL}", "api_base": f"{URL}/v1", "max_tokens": 400} | fields
    return litellm.completion(messages=MESSAGES, api_key="none", num_retries=0, **asked)


def calls_of(answer: object) -> None:
    calls = answer.choices[0].message.tool_calls
    assert calls
    for call in calls:
        check_call(call.function.name, json.loads(call.function.arguments))


assert ask().choices[0].message.content
calls_of(ask(tools=TOOLS, tool_choice="required"))
chunks = list(ask(tools=TOOLS, tool_choice="required", stream=True))
calls_of(litellm.stream_chunk_builder(chunks, messages=MESSAGES))
Person.model_validate_json(ask(response_format=Person).choices[0].message.content)
anthropic = {"model": f"anthropic/{MODEL}", "api_base": URL}
assert ask(**anthropic).choices[0].message.content
calls_of(ask(**anthropic, tools=TOOLS, tool_choice="required"))
response = litellm.responses(
    model=f"openai/{MODEL}", api_base=f"{URL}/v1", api_key="none", input=QUESTION
)
assert response.output
