"""Takes the pictures of router/README.md: python -m tests.browser.pictures [DIRECTORY]"""

from __future__ import annotations

import base64
import itertools
import sys
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
from playwright.sync_api import Browser

from tests.browser.chromium import Tab, browser, chromium
from tests.cluster import ROOT, Cluster

PICTURES = ROOT / "router" / "page" / "pictures"
MAX_BYTES = 60_000
MAX_WIDTH = 1366
STORY = "Tell me a story about a fox and a lamp. "
CLIENTS = 6
# The lines of the figures have something to show after this long.
WARM_MS = 20_000
# Few, so that the bars of the workers show something.
NUM_BLOCKS = "768"


@contextmanager
def load(cluster: Cluster) -> Iterator[None]:
    """Clients that chat without a pause, with prompts and answers of various lengths."""
    over = threading.Event()

    def chat(first: int) -> None:
        with httpx.Client(timeout=60, trust_env=False) as client:
            for turn in itertools.count(first):
                if over.is_set():
                    return
                content = STORY * (1 + turn * 7 % 23)
                body: dict[str, Any] = {"messages": [{"role": "user", "content": content}]}
                body |= {"max_tokens": 8 + turn * 13 % 80, "ignore_eos": turn % 3 > 0}
                client.post(f"{cluster.http}/v1/chat/completions", json=body)

    threads = [threading.Thread(target=chat, args=(number,)) for number in range(CLIENTS)]
    for thread in threads:
        thread.start()
    try:
        yield
    finally:
        over.set()
        for thread in threads:
            thread.join()


def take(tab: Tab, name: str, directory: Path) -> None:
    """Write what is seen as WebP, in the best quality that is small enough."""
    session, size = tab.page.context.new_cdp_session(tab.page), tab.page.viewport_size
    assert size is not None
    tab.page.evaluate("scrollTo(0, 0)")
    clip = {"x": 0, "y": 0, **size, "scale": min(1.0, MAX_WIDTH / size["width"])}
    for quality in (85, 70, 55, 40, 25):
        asked: dict[str, Any] = {"format": "webp", "quality": quality, "clip": clip}
        picture = base64.b64decode(session.send("Page.captureScreenshot", asked)["data"])
        if len(picture) <= MAX_BYTES:
            break
    directory.joinpath(f"{name}.webp").write_bytes(picture)
    sys.stdout.write(f"{name}.webp {len(picture)} bytes, quality {quality}\n")


def chat(tab: Tab) -> None:
    tab.page.fill("#prompt", "Hello")
    tab.page.fill("#temperature", "0")
    tab.page.fill("#max-tokens", "48")
    tab.page.press("#prompt", "Enter")
    tab.until("document.querySelector('#said').textContent.startsWith('The answer')")
    tab.page.evaluate("document.activeElement.blur()")


def take_all(shown: Browser, cluster: Cluster, directory: Path) -> None:
    tab = Tab(shown, cluster.http)
    tab.until("document.querySelector('#health').dataset.state === 'ready'")
    take(tab, "idle", directory)
    extra = cluster.worker("decode", 2, "--num-blocks", NUM_BLOCKS)
    with load(cluster):
        tab.page.wait_for_timeout(WARM_MS)
        chat(tab)
        tab.page.wait_for_timeout(1500)
        take(tab, "loaded", directory)
        tab.page.click("#rows tr:has(.transfer) button")
        tab.until("!document.querySelector('#detail-more').hidden")
        take(tab, "detail", directory)
        tab.page.click("#detail-close")
        extra.kill()
        tab.until("document.querySelector('.is-lost')")
        tab.page.wait_for_timeout(3000)
        take(tab, "lost", directory)
        phone = Tab(shown, cluster.http, 360, height=760, device_scale_factor=2)
        phone.page.wait_for_timeout(WARM_MS // 2)
        take(phone, "phone", directory)
        dark = Tab(shown, cluster.http, 1920, height=1080, color_scheme="dark")
        dark.page.wait_for_timeout(WARM_MS // 2)
        chat(dark)
        dark.page.wait_for_timeout(1500)
        take(dark, "dark", directory)


def main() -> None:
    directory = Path(sys.argv[1]) if len(sys.argv) > 1 else PICTURES
    directory.mkdir(parents=True, exist_ok=True)
    args = ("--worker-args", f"--num-blocks {NUM_BLOCKS}")
    with (
        tempfile.TemporaryDirectory() as scratch,
        Cluster(Path(scratch), local="2,2", args=args) as cluster,
        browser(chromium()) as shown,
    ):
        take_all(shown, cluster, directory)


if __name__ == "__main__":
    main()
