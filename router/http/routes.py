"""Routes from paths and methods to endpoints, with a hint for wrong paths."""

from __future__ import annotations

import re
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Final, NamedTuple

from router.api.errors import ErrorBody, HttpError, openai_error
from router.http.asgi import HttpExchange
from wire.errors import shown

Handler = Callable[[HttpExchange], Awaitable[None]]

# Versions before the path, one or by mistake several.
_VERSIONS: Final = re.compile(r"^(/v1(?=/))+")


class Route(NamedTuple):
    """A path and its handlers by method; `name` is the endpoint's in logs and metrics.

    A name in braces in the path stands for any text that is not empty, slashes included, since
    names of models have them.  The handler finds the text as `exchange.named`.

    `is_open` routes need no API key and accept any Host.
    """

    path: str
    name: str
    handlers: Mapping[str, Handler]
    error_body: ErrorBody = openai_error
    is_open: bool = False

    @property
    def allow(self) -> bytes:
        """The value of the header Allow; GET includes HEAD."""
        methods = [*self.handlers, "OPTIONS"]
        if "GET" in self.handlers:
            methods.insert(1, "HEAD")
        return ", ".join(methods).encode()

    def handler(self, method: str) -> Handler:
        """Return the handler of a method.  Raises HttpError 405."""
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
    """The table of routes; of those with a name in braces the first that fits is used."""

    def __init__(self, routes: Sequence[Route]) -> None:
        self.all = routes
        self._whole = {route.path: route for route in routes if "{" not in route.path}
        self._named = [(*_around_name(route.path), route) for route in routes if "{" in route.path]

    def find(self, path: str) -> tuple[Route, str] | None:
        """Return the route of a path and the text for its name in braces."""
        path = path.rstrip("/")
        if route := self._whole.get(path):
            return route, ""
        for before, after, route in self._named:
            named = path.removeprefix(before).removesuffix(after)
            if named and path == before + named + after:
                return route, named
        return None

    def missing(self, path: str) -> HttpError:
        """Return the 404 for a path without a route, with the path that was likely meant."""
        rest = _VERSIONS.sub("", path)
        meant = next((each for each in ("/v1" + rest, rest) if self.find(each)), None)
        hint = f": use {shown(meant)}" if meant else ""
        return HttpError(404, f"there is no {shown(path)} here{hint}", code="not_found")


def _around_name(path: str) -> tuple[str, str]:
    before, _, rest = path.partition("{")
    return before, rest.partition("}")[2]
