"""Finds the route for a path, and its handler for a method; suggests paths for mistyped ones.

The list of all endpoints is `Application._table` in `router.http.application`.
"""

from __future__ import annotations

import re
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Final, NamedTuple

from router.api.errors import ErrorBody, HttpError, openai_error
from router.http.asgi import HttpExchange
from wire.errors import shown

Handler = Callable[[HttpExchange], Awaitable[None]]

# The version prefix of a path, which may be repeated by mistake.
_VERSIONS: Final = re.compile(r"^(/v1(?=/))+")


class Route(NamedTuple):
    """A path and its handlers by method; `name` identifies the endpoint in logs and metrics.

    A name in braces in the path matches any text that is not empty, including slashes, which model
    names contain.  The handler gets the text as `exchange.named`.

    Routes with `is_open` need no API key and accept any Host header.
    """

    path: str
    name: str
    handlers: Mapping[str, Handler]
    error_body: ErrorBody = openai_error
    is_open: bool = False

    @property
    def allow(self) -> bytes:
        """The value of the Allow header; GET includes HEAD."""
        methods = [*self.handlers, "OPTIONS"]
        if "GET" in self.handlers:
            methods.insert(1, "HEAD")
        return ", ".join(methods).encode()

    def handler(self, method: str) -> Handler:
        """Return the handler for a method.  Raises HttpError 405."""
        found = self.handlers.get("GET" if method == "HEAD" else method)
        if found is None:
            raise HttpError(
                405,
                f"use {' or '.join(self.handlers)} here",
                code="method_not_allowed",
                headers=((b"allow", self.allow),),
            )
        return found


class Routes:
    """Finds routes by path.  Of routes with a name in braces, the first match is used."""

    def __init__(self, routes: Sequence[Route]) -> None:
        self.all = routes
        self._whole = {route.path: route for route in routes if "{" not in route.path}
        self._named = [(*_around_name(route.path), route) for route in routes if "{" in route.path]

    def find(self, path: str) -> tuple[Route, str] | None:
        """Return the route for a path and the text that matched its name in braces."""
        path = path.rstrip("/") or "/"
        if route := self._whole.get(path):
            return route, ""
        for before, after, route in self._named:
            named = path.removeprefix(before).removesuffix(after)
            if named and path == before + named + after:
                return route, named
        return None

    def missing(self, path: str) -> HttpError:
        """Return the error 404 for an unknown path, with a hint if another version of it exists."""
        rest = _VERSIONS.sub("", path)
        meant = next((each for each in ("/v1" + rest, rest) if self.find(each)), None)
        hint = f": use {shown(meant)}" if meant else ""
        return HttpError(404, f"there is no {shown(path)} here{hint}", code="not_found")


def _around_name(path: str) -> tuple[str, str]:
    before, _, rest = path.partition("{")
    return before, rest.partition("}")[2]
