"""lm-eval: a task of its own by log-likelihood, and one by generating."""

import json
import subprocess
import sys
import tempfile
from pathlib import Path

URL, MODEL = sys.argv[1:]
TOKENIZER = Path(__file__).parents[3] / "wire" / "demo"
STORIES = [
    {"begin": "Once upon a time there was a", "ends": [" fox", " quantum"], "right": 0},
    {"begin": "One day, Mia found a", "ends": [" parliament", " lantern"], "right": 1},
]
COMMON = (
    "dataset_path: json\ndataset_kwargs: {data_files: {test: stories.jsonl}}\ntest_split: test\n"
)
CHOICE = """task: baton_choice
output_type: multiple_choice
doc_to_text: "{{begin}}"
doc_to_choice: "{{ends}}"
doc_to_target: right
metric_list: [{metric: acc}]
"""
TEXT = """task: baton_text
output_type: generate_until
doc_to_text: "{{begin}}"
doc_to_target: " fox"
generation_kwargs: {until: ["."], max_gen_toks: 16}
metric_list: [{metric: exact_match}]
"""

with tempfile.TemporaryDirectory() as directory:
    here = Path(directory)
    data = here / "stories.jsonl"
    data.write_text("".join(json.dumps(story) + "\n" for story in STORIES))
    for name, text in (("choice", CHOICE), ("text", TEXT)):
        (here / f"{name}.yaml").write_text(COMMON.replace("stories.jsonl", str(data)) + text)
    model = f"model={MODEL},base_url={URL}/v1/completions,tokenizer={TOKENIZER},num_concurrent=2"
    command = [
        *(sys.executable, "-m", "lm_eval", "--model", "local-completions", "--model_args", model),
        *("--tasks", "baton_choice,baton_text", "--include_path", directory),
        *("--output_path", f"{directory}/results"),
    ]
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=directory)
    assert done.returncode == 0, done.stderr[-2000:]
    (written,) = (here / "results").rglob("results_*.json")
    results = json.loads(written.read_text())["results"]
    assert {"baton_choice", "baton_text"} <= set(results)
    print(f"acc {results['baton_choice']['acc,none']}")
