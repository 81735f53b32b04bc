"""The playground's files: how they are served, and what they must not contain."""

from __future__ import annotations

import re
from itertools import pairwise
from pathlib import Path

import pytest

from specserve.server.playground import FILES, PATHS
from tests.front.conftest import Serve

ROOT = Path(__file__).parents[2]
TEXTS = {name: file.read_text() for name, file in FILES.items()}
TYPES = {".css": "text/css", ".html": "text/html", ".js": "text/javascript", ".svg": "image/svg+xml"}
VENDORED = "marked.esm.js"
DEPTHS = [f"--d{depth}" for depth in range(1, 9)]


def test_served_with_types_and_a_policy(serve: Serve) -> None:
    client, _ = serve()
    for path in PATHS:
        found = client.get(path)
        assert found.status_code == 200
        assert found.headers["content-type"].split(";")[0] == TYPES[Path(path).suffix or ".html"]
        policy = found.headers["content-security-policy"]
        assert "default-src 'none'" in policy
        assert "script-src 'self';" in policy
        assert "unsafe" not in policy
        assert found.headers["x-content-type-options"] == "nosniff"
    assert client.get("/").text == TEXTS["index.html"]


@pytest.mark.parametrize("name", ["routes.py", "__init__.py", "none.js", "..%2froutes.py", "%2e%2e/app.py"])
def test_nothing_else_is_served(serve: Serve, name: str) -> None:
    client, _ = serve()
    assert client.get(f"/playground/{name}").status_code == 404


def test_open_like_health_and_the_api_is_not(serve: Serve) -> None:
    client, _ = serve(api_key=("key",))
    assert {client.get(path).status_code for path in PATHS} == {200}
    assert client.get("/playground/none.js").status_code == 401
    assert client.get("/v1/models").status_code == 401


def test_nothing_comes_from_elsewhere() -> None:
    for name in TEXTS.keys() - {VENDORED}:
        text = TEXTS[name].replace("http://www.w3.org/2000/svg", "")
        assert not re.findall(r"(?:https?:|[\"'(])//|@import|url\(", text), name


def test_of_the_vendored_library_only_what_makes_no_html_is_used() -> None:
    assert (FILES[VENDORED].parent / "marked.LICENSE").exists()
    uses = [line for text in TEXTS.values() for line in text.splitlines() if f'"./{VENDORED}"' in line]
    assert uses == ['import { lexer } from "./marked.esm.js";']


def test_no_inline_code_and_text_stays_text() -> None:
    page = TEXTS["index.html"]
    assert re.findall(r"<script\b[^>]*>(.*?)</script>", page, re.S) == [""]
    assert not re.search(r"\son\w+=|\sstyle=|<style", page)
    for name, text in TEXTS.items():
        assert not re.search(r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|\beval\(", text), name


def test_every_file_is_used_and_there() -> None:
    linked = set(re.findall(r"(?:href|src)=\"playground/([^\"]+)\"", TEXTS["index.html"]))
    imported = {name for text in TEXTS.values() for name in re.findall(r"from \"\./([^\"]+)\"", text)}
    assert linked | imported | {"index.html"} == set(FILES)


def colours(scheme: str) -> dict[str, str]:
    """The custom properties of all sheets in a scheme."""
    found: dict[str, str] = {}
    for name in ("page.css", "answer.css"):
        light, dark = TEXTS[name].split("@media (prefers-color-scheme: dark)")
        found |= re.findall(r"(--\w[\w-]*): (#\w{6})", light)
        if scheme == "dark":
            found |= re.findall(r"(--\w[\w-]*): (#\w{6})", dark)
    return found


def luminance(colour: str) -> float:
    """Relative luminance, as WCAG defines it."""
    channels = [int(colour[at : at + 2], 16) / 255 for at in (1, 3, 5)]
    r, g, b = (c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in channels)
    return 0.2126 * r + 0.7152 * g + 0.0722 * b


def contrast(a: str, b: str) -> float:
    low, high = sorted((luminance(a), luminance(b)))
    return (high + 0.05) / (low + 0.05)


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_text_is_readable(scheme: str) -> None:
    named = colours(scheme)
    for ground in (*DEPTHS, "--bonus", "--surface", "--page"):
        assert contrast(named["--ink"], named[ground]) >= 4.5, ground
    for ground in ("--surface", "--page"):
        for text in ("--soft", "--accent", "--error"):
            assert contrast(named[text], named[ground]) >= 4.5, (text, ground)
        assert contrast(named["--edge"], named[ground]) >= 3
    assert contrast(named["--on-accent"], named["--accent"]) >= 4.5


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_depths_are_ordered_by_lightness(scheme: str) -> None:
    """Each depth is darker than the one before, or each is lighter: the order needs no eye for hues."""
    named = colours(scheme)
    steps = [luminance(named[a]) - luminance(named[b]) for a, b in pairwise(DEPTHS)]
    assert all(step > 0 for step in steps) or all(step < 0 for step in steps)
    assert all(contrast(named[a], named[b]) > 1.06 for a, b in pairwise(DEPTHS))
