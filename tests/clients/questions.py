"""Every client's request: tools and schemas that a model can fill without understanding them.

All values are bounded, so that an answer ends within the demo model's context whatever it draws.
"""

from __future__ import annotations

from typing import Annotated, Any, Final, Literal

from pydantic import BaseModel, ConfigDict, Field

QUESTION: Final = "What is the weather in Paris and in Rome?"
STORY: Final = "Tell me a story about a fox."
MESSAGES: Any = [{"role": "user", "content": QUESTION}]
NAMED: Any = {"type": "function", "function": {"name": "get_weather"}}
ALLOWED: Any = {
    "type": "allowed_tools",
    "allowed_tools": {"mode": "required", "tools": [NAMED]},
}


class Weather(BaseModel):
    """Say what the weather is in a city."""

    model_config = ConfigDict(extra="forbid")

    city: Literal["Paris", "Rome", "Oslo"]
    unit: Literal["celsius", "fahrenheit"]
    days: Annotated[int, Field(ge=1, le=9)]


class Time(BaseModel):
    """Say what time it is."""

    model_config = ConfigDict(extra="forbid")

    zone: Literal["UTC", "CET"]


class Person(BaseModel):
    """Somebody in a story."""

    model_config = ConfigDict(extra="forbid")

    name: Annotated[str, Field(min_length=1, max_length=12)]
    age: Annotated[int, Field(ge=0, le=120)]
    mood: Literal["glad", "sad"] | None
    pets: Annotated[list[Literal["cat", "dog", "fox"]], Field(max_length=3)]


PERSON: Final[dict[str, Any]] = Person.model_json_schema()
_TOOLS: Final[dict[str, type[BaseModel]]] = {"get_weather": Weather, "get_time": Time}
# As /v1/chat/completions takes them.
TOOLS: Final[list[dict[str, Any]]] = [
    {
        "type": "function",
        "function": {
            "name": name,
            "description": model.__doc__,
            "parameters": model.model_json_schema(),
        },
    }
    for name, model in _TOOLS.items()
]


def check_call(name: str, arguments: Any) -> None:
    """The tool is one of ours and would take these arguments."""
    _TOOLS[name].model_validate(arguments, strict=True)
