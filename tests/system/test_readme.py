"""What the documents show works as printed, and what they name is there."""

from __future__ import annotations

import ast
import itertools
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.cluster import ROOT, Cluster

EXAMPLES = ROOT / "scripts" / "examples"
DOCUMENTS = sorted(
    [ROOT / "README.md", ROOT / "wire" / "SPEC.md", ROOT / ".github" / "CONTRIBUTING.md"]
    + [path for name in ("README", "DECISIONS") for path in ROOT.glob(f"[a-z]*/{name}.md")]
)
TOP = r"(?:wire|router|worker|kernels|tests|scripts)"


def name_of(path: Path) -> str:
    return str(path.relative_to(ROOT))


every_document = pytest.mark.parametrize("document", DOCUMENTS, ids=name_of)


def anchors(document: Path) -> set[str]:
    """What a link may name after #: the headings, as GitHub writes them."""
    headings = re.findall(r"^#+ (.+)$", document.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", text.lower()).replace(" ", "-") for text in headings}


def run(command: list[str], cwd: Path) -> str:
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=60, cwd=cwd, env=environment
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_the_raw_tcp_client_works(tmp_path: Path, cluster: Cluster) -> None:
    host, port = cluster.tcp
    question = "Tell me a story about Mia and a lantern."
    client = [sys.executable, "-P", str(EXAMPLES / "client.py")]
    assert len(run([*client, cluster.http, host, str(port), question], tmp_path).split()) > 20


def test_the_engine_in_a_program_works(tmp_path: Path) -> None:
    lines = run([sys.executable, "-m", "scripts.examples.program"], tmp_path).splitlines()
    assert lines[:2] == ["length (9, 10, 11, 7, 8)", "9 10 11 7 8 "]


def test_what_python_the_documents_show_is_an_example() -> None:
    """Without its docstring, which says how to run the file."""
    examples = {path.read_text().split('"""\n\n', 1)[1] for path in EXAMPLES.glob("*.py")}
    shown = [
        block
        for document in DOCUMENTS
        for block in re.findall(r"```python\n(.*?)```", document.read_text(), re.DOTALL)
    ]
    assert len(shown) == len(examples)
    assert set(shown) == examples


def test_the_readme_is_a_door() -> None:
    assert (ROOT / "README.md").read_text().count("\n") <= 180


def test_every_document_is_one_click_away() -> None:
    links = set(re.findall(r"\]\(([^)#]+)", (ROOT / "README.md").read_text()))
    assert {name_of(document) for document in DOCUMENTS} - {"README.md"} <= links


@every_document
def test_every_link_leads_somewhere(document: Path) -> None:
    text = document.read_text()
    for link in re.findall(r"\]\(([^)\s]+)\)|(?:src|srcset)=\"([^\"]+)\"", text):
        target = "".join(link)
        if "://" in target:
            continue
        path, _, anchor = target.partition("#")
        there = (document.parent / path) if path else document
        assert there.exists(), target
        assert not anchor or anchor in anchors(there), target


@every_document
def test_every_path_it_names_is_there(document: Path) -> None:
    text = document.read_text()
    for path in re.findall(rf"`({TOP}/[\w./]*)`", text):
        assert (ROOT / path).exists(), path
    for path in re.findall(r"`(\w+/[\w/]+\.(?:py|cu|cuh|md|json|c))`", text):
        assert (ROOT / path).exists() or (document.parent / path).exists(), path
    for path in re.findall(r"^    (scripts/[\w/]+)", text, re.MULTILINE):
        assert (ROOT / path).exists(), path


def test_every_test_they_name_is_there() -> None:
    named = {
        found
        for document in DOCUMENTS
        for found in re.findall(r"`(tests/[\w/]+\.py)::(\w+)`", document.read_text())
    }
    assert len(named) > 50
    for path, name in named:
        assert re.search(rf"^(async )?def {name}\(", (ROOT / path).read_text(), re.M), (path, name)


@pytest.mark.parametrize("package", ["wire", "router", "worker", "kernels"])
def test_a_floor_plan_names_every_folder_once(package: str) -> None:
    root = ROOT / package
    plan = (root / "README.md").read_text().split("## Floor plan\n")[1].split("\n## ")[0]
    named = re.findall(r"^\| \[[\w/]+\]\(([\w/]+)/\) \|", plan, re.M)
    sources = [path for kind in ("py", "cu") for path in root.rglob(f"*.{kind}")]
    assert sorted(named) == sorted({str(path.parent.relative_to(root)) for path in sources} - {"."})


@pytest.mark.parametrize(("package", "most"), [("router", 16), ("worker", 19)])
def test_the_walk_of_a_request_is_short(package: str, most: int) -> None:
    text = (ROOT / package / "README.md").read_text()
    walk = text[text.index("## The life of a request") :].split("\n#", 1)[0]
    files = re.findall(r"^\| \d+ \| \[([\w/]+\.py)\]", walk, re.MULTILINE)
    assert files == sorted(set(files), key=files.index) and len(files) <= most
    assert len(re.findall(r"^\| \d+ \|", walk, re.MULTILINE)) == len(files)


def sentences() -> str:
    """Every text in the code of the product, with … where a value is put in."""
    found = []
    for path in itertools.chain.from_iterable(
        (ROOT / name).rglob("*.py") for name in ("wire", "router", "worker", "kernels")
    ):
        for node in ast.walk(ast.parse(path.read_text())):
            parts = node.values if isinstance(node, ast.JoinedStr) else [node]
            texts = [it.value if isinstance(it, ast.Constant) else "…" for it in parts]
            if all(isinstance(text, str) for text in texts):
                found.append("".join(map(str, texts)).replace("%s", "…"))
    return "\n".join(found)


def test_the_messages_it_explains_are_in_the_code() -> None:
    """Piece by piece between the values, for some are put together."""
    text = (ROOT / "scripts" / "README.md").read_text()
    table = text[text.index("## Troubleshooting") :]
    messages = [
        message
        for cell in re.findall(r"^\| (.+?) \|", table, re.MULTILINE)
        for message in re.findall(r"`([^`]+)`", cell)
        if " " in message
    ]
    assert len(messages) > 25
    said = sentences()
    for message in messages:
        for piece in message.split("…"):
            assert piece.strip() in said, message
