"""A real browser for tests of pages: Debian's chromium, driven by Playwright. Without one the tests skip."""

from __future__ import annotations

import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

SIZES = ((390, 844), (1280, 900))
"""Of a phone and of a laptop, in CSS pixels."""


REBOUND = "rebound.example"
"""A name that leads to loopback, as one does whose owner attacks by DNS rebinding."""


@contextmanager
def browser() -> Iterator[Any]:
    """Give a chromium that reaches no other machine; skip the test where there is none."""
    playwright = pytest.importorskip("playwright.sync_api", reason="needs playwright, which the extra dev installs")
    chromium = shutil.which("chromium") or shutil.which("google-chrome")
    if chromium is None:
        pytest.skip("needs chromium: apt-get install chromium")
    # Without a proxy or a name server, chromium's own background requests end at once.
    quiet = [
        "--no-sandbox",
        "--disable-gpu",
        "--disable-background-networking",
        f"--host-resolver-rules=MAP {REBOUND} 127.0.0.1, MAP * ~NOTFOUND, EXCLUDE 127.0.0.1",
    ]
    with playwright.sync_playwright() as running:
        opened = running.chromium.launch(executable_path=chromium, args=quiet, timeout=120_000)
        try:
            yield opened
        finally:
            opened.close()


class Page:
    """A page in the browser, with what it asked for and complained of."""

    def __init__(self, opened: Any, address: str, *, size: tuple[int, int] = SIZES[1], scheme: str = "light") -> None:
        self.context = opened.new_context(
            viewport={"width": size[0], "height": size[1]}, color_scheme=scheme, has_touch=size[0] < 600
        )
        # A machine that is busy with other tests takes its time.
        self.context.set_default_timeout(120_000)
        self.page = self.context.new_page()
        self.requests: list[str] = []
        self.complaints: list[str] = []
        self.page.on("request", lambda request: self.requests.append(request.url))
        self.page.on("console", lambda message: self.complaints.append(message.text))
        self.page.on("pageerror", lambda error: self.complaints.append(str(error)))
        self.page.goto(address)

    def too_wide(self) -> list[str]:
        """Return the elements that reach beyond the right edge of the page and do not scroll by themselves."""
        found: list[str] = self.page.evaluate(
            """() => [document.documentElement, ...document.querySelectorAll('body *')]
              .filter(e => e.matches('.scroll') || !e.closest('.scroll'))
              .filter(e => e.getBoundingClientRect().right > innerWidth + 1)
              .map(e => `${e.tagName}.${e.getAttribute('class')}`)"""
        )
        return found

    def violations(self, *rules: str) -> list[str]:
        """Return what axe finds wrong with contrast, names, roles and keyboard; by all rules, or only by some."""
        axe = pytest.importorskip("axe_playwright_python", reason="needs axe-playwright-python from the extra dev")
        # Evaluated by the driver, which no Content-Security-Policy of the page keeps from it.
        self.page.evaluate((Path(axe.__file__).parent / "axe.min.js").read_text())
        options = {"runOnly": {"type": "rule", "values": rules}} if rules else {}
        results = self.page.evaluate("options => axe.run(document, options)", options)
        return [
            f"{each['id']}: {each['help']}: {node['html'][:120]}: {node.get('failureSummary', '')[:200]}"
            for each in results["violations"]
            for node in each["nodes"]
        ]

    def colours(self, selector: str, names: Sequence[str]) -> dict[str, str]:
        """Return computed colours of the first element that a selector finds."""
        found: dict[str, str] = self.page.eval_on_selector(
            selector, "(e, names) => Object.fromEntries(names.map(n => [n, getComputedStyle(e)[n]]))", list(names)
        )
        return found

    def close(self) -> None:
        """Close the page."""
        self.context.close()
