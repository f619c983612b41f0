"""The page is one document that loads nothing, and its policy lets only its own script run."""

from __future__ import annotations

import base64
import hashlib
import re
from importlib.resources import files

from router.page.document import SCRIPTS, document


def test_everything_is_in_the_document() -> None:
    body, policy = document()
    html = body.decode()
    assert "/*STYLE*/" not in html and "/*SCRIPT*/" not in html
    assert not re.search(r"<(link|script|img)[^>]* (src|href)=\"(?!data:)", html)
    assert "http://" not in html.replace("http://www.w3.org/2000/svg", "")
    assert "https://" not in html
    assert re.search(r"<[a-z]+[^>]* on[a-z]+=", html) is None and " style=" not in html
    for tag, directive in (("script", b"script-src"), ("style", b"style-src")):
        [inside] = re.findall(rf"<{tag}[^>]*>(.*?)</{tag}>", html, re.DOTALL)
        digest = base64.b64encode(hashlib.sha256(inside.encode()).digest())
        assert b"%b 'sha256-%b';" % (directive, digest) in policy
    assert policy.startswith(b"default-src 'none'; ") and b"unsafe" not in policy


def test_every_script_is_in_it_once() -> None:
    names = {path.name for path in files("router.page").iterdir() if path.name.endswith(".js")}
    assert names == {f"{name}.js" for name in SCRIPTS} and len(names) == len(SCRIPTS)
