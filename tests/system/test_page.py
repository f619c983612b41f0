"""The page at `/` in a real Chromium, over whole clusters."""

from __future__ import annotations

import concurrent.futures
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from axe_playwright_python.sync_playwright import Axe
from playwright.sync_api import Browser

from tests.browser.chromium import Tab, browser, chromium
from tests.browser.crowd import Crowd
from tests.cluster import Cluster
from tests.router.site import LETTERS, Answer
from wire.timeline import Entry, Kind, pack_timeline

WIDTHS = {"phone": 360, "laptop": 1366, "wall": 1920}
KEY, OTHER_KEY = "a-key-of-the-page", "another-key-of-the-page"
LOCKED = "Nothing is shown without a valid API key."
IS_READY = "document.querySelector('#health').dataset.state === 'ready'"
# Name, x and width of what is drawn for each attempt.
LANES = """[...document.querySelectorAll('#attempts svg')].map(lane => [...lane.children].map(
    it => [it.getAttribute('class'), it.getBBox().x, it.getBBox().width]))"""

NARROWEST = 0.8  # of requests.js


@pytest.fixture(scope="module")
def shown() -> Iterator[Browser]:
    with browser(chromium()) as launched:
        yield launched


@pytest.fixture(scope="module")
def few(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """One prefill and one decode worker on the hash executor, which has no tokenizer's text."""
    with Cluster(tmp_path_factory.mktemp("few"), executor="hash") as cluster:
        yield cluster


def complete(cluster: Cluster, count: int, **headers: str) -> None:
    """Complete `count` prompts at once."""
    body = {"model": cluster.model, "prompt": [1, 2, 3] * 20, "max_tokens": 8}

    def one(number: int) -> None:
        named = {"x-request-id": f"asked-{number}", **cluster.headers, **headers}
        answer = httpx.post(
            f"{cluster.http}/v1/completions", json=body, headers=named, timeout=60, trust_env=False
        )
        assert answer.status_code == 200, answer.text

    with concurrent.futures.ThreadPoolExecutor(count) as pool:
        list(pool.map(one, range(count)))


def test_a_chat_is_streamed_with_probabilities_and_its_waterfall(
    shown: Browser, cluster: Cluster
) -> None:
    tab = Tab(shown, cluster.http)
    page = tab.page
    tab.until(IS_READY)
    tab.until("document.querySelector('#mode').textContent === 'chat'")
    page.fill("#temperature", "0")  # a drawn answer might be no token at all
    page.fill("#prompt", "Hello")
    page.press("#prompt", "Enter")
    tab.until("document.querySelectorAll('#talk .assistant i').length > 1")
    tab.until("document.querySelector('#send').textContent === 'Send'")
    answer = page.inner_text("#talk .assistant")
    cut = page.locator("#talk .note").count()
    said = f"The answer is {'cut' if cut else 'complete'}: {answer}"
    assert answer.strip() and page.text_content("#said") == said
    shares = [float(each.rstrip(" %")) for each in page.locator("#likely b").all_inner_texts()]
    assert len(shares) == 5 and 0 < sum(shares) <= 100.1
    # By the keyboard: the token before the last one.
    page.focus("#talk")
    page.keyboard.press("ArrowLeft")
    num_tokens = page.locator("#talk .assistant i").count()
    assert page.inner_text("#token-title").startswith(f"Token {num_tokens - 1}: ")
    tab.until("document.querySelectorAll('#own .decode').length === 1")
    tab.until("document.querySelectorAll('tr.own').length === 1")
    # The router tells who asked more.
    page.click("tr.own button")
    tab.until("document.querySelector('#detail-report').textContent.includes('choices')")
    assert page.locator("#attempts li").count() == 1
    assert tab.problems == []
    page.close()


def test_a_base_model_is_asked_by_token_ids(shown: Browser, few: Cluster) -> None:
    tab = Tab(shown, few.http)
    tab.until(IS_READY)
    mode = tab.page.inner_text("#mode")
    tab.page.fill("#prompt", "1 2 3" if "ids" in mode else "Hello")
    tab.page.click("#send")
    tab.until("document.querySelector('#said').textContent.startsWith('The answer is ')")
    assert tab.problems == []
    tab.page.close()


def test_requests_are_listed_and_filtered_without_their_text(shown: Browser, few: Cluster) -> None:
    tab = Tab(shown, few.http)
    page = tab.page
    tab.until(IS_READY)
    complete(few, 12)
    tab.until("document.querySelectorAll('#rows tr').length >= 12")
    tab.until("document.querySelectorAll('#rows .transfer').length > 0")
    page.fill("#filter", "asked-11 DECODE-0")
    tab.until("document.querySelectorAll('#rows tr').length === 1")
    assert page.inner_text("#rows tr").split()[0] == "asked-11"
    assert "match, of" in page.inner_text("#matches")
    page.fill("#filter", "nothing like this")
    tab.until("!document.querySelector('#no-rows').hidden")
    page.fill("#filter", "")
    page.click("#pause")
    before = page.locator("#rows tr").count()
    figure = "document.querySelector('[data-chart=requests] b').textContent"
    ended = page.evaluate(figure)
    complete(few, 3)
    tab.until(f"{figure} !== {ended!r}")
    assert page.get_attribute("#pause", "aria-pressed") == "true"
    assert page.locator("#rows tr").count() == before
    page.fill("#filter", "asked-11")
    tab.until("document.querySelectorAll('#rows tr').length === 1")
    page.click("#rows button")
    tab.until("document.querySelectorAll('#attempts li').length === 1")
    page.click("#detail-close")
    page.fill("#filter", "")
    page.click("#pause")
    tab.until(f"document.querySelectorAll('#rows tr').length > {before}")
    assert tab.problems == []
    page.close()


def test_a_killed_worker_turns_red_and_says_why(shown: Browser, few: Cluster) -> None:
    tab = Tab(shown, few.http)
    worker = few.worker("decode", 1)
    card = "document.querySelector('#right').children[1]"
    tab.until(f"{card}?.querySelector('.state').dataset.state === 'ready'")
    worker.kill()
    tab.until(f"{card}.classList.contains('is-lost')")
    # Another worker may be suspect for a moment.
    tab.until(
        "document.querySelector('#workers-ready').innerText === '2 of 3 workers ready, 1 lost'"
    )
    text = tab.page.locator("#right .worker").nth(1).inner_text()
    assert "lost" in text and "its connection closed" in text
    ground = "getComputedStyle({}).borderTopColor"
    red, plain = (
        tab.page.evaluate(ground.format(each))
        for each in (card, "document.querySelector('#left').children[0]")
    )
    assert red != plain
    assert tab.problems == []
    tab.page.close()


def ask(tab: Tab, prompt: str) -> None:
    tab.page.fill("#prompt", prompt)
    tab.page.press("#prompt", "Enter")


def test_a_chat_is_stopped_and_cleared(shown: Browser, tmp_path: Path) -> None:
    """A cleared conversation is not sent again, and neither is the answer that it interrupted."""
    answers = iter([Answer("hello", hangs_after=2)] * 4 + [Answer("done")] * 2)
    with Crowd(tmp_path, lambda prompt: next(answers), requests_per_s=0).running() as crowd:
        tab = Tab(shown, crowd.url)
        tab.until("document.querySelector('#mode').textContent === 'chat'")
        for prompt, button in (("one", "#send"), ("two", "#clear")):
            ask(tab, prompt)
            tab.until("document.querySelector('#talk .assistant:last-child')?.textContent === 'he'")
            tab.page.click(button)
            tab.until("document.querySelector('#said').textContent === 'Stopped'")
            tab.until("document.querySelector('#send').textContent === 'Send'")
        ask(tab, "three")
        tab.until("document.querySelector('#said').textContent.endsWith('complete: done')")
        asked = [LETTERS.decode(prompt) for prompt in crowd.site.prompts.values()]
        assert asked == [
            "user:one\nassistant:",
            "user:one\nassistant:he\nuser:two\nassistant:",
            "user:three\nassistant:",
        ]
        assert tab.problems == []
        tab.page.close()


def test_the_timeline_of_a_request_with_two_attempts_and_a_preemption(
    shown: Browser, tmp_path: Path
) -> None:
    entries = (
        Entry(Kind.REQUEST, 0.0, 5e-4),
        Entry(Kind.TRANSFER, 0.0, 2e-4, 1),
        Entry(Kind.SEGMENT, 1e-4, 1e-4, 64),
        Entry(Kind.DECODE, 2e-4, 3e-4, 3),
        Entry(Kind.PREEMPTION, 3e-4, 1e-4, 0),
    )
    whole = Answer("hello", usage={"timeline": pack_timeline(entries), "kv_bytes": 64})
    answers = iter([Answer("hello", fails_after=2)] * 2 + [whole] * 2)
    with Crowd(tmp_path, lambda prompt: next(answers), requests_per_s=0).running() as crowd:
        tab = Tab(shown, crowd.url)
        tab.until("document.querySelector('#mode').textContent === 'chat'")
        ask(tab, "hello")
        tab.until("document.querySelectorAll('#rows .outcome').length === 1")
        tab.until("document.querySelector('.outcome').textContent === 'stop (2)'")
        tab.page.click("#rows button")
        tab.until("document.querySelectorAll('#attempts li').length === 2")
        first, second = tab.page.locator("#attempts li").all_inner_texts()
        assert first.endswith(" failed") and second.endswith(": stop")
        failed, stopped = tab.page.evaluate(LANES)
        assert {"prefill", "decode", "failed"} <= {name for name, *_ in failed}
        places = {name: (x, x + width) for name, x, width in stopped}
        assert {"prefill", "transfer", "segment", "decode", "gap"} <= places.keys()
        # Where an attempt took long, what lasts microseconds is drawn as wide as can be seen.
        assert places["decode"][0] <= places["gap"][0]
        assert places["gap"][1] <= places["decode"][1] + NARROWEST
        assert failed[-1][1] <= places["decode"][0]
        assert tab.problems == []
        tab.page.close()


def test_it_is_steady_at_64_workers_and_hundreds_of_requests_a_second(
    shown: Browser, tmp_path: Path
) -> None:
    # JSON has this line separator as it is; it is no end of a line of an event.
    text = "hello,\u2028world"
    with Crowd(tmp_path, lambda prompt: Answer(text)).running() as crowd:
        tab = Tab(shown, crowd.url)
        tab.until("document.querySelectorAll('.worker').length === 64")
        tab.until("document.querySelectorAll('#rows tr').length === 22")
        num_asked = crowd.num_asked
        while crowd.num_asked < num_asked + 400:
            tab.page.wait_for_timeout(100)
        assert tab.page.locator("#rows tr").count() == 22
        ask(tab, "hello")
        tab.until("document.querySelector('#said').textContent.startsWith('The answer is')")
        assert tab.page.text_content("#talk .assistant") == text
        assert tab.page.evaluate("document.querySelectorAll('*').length") < 2500
        seen = tab.page.inner_text("body")
        assert "crowd-" in seen and "somebody" not in seen and "askask" not in seen
        assert tab.problems == []
        tab.page.close()


# Colours do not depend on the width, nor places on the theme.
OTHER_PAIR = pytest.mark.full("its width and its theme are in another pair")


@pytest.mark.parametrize(
    ("width", "theme"),
    [
        ("phone", "light"),
        ("laptop", "dark"),
        ("wall", "light"),
        pytest.param("phone", "dark", marks=OTHER_PAIR),
        pytest.param("laptop", "light", marks=OTHER_PAIR),
        pytest.param("wall", "dark", marks=OTHER_PAIR),
    ],
)
def test_axe_finds_nothing_in_any_theme_and_width(
    shown: Browser, few: Cluster, tmp_path: Path, width: str, theme: str
) -> None:
    tab = Tab(shown, few.http, WIDTHS[width], color_scheme=theme)
    complete(few, 8)
    tab.until("document.querySelectorAll('#rows tr').length >= 8")
    assert tab.page.evaluate("document.documentElement.scrollWidth <= innerWidth")
    found = Axe().run(tab.page)
    assert found.violations_count == 0, found.generate_report()
    tab.page.screenshot(path=tmp_path / f"{width}-{theme}.png", full_page=True)
    assert tab.problems == []
    # The other theme by its button, which the page remembers.
    ground = tab.page.evaluate("getComputedStyle(document.body).backgroundColor")
    other = {"light": "dark", "dark": "light"}[theme]
    while tab.page.get_attribute("html", "data-theme") != other:
        tab.page.click("#theme")
    tab.page.reload()
    assert tab.page.get_attribute("html", "data-theme") == other
    assert tab.page.evaluate("getComputedStyle(document.body).backgroundColor") != ground
    tab.page.close()


@pytest.fixture(scope="module")
def keys(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("keys") / "keys"
    path.write_text(f"{KEY}\n{OTHER_KEY}\n")
    path.chmod(0o600)
    return path


@pytest.fixture(scope="module")
def keyed(keys: Path) -> Iterator[Cluster]:
    """A cluster that has API keys."""
    args = ("--api-keys", str(keys))
    with Cluster(keys.parent, executor="hash", args=args, api_key=KEY) as cluster:
        yield cluster


def give_key(tab: Tab, key: str) -> None:
    tab.page.fill("#key-input", key)
    tab.page.press("#key-input", "Enter")


def test_where_there_are_keys_the_page_asks_for_one(shown: Browser, keyed: Cluster) -> None:
    complete(keyed, 1)
    tab = Tab(shown, keyed.http)
    page = tab.page
    page.wait_for_selector("#key-dialog[open]")
    page.click("#key-cancel")
    assert page.inner_text("main") == LOCKED and page.is_hidden(".skip")
    assert Axe().run(page).violations_count == 0
    page.click("#key")
    give_key(tab, "ключ")  # no header can have it
    assert page.is_visible("#key-dialog") and page.evaluate("sessionStorage.length") == 0
    give_key(tab, "not-the-key")
    tab.until("document.querySelector('#key-problem').textContent.includes('not valid')")
    assert page.inner_text("main") == LOCKED and page.evaluate("sessionStorage.length") == 0
    give_key(tab, KEY)
    tab.until("document.querySelectorAll('#rows tr').length >= 1")
    assert page.evaluate("Object.values(sessionStorage)") == [KEY]
    assert KEY not in page.url and page.evaluate("Object.values(localStorage)") == ["auto"]
    # Chromium itself reports each 401.
    assert all("401" in problem for problem in tab.problems)
    page.close()


def test_a_key_is_changed_revoked_and_forgotten(shown: Browser, keyed: Cluster, keys: Path) -> None:
    complete(keyed, 1)
    tab = Tab(shown, keyed.http, WIDTHS["phone"])
    page = tab.page
    page.wait_for_selector("#key-dialog[open]")
    give_key(tab, KEY)
    tab.until(IS_READY)
    page.reload()
    tab.until(IS_READY)
    page.press("#key", "Enter")
    found = Axe().run(page)
    assert found.violations_count == 0, found.generate_report()
    events = "**/v1/cluster/events"
    with page.expect_event("requestfailed"), page.expect_request(events) as asked:
        give_key(tab, OTHER_KEY)
        assert page.inner_text("main") == LOCKED
    assert asked.value.headers["authorization"] == f"Bearer {OTHER_KEY}"
    tab.until(IS_READY)
    # A revoked key is refused at the next request, although its stream goes on.
    keys.write_text(f"{KEY}\n")
    page.click("#rows button")
    page.wait_for_selector("#key-dialog[open]")
    assert page.is_hidden("#detail") and "not valid" in page.inner_text("#key-problem")
    give_key(tab, KEY)
    tab.until(IS_READY)
    keys.write_text(f"{OTHER_KEY}\n")
    ask(tab, "1 2 3")
    page.wait_for_selector("#key-dialog[open]")
    assert page.inner_text("main") == LOCKED
    give_key(tab, OTHER_KEY)
    tab.until(IS_READY)
    assert page.inner_text("#talk .error") == "✕ An API key is needed"
    assert page.input_value("#prompt") == "1 2 3"
    page.press("#key", "Enter")
    page.keyboard.press("Tab")
    with page.expect_navigation():
        page.keyboard.press("Enter")
    page.wait_for_selector("#key-dialog[open]")
    assert page.is_hidden("#key-forget") and page.evaluate("sessionStorage.length") == 0
    assert page.text_content("#talk") == ""
    assert all("401" in problem for problem in tab.problems)
    page.close()


def test_the_page_says_that_the_router_is_gone(shown: Browser, tmp_path: Path) -> None:
    with Cluster(tmp_path, executor="hash") as cluster:
        tab = Tab(shown, cluster.http)
        tab.until(IS_READY)
    # An open page has not delayed the end of the cluster above.
    tab.until("document.querySelector('#health').dataset.state === 'lost'")
    tab.page.close()
