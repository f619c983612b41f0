"""Every operation is a route and every route an operation; the statuses fit."""

from __future__ import annotations

from pathlib import Path

from router.api.openapi.operations import OPERATIONS
from tests.router.site import Site, write_model


def test_every_route_is_an_operation_and_every_operation_a_route(tmp_path: Path) -> None:
    routes = Site(write_model(tmp_path)).application.routes.all
    found = {(method.lower(), route.path) for route in routes for method in route.handlers}
    assert found == {(each.method, each.path) for each in OPERATIONS}
    is_open = {route.path for route in routes if route.is_open}
    assert is_open == {each.path for each in OPERATIONS if each.is_open}


def test_statuses() -> None:
    by_name = {(each.method, each.path): each.refusals for each in OPERATIONS}
    always = [400, 408, 431, 500, 503]
    assert by_name["get", "/livez"] == always
    assert by_name["get", "/v1/models"] == sorted([*always, 401, 403])
    assert by_name["get", "/v1/models/{model}"] == sorted([*always, 401, 403, 404])
    with_body = sorted([*always, 401, 403, 404, 413, 415, 429])
    assert by_name["post", "/v1/completions"] == with_body
