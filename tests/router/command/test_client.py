"""The client of a router says in a sentence what went wrong."""

from __future__ import annotations

import socket
from contextlib import closing
from pathlib import Path

import pytest

from router.command.client import Client, RequestError, read_api_key
from tests.certificate import make
from tests.cluster import Cluster
from tests.router.command.serving import serving
from wire.aio.tls import server_context


def test_a_router_answers_and_streams(cluster: Cluster, key_file: Path) -> None:
    client = Client(cluster.http + "/", read_api_key(key_file))
    assert client.call("/v1/models")["data"][0]["id"] == "demo"
    body = {"model": "demo", "prompt": "hi", "max_tokens": 3, "ignore_eos": True}
    events = list(client.stream("/v1/completions", body))
    assert len([each for each in events if each["choices"][0]["text"]]) >= 1


def test_closing_a_stream_cancels_the_request(cluster: Cluster, key_file: Path) -> None:
    client = Client(cluster.http, read_api_key(key_file))
    body = {"model": "demo", "prompt": "hi", "max_tokens": 1500, "ignore_eos": True}
    with closing(client.stream("/v1/completions", body)) as events:
        next(events)
        assert cluster.status()["router"]["running"] == 1
    cluster.until_idle()


def test_errors_of_the_router_are_its_sentences(cluster: Cluster, key_file: Path) -> None:
    with pytest.raises(RequestError, match="BATON_API_KEY, or --api-key-file") as caught:
        Client(cluster.http).call("/v1/models")
    assert caught.value.status == 401
    client = Client(cluster.http, read_api_key(key_file))
    with pytest.raises(RequestError, match="the model 'none' does not exist here") as caught:
        list(client.stream("/v1/completions", {"model": "none", "prompt": "hi"}))
    assert caught.value.status == 404
    with pytest.raises(RequestError, match="there is no '/none' here"):
        client.call("/none")


@pytest.mark.parametrize(
    ("body", "sentence"),
    [
        (b'data: {"choices": []}\n\n', "closed the connection before the end"),
        (b'data: {"error": {"message": "no worker is left"}}\n\n', "no worker is left"),
        (b"data: {\n\n", "Expecting property name"),
    ],
)
def test_an_answer_that_is_not_whole_is_an_error(body: bytes, sentence: str) -> None:
    with serving(lambda _: (200, body)) as url, pytest.raises(RequestError, match=sentence):
        list(Client(url).stream("/", {}))


def test_a_status_without_json_is_named() -> None:
    with serving(lambda _: (502, b"<html>")) as url:
        with pytest.raises(RequestError, match="answered 502"):
            Client(url).call("/", {})
        with pytest.raises(RequestError, match="Expecting value"):
            Client(url).ask("/")


def test_an_error_may_be_what_is_asked_for() -> None:
    with serving(lambda _: (503, b'{"reasons": []}'), date="today") as url:
        assert Client(url).ask("/readyz") == ("today", {"reasons": []})


def test_the_routers_own_certificate_is_trusted_under_any_name(tmp_path: Path) -> None:
    for name in ("own", "other"):
        (tmp_path / name).mkdir()
    own, other = make(tmp_path / "own"), make(tmp_path / "other")
    own.key.chmod(0o600)
    with serving(lambda _: (200, b"{}"), tls=server_context(own.cert, own.key)) as url:
        url = url.replace("127.0.0.1", "localhost")  # it is for the address only
        assert Client(url, certificate=own.cert).call("/") == {}
        for client in (Client(url), Client(url, certificate=other.cert)):
            with pytest.raises(RequestError, match="certificate verify failed"):
                client.call("/")
    with pytest.raises(RequestError, match="No such file"):
        Client(url, certificate=tmp_path / "none").call("/")


def test_nobody_listening_is_said() -> None:
    with closing(socket.socket()) as taken:
        taken.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{taken.getsockname()[1]}"
        with pytest.raises(RequestError, match=r"nothing listens at .*`baton serve`"):
            Client(url).call("/")


@pytest.mark.parametrize("url", ["", "box:8000", "http://box:x", "http://", "http://box/v1"])
def test_an_address_that_is_none_is_refused(url: str) -> None:
    with pytest.raises(RequestError, match="--url"):
        Client(url)


def test_a_key_is_read_from_a_file_or_the_environment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("BATON_API_KEY", "sk-1\n")
    assert read_api_key(None) == "sk-1"
    (file := tmp_path / "key").write_text("# mine\n\n sk-2 \nsk-3\n")
    assert read_api_key(file) == "sk-2"
    file.write_text("# mine\n")
    for path in (file, tmp_path / "none"):
        with pytest.raises(RequestError, match="--api-key-file"):
            read_api_key(path)
    monkeypatch.delenv("BATON_API_KEY")
    assert read_api_key(None) == ""
