"""A real Chromium for the tests of the page, and what it said in its console."""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from playwright.sync_api import Browser, Page, sync_playwright

from tests.cluster import START_S

NAMES = ("chromium", "chromium-browser", "google-chrome")


def chromium() -> str:
    """The path of the browser; skips the test where there is none, but fails it in CI."""
    path = next(filter(None, map(shutil.which, NAMES)), None)
    if path is None:
        reason = "there is no Chromium here: scripts/setup browser installs it"
        (pytest.fail if os.environ.get("CI") == "true" else pytest.skip)(reason)
    return path


@contextmanager
def browser(path: str) -> Iterator[Browser]:
    """A browser without a window."""
    # Chromium's sandbox refuses root, which containers are.
    args = ["--no-sandbox"] if os.geteuid() == 0 else []
    with sync_playwright() as playwright:
        launched = playwright.chromium.launch(executable_path=path, args=args)
        try:
            yield launched
        finally:
            launched.close()


class Tab:
    """A page with what it said: `problems` are errors, also of the policy, and uncaught ones."""

    def __init__(self, browser: Browser, url: str, width: int = 1366, **context: Any) -> None:
        viewport = {"width": width, "height": context.pop("height", 850)}
        self.page: Page = browser.new_page(viewport=viewport, **context)  # type: ignore[arg-type]
        self.page.set_default_timeout(1000 * START_S)
        self.problems: list[str] = []
        self.page.on("console", self._on_console)
        self.page.on("pageerror", lambda error: self.problems.append(str(error)))
        self.page.goto(url)

    def _on_console(self, message: Any) -> None:
        if message.type in ("error", "warning"):
            self.problems.append(message.text)

    def until(self, script: str, timeout_s: float = START_S) -> None:
        """Wait until an expression is true in the page, whose policy forbids to wait there."""
        deadline = time.monotonic() + timeout_s
        while not self.page.evaluate(script):
            if time.monotonic() > deadline:
                raise TimeoutError(f"not in {timeout_s} s: {script}; {self.problems}")
            self.page.wait_for_timeout(50)
