"""Web pages, and the names by which they reach us."""

from __future__ import annotations

from typing import Any

import pytest

from router.api.errors import HttpError
from router.http.origin import Origins, check_origin, preflight

PAGE = "https://chat.example.org"


def scope(method: str = "GET", **headers: str) -> dict[str, Any]:
    named = {"host": "localhost:8000"} | headers
    pairs = [
        (key.replace("_", "-").encode(), value.encode("latin-1")) for key, value in named.items()
    ]
    return {"method": method, "headers": pairs}


def refused(origins: Origins, **headers: str) -> str | None:
    try:
        origins.admit(scope(**headers))
    except HttpError as error:
        assert error.status == 403
        return error.code
    return None


@pytest.mark.parametrize(
    "host", ["localhost", "localhost:8000", "127.0.0.1:80", "[::1]:8000", "10.1.2.3", "LOCALHOST:1"]
)
def test_programs_say_no_origin_and_are_let_in(host: str) -> None:
    assert Origins().admit(scope(host=host)) == ()


@pytest.mark.parametrize(
    "host",
    [
        *("evil.example:8000", "", "localhost.evil.example", "a:b", "localhost:b", "localhost:²"),
        *("[::1].evil.example", "[::1", "user@localhost", "localhost:80:80"),
    ],
)
def test_a_name_that_is_none_of_ours(host: str) -> None:
    """DNS rebinding: the page and its host name are the same origin to the browser."""
    assert refused(Origins(), host=host, origin=f"http://{host}") == "host_not_allowed"
    assert refused(Origins(checks_host=False), host=host) is None


def test_names_that_are_allowed() -> None:
    origins = Origins(hosts=["LLM.example.org"])
    assert refused(origins, host="llm.example.org:8000") is None
    assert refused(origins, host="localhost") is None
    assert refused(origins, host="example.org") == "host_not_allowed"
    assert refused(Origins(hosts=["*"]), host="any.example") is None


@pytest.mark.parametrize(
    "headers",
    [
        {"origin": PAGE},
        {"origin": "null"},
        {"origin": "http://localhost:3000"},
        {"origin": "http://localhost:8000.evil.example"},
        {"sec_fetch_site": "cross-site"},
        {"sec_fetch_site": "same-site"},
        {"sec_fetch_site": " Cross-Site "},
    ],
)
@pytest.mark.parametrize("checks_host", [True, False])
def test_pages_of_others(headers: dict[str, str], *, checks_host: bool) -> None:
    assert refused(Origins(checks_host=checks_host), **headers) == "origin_not_allowed"


def test_our_own_pages_and_addresses_typed_in() -> None:
    origins = Origins()
    assert refused(origins, origin="http://localhost:8000", sec_fetch_site="same-origin") is None
    assert refused(origins, sec_fetch_site="none") is None
    assert refused(origins, host="LocalHost:8000", origin="http://LocalHost:8000") is None


def test_an_allowed_page_may_read() -> None:
    headers = dict(Origins([PAGE]).admit(scope(origin=PAGE, sec_fetch_site="cross-site")))
    assert headers[b"access-control-allow-origin"] == PAGE.encode()
    assert headers[b"vary"] == b"Origin"
    assert refused(Origins([PAGE]), origin="https://other.example.org") == "origin_not_allowed"
    assert dict(Origins(["*"]).admit(scope(origin="https://a.b")))


def test_a_preflight_request_gets_its_headers() -> None:
    asked = scope(
        "OPTIONS",
        access_control_request_method="POST",
        access_control_request_headers="authorization,content-type,x-stainless-os",
        access_control_request_private_network="true",
    )
    answer = dict(preflight(asked, b"POST") or ())
    assert answer[b"access-control-allow-methods"] == b"POST"
    assert b"x-stainless-os" in answer[b"access-control-allow-headers"]
    assert answer[b"access-control-allow-private-network"] == b"true"
    assert preflight(scope("OPTIONS"), b"POST") is None
    assert preflight(scope("POST", access_control_request_method="POST"), b"POST") is None


@pytest.mark.parametrize("origin", ["example.org", "https://a/", "https://A.b", "https://", ""])
def test_origins_that_no_browser_says(origin: str) -> None:
    with pytest.raises(ValueError, match="not an origin"):
        check_origin(origin)
