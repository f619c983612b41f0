"""Checks the headers Origin (CORS) and Host, against requests from foreign web pages.

A browser inside the network sends requests on behalf of any web page, to any address.

    Origin          a foreign web page is refused.  So is a cross-site Sec-Fetch-Site, which
                    browsers may send instead of Origin; programs send neither
    Host            without API keys, it must be a name of this router, because a web page may use
                    its own name that resolves to the router's address (DNS rebinding)
    allowed pages   get CORS headers in all responses, including those to preflight requests
"""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Collection
from typing import Final
from urllib.parse import urlsplit

from router.api.errors import Header, HttpError
from router.http.asgi import Scope, find_header
from wire.errors import shown

ANY: Final = "*"
# Browsers may cache a preflight response this long.
PREFLIGHT_S: Final = 600
# Response headers that the scripts of a web page may read.
_EXPOSED: Final = b"x-request-id, request-id, retry-after"
_HOST: Final = re.compile(
    r"(\[(?P<address>[0-9a-f:.]+)\]|(?P<name>[^\[\]:/@]*))(:[0-9]{1,5})?", re.ASCII
)
_NAMES: Final = re.compile(rb"[A-Za-z0-9!#$%&'*+.^_`|~, -]{0,1024}")


class Origins:
    """The allowed origins of web pages and the allowed host names; "*" allows all.

    `checks_host` may be False if API keys are required.
    """

    def __init__(
        self,
        origins: Collection[str] = (),
        hosts: Collection[str] = (),
        *,
        checks_host: bool = True,
    ) -> None:
        self._origins = frozenset(origins)
        self._hosts = frozenset(host.lower() for host in hosts)
        self._checks_host = checks_host and ANY not in hosts

    def admit(self, scope: Scope) -> tuple[Header, ...]:
        """Check a request and return CORS headers for an allowed page.  Raises HttpError 403."""
        host = (find_header(scope, b"host") or b"").decode("latin-1").lower()
        if self._checks_host and not self._is_safe_host(_name(host)):
            raise HttpError(
                403,
                f"the Host {shown(host)} is not a name of this router: use localhost or its "
                "address, or start the router with --allowed-hosts NAME",
                code="host_not_allowed",
            )
        origin = (find_header(scope, b"origin") or b"").decode("latin-1")
        if origin and (origin in self._origins or ANY in self._origins):
            return (
                (b"access-control-allow-origin", origin.encode("latin-1")),
                (b"access-control-expose-headers", _EXPOSED),
                (b"vary", b"Origin"),
            )
        site = (find_header(scope, b"sec-fetch-site") or b"none").strip().lower()
        is_same = origin.lower().partition("://")[2] == host
        if (origin and not is_same) or (not origin and site in (b"cross-site", b"same-site")):
            raise HttpError(
                403,
                f"the web page {shown(origin or 'of another site')} may not ask this router: start "
                "the router with --allowed-origins ORIGIN to let it",
                code="origin_not_allowed",
            )
        return ()

    def _is_safe_host(self, name: str) -> bool:
        """Whether a foreign web page cannot have this host name."""
        return name == "localhost" or name in self._hosts or _is_address(name)


def preflight(scope: Scope, allow: bytes) -> tuple[Header, ...] | None:
    """Return the response headers for a preflight request, or None for any other request."""
    if scope["method"] != "OPTIONS" or not find_header(scope, b"access-control-request-method"):
        return None
    wanted = find_header(scope, b"access-control-request-headers") or b""
    headers = [
        (b"access-control-allow-methods", allow),
        (b"access-control-allow-headers", wanted if _NAMES.fullmatch(wanted) else b""),
        (b"access-control-max-age", b"%d" % PREFLIGHT_S),
    ]
    if find_header(scope, b"access-control-request-private-network") == b"true":
        headers.append((b"access-control-allow-private-network", b"true"))
    return tuple(headers)


def check_origin(origin: str) -> str:
    """Check that an origin is written as browsers send it, and return it.  Raises ValueError."""
    if origin in (ANY, "null"):
        return origin
    parts = urlsplit(origin)
    if not parts.scheme or not parts.netloc or origin != f"{parts.scheme}://{parts.netloc}".lower():
        raise ValueError(f"{origin!r} is not an origin, such as https://chat.example.org, or *")
    return origin


def is_loopback(host: str) -> bool:
    """Whether only this machine can connect to an address; False for all names but localhost."""
    return host == "localhost" or (_is_address(host) and ipaddress.ip_address(host).is_loopback)


def _name(host: str) -> str:
    """Return a Host header without port and brackets, or "" if it is malformed."""
    match = _HOST.fullmatch(host)
    return match["address"] or match["name"] or "" if match else ""


def _is_address(name: str) -> bool:
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True
