"""`baton chat` on a real cluster: on a terminal, from a pipe, and with a model that cannot chat."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from router.command.chat import Conversation
from router.command.client import Client, read_api_key
from router.command.terminal import printable
from tests.cluster import ROOT, Cluster
from tests.router.command.on_terminal import Terminal
from wire.process.model import DEMO


def chat(url: str, text: str, *flags: str, api_key: str = "") -> subprocess.CompletedProcess[str]:
    environ = os.environ | {"BATON_API_KEY": api_key}
    return subprocess.run(
        [sys.executable, "-m", "router.command", "chat", "--url", url, *flags],
        cwd=ROOT,
        env=environ,
        input=text,
        capture_output=True,
        text=True,
        timeout=60,
    )


@pytest.fixture
def terminal(cluster: Cluster, key_file: Path) -> Iterator[Terminal]:
    flags = ("--url", cluster.http, "--api-key-file", str(key_file))
    terminal = Terminal("chat", *flags, "--max-tokens", "1500", "--temperature", "0")
    try:
        terminal.until("> ")
        yield terminal
    finally:
        terminal.close()


def test_lines_of_a_pipe_are_turns_of_one_conversation(cluster: Cluster, key_file: Path) -> None:
    flags = ("--system", "You are brief.", "--max-tokens", "8", "--temperature", "0")
    done = chat(cluster.http, "hi\n\nand then?\n", *flags, api_key=key_file.read_text())
    assert (done.returncode, done.stderr) == (0, "")
    messages = [{"role": "system", "content": "You are brief."}]
    body = {"model": "demo", "max_tokens": 8, "temperature": 0}
    client, expected = Client(cluster.http, read_api_key(key_file)), ""
    for text in ("hi", "and then?"):
        messages.append({"role": "user", "content": text})
        answer = client.call("/v1/chat/completions", {**body, "messages": messages})
        content = answer["choices"][0]["message"]["content"]
        messages.append({"role": "assistant", "content": content})
        expected += printable(content) + "\n"
    assert done.stdout == expected


def test_errors_are_sentences_and_the_conversation_goes_on(
    cluster: Cluster, key_file: Path
) -> None:
    flags = ("--max-tokens", "4", "--temperature", "0", "--api-key-file", str(key_file))
    done = chat(cluster.http, "x " * 20_000 + "\nhi\n", *flags)
    assert done.returncode == 1 and done.stderr.startswith("baton chat: ")
    assert done.stderr.count("\n") == 1 and "Traceback" not in done.stderr
    assert done.stdout.count("\n") == 2 and done.stdout.strip()
    done = chat(cluster.http, "hi\n")
    assert done.returncode == 1 and "--api-key-file" in done.stderr
    done = chat(cluster.http, "hi\n", "--model", "none", *flags)
    assert done.returncode == 1 and "--model: the router serves demo, not none" in done.stderr


def test_ctrl_c_ends_the_answer_then_the_conversation(cluster: Cluster, terminal: Terminal) -> None:
    terminal.type("Talk for an hour.\n")  # 213 tokens come, which takes 10 s
    terminal.until(" ")
    assert cluster.status()["router"]["running"] == 1
    terminal.type("\x03")
    terminal.until(" ...\r\n> ")
    cluster.until_idle()
    terminal.type("\x03")
    assert terminal.process.wait(60) == 0


def test_an_answer_that_is_cut_says_so(cluster: Cluster, key_file: Path) -> None:
    flags = ("--url", cluster.http, "--api-key-file", str(key_file))
    terminal = Terminal("chat", *flags, "--max-tokens", "2", "--temperature", "0")
    try:
        terminal.until("> ")
        terminal.type("hi\n")
        terminal.until("(The answer ends at its limit of tokens.)")
    finally:
        terminal.close()


def test_ctrl_d_ends(terminal: Terminal) -> None:
    terminal.type("\x04")
    assert terminal.process.wait(60) == 0


def test_a_model_without_a_chat_template_continues_text(tmp_path: Path) -> None:
    shutil.copytree(DEMO, model := tmp_path / "base")
    (path := model / "tokenizer_config.json").write_text(
        json.dumps(
            {
                name: value
                for name, value in json.loads((DEMO / path.name).read_text()).items()
                if name != "chat_template"
            }
        )
    )
    with Cluster(tmp_path, local="1", executor="hash", model=str(model)) as cluster:
        conversation = Conversation(Client(cluster.http), {"model": "base", "max_tokens": 4})
        assert not conversation.is_chat
        done = chat(cluster.http, "Once upon\n", "--max-tokens", "4", "--temperature", "0")
        assert (done.returncode, done.stderr) == (0, "")
        (choice,) = cluster.choices("Once upon", max_tokens=4, temperature=0)
        assert done.stdout == choice["text"] + "\n"
        done = chat(cluster.http, "hi\n", "--system", "Be brief.")
        assert done.returncode == 1 and "--system: base has no chat template" in done.stderr


def test_half_an_answer_is_remembered_and_none_is_not(cluster: Cluster, key_file: Path) -> None:
    client = Client(cluster.http, read_api_key(key_file))
    options = {"model": "demo", "max_tokens": 100, "temperature": 0}
    conversation = Conversation(client, options)
    parts = conversation.ask("hi")
    text, _ = next(parts)
    parts.close()
    assert conversation.messages[-1] == {"role": "assistant", "content": text}
    before = [*conversation.messages]
    conversation.ask("never read").close()
    assert conversation.messages == before and not conversation.is_cut
