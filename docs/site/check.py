"""Checks the built site: `python docs/site/check.py site`. It needs Python and nothing else.

Every link, image, script and style sheet leads to a file of the site, and every anchor to an
element of its page; images have a text, and those of tutorials and notebooks a caption; nothing
that a page loads comes from another host; and what a function returns is one entry.
"""

from __future__ import annotations

import re
import sys
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

# What a browser loads by itself, by element: its attribute with the address.
LOADED = {
    "img": "src",
    "script": "src",
    "iframe": "src",
    "source": "src",
    "video": "src",
    "audio": "src",
    "object": "data",
    "embed": "src",
}
# Relations of <link> that name a page and load nothing.
NAMES = {"canonical", "next", "prev", "alternate", "license", "author"}
# Folders whose images are figures, each with a caption.
CAPTIONED = {"tutorials", "notebooks"}
ELSEWHERE_IN_CSS = re.compile(r"(?:url\(\s*['\"]?|@import\s+['\"])((?:https?:)?//[^'\")\s]+)")


class Page(HTMLParser):
    """One page: its anchors, what it links to, what it loads, and its faults."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.anchors: set[str] = set()
        self.links: list[str] = []
        self.loads: list[str] = []
        self.faults: list[str] = []
        self.images = 0
        self.captions = 0
        self._in_style = False
        self._in_title = False
        self._returns = 0  # entries so far, inside a section Returns
        self._section = ""
        self.feed(text)

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        found = {name: value or "" for name, value in attributes}
        if "id" in found:
            self.anchors.add(found["id"])
        if tag == "a":
            self.anchors.add(found.get("name", ""))
            self.links.append(found.get("href", ""))
        elif tag == "link":
            relations = set(found.get("rel", "").lower().split())
            (self.links if relations & NAMES else self.loads).append(found.get("href", ""))
        elif tag in LOADED and LOADED[tag] in found:
            self.loads.append(found[LOADED[tag]])
        self.images += tag == "img"
        self.captions += tag == "figcaption"
        if tag == "img" and not found.get("alt", "").strip():
            self.faults.append(f"image {found.get('src')} has no alt text")
        self._in_style = tag == "style"
        self._styles(found.get("style", ""))
        classes = found.get("class", "").split()
        self._in_title = "doc-section-title" in classes
        if "doc-section-item" in classes and self._section == "Returns:":
            self._returns += 1
            if self._returns == 2:
                self.faults.append("a section Returns has several entries, one for each line")

    def handle_data(self, data: str) -> None:
        if self._in_style:
            self._styles(data)
        if self._in_title:
            self._section, self._returns = data.strip(), 0

    def handle_endtag(self, tag: str) -> None:
        self._in_style = self._in_title = False

    def _styles(self, css: str) -> None:
        self.loads += ELSEWHERE_IN_CSS.findall(css)


def faults(site: Path) -> list[str]:
    """Every fault of a built site, as "page: what is wrong"."""
    site = site.resolve()
    pages = {path: Page(path.read_text()) for path in sorted(site.rglob("*.html"))}
    found = []
    for path, page in pages.items():
        here = path.relative_to(site)
        found += [f"{here}: {fault}" for fault in page.faults]
        if here.parts[0] in CAPTIONED and page.captions < page.images:
            found.append(f"{here}: {page.images} images, {page.captions} captions")
        found += [
            f"{here}: loads {address} from another host"
            for address in page.loads
            if urlsplit(address).netloc
        ]
        for address in page.links + page.loads:
            parts = urlsplit(address)
            if parts.scheme or parts.netloc:
                continue
            # 404.html is shown for any address, so its links begin at the root.
            base = site if parts.path.startswith("/") else path.parent
            target = path
            if parts.path:
                target = (base / unquote(parts.path).lstrip("/")).resolve()
            if target.is_dir():
                target /= "index.html"
            if not target.is_file():
                found.append(f"{here}: {address} leads to no file")
            elif parts.fragment and target in pages and not parts.fragment.startswith("__"):
                if unquote(parts.fragment) not in pages[target].anchors:
                    found.append(f"{here}: {address} leads to no anchor")
    for path in sorted(site.rglob("*.css")):
        for address in ELSEWHERE_IN_CSS.findall(path.read_text()):
            found.append(f"{path.relative_to(site)}: loads {address} from another host")
    if not pages:
        found.append(f"{site} holds no page")
    return found


if __name__ == "__main__":
    problems = faults(Path(sys.argv[1]))
    print(*problems, sep="\n", end="\n" if problems else "")
    sys.exit(bool(problems))
