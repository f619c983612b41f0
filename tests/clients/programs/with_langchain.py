"""langchain-openai: structured output in its three ways, bound tools, streams, responses."""

import sys

from langchain_core.messages import HumanMessage, ToolMessage
from langchain_core.utils.function_calling import convert_to_openai_tool
from langchain_openai import ChatOpenAI
from questions import QUESTION, Person, Weather

URL, MODEL = sys.argv[1:]
ASKED = [HumanMessage(QUESTION)]

for responses in (False, True):
    chat = ChatOpenAI(
        model=MODEL,
        base_url=f"{URL}/v1",
        api_key="none",
        max_tokens=400,
        max_retries=0,
        use_responses_api=responses,
    )
    for method in ("json_schema", "function_calling"):
        person = chat.with_structured_output(Person, method=method).invoke(ASKED)
        assert isinstance(person, Person), method
    calling = chat.bind_tools([Weather], tool_choice="any", parallel_tool_calls=False)
    answer = calling.invoke(ASKED, seed=5) if not responses else calling.invoke(ASKED)
    (call,) = answer.tool_calls
    Weather.model_validate(call["args"], strict=True)
    chunks = list(calling.stream(ASKED))
    whole = chunks[0]
    for chunk in chunks[1:]:
        whole += chunk
    (streamed,) = whole.tool_calls
    Weather.model_validate(streamed["args"], strict=True)
    result = ToolMessage("21 degrees", tool_call_id=call["id"])
    tools = [convert_to_openai_tool(Weather)]
    assert chat.bind(tools=tools).invoke([*ASKED, answer, result]).type == "ai"
