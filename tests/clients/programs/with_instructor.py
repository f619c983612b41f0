"""instructor: a model filled by a forced tool, by JSON mode, by a JSON schema, and by responses."""

import sys

import instructor
import openai
from pydantic import BaseModel, ConfigDict
from questions import QUESTION, Person

URL, MODEL = sys.argv[1:]


class Anything(BaseModel):
    """JSON mode promises an object and no more."""

    model_config = ConfigDict(extra="allow")


def fill(mode: instructor.Mode, wanted: type[BaseModel]) -> None:
    with openai.OpenAI(base_url=f"{URL}/v1", api_key="none", max_retries=0) as client:
        filled = instructor.from_openai(client, mode=mode).create(
            model=MODEL,
            messages=[{"role": "user", "content": QUESTION}],
            response_model=wanted,
            max_retries=5,
            **({} if mode is instructor.Mode.RESPONSES_TOOLS else {"max_tokens": 400}),
        )
    assert isinstance(filled, wanted), mode


fill(instructor.Mode.TOOLS, Person)
fill(instructor.Mode.TOOLS_STRICT, Person)
fill(instructor.Mode.JSON_SCHEMA, Person)
fill(instructor.Mode.JSON, Anything)
fill(instructor.Mode.RESPONSES_TOOLS, Person)
