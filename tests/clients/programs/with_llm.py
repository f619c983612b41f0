"""llm: --schema and --functions on the command line."""

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

from questions import PERSON, QUESTION, Person

URL, MODEL = sys.argv[1:]
FUNCTION = """
def get_weather(city: str) -> str:
    "Say what the weather is in a city."
    return "sunny"
"""


def llm(*arguments: str) -> str:
    command = [str(Path(sys.executable).with_name("llm")), "-m", "served", *arguments, QUESTION]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


with tempfile.TemporaryDirectory() as directory:
    os.environ |= {"LLM_USER_PATH": directory, "OPENAI_API_KEY": "none"}
    (Path(directory) / "extra-openai-models.yaml").write_text(
        f"- {{model_id: served, model_name: {MODEL}, api_base: '{URL}/v1',"
        " supports_schema: true, supports_tools: true}\n"
    )
    limit = ("-o", "max_tokens", "400")
    assert llm(*limit).strip()
    for stream in ((), ("--no-stream",)):
        said = llm(*limit, *stream, "--schema", json.dumps(PERSON))
        Person.model_validate_json(said)
        llm(*limit, *stream, "--functions", FUNCTION)
