"""Pictures of the documentation's site: `python -m tests.web.site_pictures SITE --out DIR`, which `make docs-pictures`
runs.

Chromium opens each page of the navigation on a desktop (1280 x 800) and on a phone (390 x 844). The command fails for a
page that is wider than the screen, and for text or a picture that reaches past its edge and cannot be scrolled to. One
page of each kind is photographed in both sizes, light and dark.
"""

from __future__ import annotations

import argparse
import functools
import http.server
import sys
import tempfile
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, Final

from tests.web.pictures import DESKTOP, PHONE, browser

PHOTOGRAPHED: Final = {
    "home": "index.html",
    "tour": "docs/learn/tour.html",
    "how-to": "docs/how-to/rewards.html",
    "reference": "docs/reference/table.html",
    "benchmarks": "docs/understand/benchmarks.html",
    "operate": "docs/operate/waiting.html",
}
LINKS: Final = "return [...document.querySelectorAll('.md-nav--primary a.md-nav__link[href]')].map(link => link.href)"
TOO_WIDE: Final = """
const width = window.innerWidth, wide = [];
if (document.documentElement.scrollWidth > width) wide.push(`page: ${document.documentElement.scrollWidth} px`);
const scrolls = element => {
  for (; element && element !== document.body; element = element.parentElement)
    if (['auto', 'scroll'].includes(getComputedStyle(element).overflowX)) return true;
  return false;
};
for (const element of document.querySelectorAll('.md-content :is(p, li, td, pre, h1, h2, h3, h4, img, svg, object)')) {
  const edge = element.getBoundingClientRect();
  if (edge.width && edge.right > width + 1 && !scrolls(element))
    wide.push(`${element.tagName.toLowerCase()}: ${element.textContent.trim().slice(0, 60)}`);
}
return wide.slice(0, 4);
"""
"""Pieces of the page that are cut off: no parent of theirs scrolls sideways."""


class _Quiet(http.server.SimpleHTTPRequestHandler):
    def log_message(self, *args: Any) -> None:
        """Log nothing."""


@contextmanager
def served(site: Path) -> Iterator[str]:
    """The address of the site, served on this host."""
    handler = functools.partial(_Quiet, directory=str(site))
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}/"
        finally:
            server.shutdown()
            thread.join()


def pages(driver: Any, address: str) -> list[str]:
    """Each page of the navigation, below the address."""
    found: dict[str, None] = dict.fromkeys([PHOTOGRAPHED["home"]])
    driver.get(address + PHOTOGRAPHED["home"])
    tabs = driver.execute_script("return [...document.querySelectorAll('.md-tabs__link')].map(link => link.href)")
    for tab in tabs:
        driver.get(tab)
        for link in driver.execute_script(LINKS):
            found.setdefault(link.removeprefix(address).partition("#")[0])
    return list(found)


def cut_off(driver: Any, address: str) -> list[str]:
    """``page, screen: piece`` for each piece that no reader can see whole."""
    lines = []
    opened = pages(driver, address)
    for screen, metrics in (("desktop", DESKTOP), ("phone", PHONE)):
        driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", metrics)
        for page in opened:
            driver.get(address + page)
            lines += [f"{page}, {screen}: {piece}" for piece in driver.execute_script(TOO_WIDE)]
    print(f"{len(opened)} pages on a desktop and a phone; cut off: {len(lines)}")
    return lines


def photograph(driver: Any, address: str, out: Path, scheme: str) -> None:
    """Save the first screen of each kind of page in both sizes, for a reader who prefers this colour scheme."""
    driver.execute_cdp_cmd(
        "Emulation.setEmulatedMedia", {"features": [{"name": "prefers-color-scheme", "value": scheme}]}
    )
    driver.get(address + PHOTOGRAPHED["home"])
    driver.execute_script("localStorage.clear()")  # the site keeps a reader's choice there
    for place, metrics in (("desktop", DESKTOP), ("phone", PHONE)):
        driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", metrics)
        for name, page in PHOTOGRAPHED.items():
            driver.get(address + page)
            driver.save_screenshot(str(out / f"{name}-{place}-{scheme}.png"))


def main() -> int:
    """Look at each page, photograph some, print what is cut off."""
    words = argparse.ArgumentParser(description=__doc__)
    words.add_argument("site", type=Path)
    words.add_argument("--out", type=Path, default=Path("build/pictures"))
    options = words.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    with ExitStack() as stack:
        address = stack.enter_context(served(options.site))
        driver = browser(stack.enter_context(tempfile.TemporaryDirectory(prefix="tq-profile-")))
        stack.callback(driver.quit)
        lines = cut_off(driver, address)
        for scheme in ("light", "dark"):
            photograph(driver, address, options.out, scheme)
    print("\n".join(lines))
    return 1 if lines else 0


if __name__ == "__main__":
    sys.exit(main())
