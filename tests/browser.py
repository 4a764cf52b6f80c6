"""Debian's Chromium, and what every page of Eyas must keep in it."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from playwright.sync_api import Browser, Page, sync_playwright

PHONE, LAPTOP, DESK = 375, 1100, 1440  # px

# For each visible chart: its figure's inner box holds every text of it, so that no label is cut.
CUT = """() => [...document.querySelectorAll("figure")].flatMap(figure => {
  const box = figure.getBoundingClientRect();
  return [...figure.querySelectorAll("svg text")].filter(text => {
    const at = text.getBoundingClientRect();
    return at.width && (at.left < box.left || at.right > box.right || at.top < box.top || at.bottom > box.bottom);
  }).map(text => text.textContent);
})"""
# For each visible chart: texts that lie on another text of it, or through which a line of a mark goes.
CROSSED = """() => [...document.querySelectorAll("figure svg")].flatMap(svg => {
  const at = element => element.getBoundingClientRect();
  const texts = [...svg.querySelectorAll("text")].filter(text => at(text).width);
  const lines = [...svg.querySelectorAll("line")].filter(line => line.style.stroke.includes("--ink"));
  const meet = (a, b) => a.left < b.right - 1 && b.left < a.right - 1 && a.top < b.bottom - 2 && b.top < a.bottom - 2;
  const hit = (text, line) => at(line).left > at(text).left + 1 && at(line).right < at(text).right - 1
    && at(line).top < at(text).bottom - 2 && at(line).bottom > at(text).top + 2;
  return texts.filter((text, n) => texts.some((other, m) => m < n && meet(at(text), at(other)))
    || lines.some(line => hit(text, line))).map(text => text.textContent);
})"""
SHOWN = """() => [...document.querySelectorAll("figure")].map(
  figure => [...figure.querySelectorAll("svg")].filter(svg => svg.getBoundingClientRect().width).length)"""
SMALL = """() => Math.min(...[...document.querySelectorAll("svg text")].map(
  text => text.getBoundingClientRect().height).filter(height => height))"""
COLOURS = """names => { const style = getComputedStyle(document.documentElement);
  return Object.fromEntries(names.map(name => [name, style.getPropertyValue("--" + name).trim()])); }"""
# Tables that are wider than their frame, those that are folded away too.
SCROLLED = """() => { document.querySelectorAll("details").forEach(one => one.open = true);
  return [...document.querySelectorAll(".scroll")].filter(frame => frame.scrollWidth > frame.clientWidth)
    .map(frame => frame.querySelector("caption").textContent); }"""
OVERFLOW = "document.documentElement.scrollWidth - document.documentElement.clientWidth"


@pytest.fixture(scope="module")
def chromium() -> Iterator[Browser]:
    """A headless Chromium; skips where there is none.

    For one module, since Playwright keeps an event loop running in this thread, in which no other may run meanwhile.
    """
    path = shutil.which("chromium")
    if path is None:
        pytest.skip("no Chromium on this machine")
    with sync_playwright() as playwright:
        # --no-sandbox: as root there is none, and these pages run nothing.
        browser = playwright.chromium.launch(executable_path=path, args=["--no-sandbox"])
        yield browser
        browser.close()


@contextmanager
def opened(browser: Browser, path: Path, width: int = DESK, scheme: Any = "light") -> Iterator[Page]:
    """The page at `path`. In the end it must have fetched nothing, said nothing on the console, and asked nothing."""
    context = browser.new_context(viewport={"width": width, "height": 900}, color_scheme=scheme)
    page = context.new_page()
    noise: list[str] = []
    page.on("request", lambda request: noise.append(f"request {request.url}"))
    page.on("console", lambda message: noise.append(f"console {message.text}"))
    page.on("pageerror", lambda error: noise.append(f"error {error}"))
    page.on("dialog", lambda dialog: noise.append(f"dialog {dialog.message}"))
    page.goto(path.as_uri())
    yield page
    context.close()
    assert noise == [f"request {path.as_uri()}"]


def check(browser: Browser, path: Path, width: int, scheme: Any) -> None:
    """What every page keeps at this width and in this colour scheme."""
    with opened(browser, path, width, scheme) as page:
        assert page.evaluate(OVERFLOW) == 0, "the page scrolls sideways"
        assert set(page.evaluate(SHOWN)) <= {1}, "of a chart's sizes one is seen"
        assert page.evaluate(CUT) == [], "labels leave their chart's frame"
        assert page.evaluate(CROSSED) == [], "labels and lines lie on one another"
        assert page.evaluate(SMALL) >= 12, "text of charts is at least 12 px high"
        colours = page.evaluate(COLOURS, ["paper", "card", "ink", "quiet", "link", "warn", *MARKS])
        for text in ("ink", "quiet", "link"):
            for ground in ("paper", "card"):
                assert contrast(colours[text], colours[ground]) >= 4.5, (scheme, text, ground)
        for mark in MARKS:
            assert contrast(colours[mark], colours["card"]) >= 3, (scheme, mark)


MARKS = ("accepted", "rejected", "reasoning", "answer")


def contrast(one: str, other: str) -> float:
    """WCAG's contrast ratio of two colours #rrggbb (https://www.w3.org/TR/WCAG21/#dfn-contrast-ratio)."""
    bright, dark = sorted((_luminance(one), _luminance(other)), reverse=True)
    return (bright + 0.05) / (dark + 0.05)


def _luminance(colour: str) -> float:
    if len(colour) == 4:
        colour = "#" + "".join(2 * digit for digit in colour[1:])
    parts = [int(colour[at : at + 2], 16) / 255 for at in (1, 3, 5)]
    red, green, blue = (
        part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts
    )
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue
