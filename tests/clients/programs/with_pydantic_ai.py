"""pydantic-ai: structured output by a tool and natively, function tools, streams."""

import asyncio
import sys
from typing import Literal

from pydantic_ai import Agent, NativeOutput, ToolOutput
from pydantic_ai.models.openai import OpenAIChatModel, OpenAIResponsesModel
from pydantic_ai.providers.openai import OpenAIProvider
from pydantic_ai.usage import UsageLimits
from questions import QUESTION, Person

URL, MODEL = sys.argv[1:]
SETTINGS = {"max_tokens": 400, "temperature": 1.0}


async def main() -> None:
    provider = OpenAIProvider(base_url=f"{URL}/v1", api_key="none")
    for kind in (OpenAIChatModel, OpenAIResponsesModel):
        model = kind(MODEL, provider=provider)
        for output in (ToolOutput(Person), NativeOutput(Person)):
            agent = Agent(model, output_type=output, model_settings=SETTINGS)
            assert isinstance((await agent.run(QUESTION)).output, Person)
            async with agent.run_stream(QUESTION) as stream:
                assert isinstance(await stream.get_output(), Person)
        await with_a_tool(model)


async def with_a_tool(model: object) -> None:
    """Until the model draws the answer instead of another call."""
    agent = Agent(model, output_type=ToolOutput(Person), model_settings=SETTINGS)

    @agent.tool_plain
    def get_weather(city: Literal["Paris", "Rome"]) -> str:
        """Say what the weather is in a city."""
        return f"sunny in {city}"

    result = await agent.run(QUESTION, usage_limits=UsageLimits(request_limit=40))
    assert isinstance(result.output, Person)


asyncio.run(main())
