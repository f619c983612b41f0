"""guidellm: a short benchmark of chats, none of whose requests fails."""

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

URL, MODEL = sys.argv[1:]
TOKENIZER = Path(__file__).parents[3] / "wire" / "demo"

with tempfile.TemporaryDirectory() as directory:
    for path in ("/v1/completions", "/v1/chat/completions", "/v1/responses"):
        written = Path(directory) / "results.json"
        command = [
            *(str(Path(sys.executable).with_name("guidellm")), "run", "--disable-console"),
            "--backend",
            f"kind=openai_http,target={URL},model={MODEL},request_format={path}",
            *("--profile", "kind=concurrent,streams=4"),
            *("--constraint", "kind=max_requests,count=20"),
            *("--tokenizer", f"kind=huggingface_auto,model={TOKENIZER}"),
            *("--data", "kind=synthetic_text,prompt_tokens=32,output_tokens=16"),
            *("--output", f"kind=json,path={written}"),
        ]
        environment = os.environ | {"HF_HUB_OFFLINE": "1"}
        done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
        assert done.returncode == 0, (done.stdout + done.stderr)[-2000:]
        totals = json.loads(written.read_text())["benchmarks"][0]["metrics"]["request_totals"]
        assert totals["successful"] == 20 and not totals["errored"], (path, totals)
        print(f"{path} {totals['successful']} requests")
