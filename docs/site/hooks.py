"""What the site does beyond MkDocs: mathematics, and links to files outside of docs/.

- Mathematics between `$` or `$$` becomes MathML while the site is built, in pages and notebooks:
  no script and no font is loaded for it. A formula that cannot be converted fails the build.
- A Markdown file of the repository's root that is in `PAGES` becomes a page. A link to any other
  file outside of docs/ leads to a copy of it in the site; one to a folder becomes plain text.
- A code block's mark in its info string (`python gpu`, see tests/test_docs.py) becomes a title of
  the block where a reader has to know it, and is left out otherwise.
- An image with a title, alone in its paragraph, becomes a figure with that title as its caption. A
  notebook's cell that draws one has its text and its caption in its metadata, under `figure`.
"""

from __future__ import annotations

import html
import json
import os
import posixpath
import re
from pathlib import Path
from typing import Any

from latex2mathml.converter import convert
from mkdocs.exceptions import PluginError
from mkdocs.structure.files import File, Files

ROOT = Path(__file__).parents[2]

# Pages whose source stands in the repository's root, by that source.
PAGES = {
    "BUILD_NOTES.md": "notes/build.md",
    "CONTRIBUTING.md": "contributing.md",
    "CHANGELOG.md": "changelog.md",
    "README.md": "index.md",
}
# Where the copies of other files lie in the site.
COPIES = "repository"
# Shown by a browser as they are; any other file gets the suffix .txt.
SHOWN = {".png", ".svg", ".jpg", ".txt", ".json"}

FENCE = re.compile(r"^( *)(`{3,}|~{3,})([^\n`]*)$", re.MULTILINE)
# [text](target), or ![text](target), with an optional title.
LINK = re.compile(r"(!?)\[((?:[^\[\]]|\[[^\]]*\])*)\]\(([^()\s]+)((?:\s+\"[^\"]*\")?)\)")
# What pymdownx.arithmatex leaves, and what nbconvert leaves in a notebook's Markdown cells.
FORMULA = re.compile(
    r'<(?P<tag>span|div) class="arithmatex">\s*\\(?:\(|\[)(?P<tex>.*?)\\(?:\)|\])\s*</(?P=tag)>',
    re.DOTALL,
)
MARKDOWN_CELL = re.compile(
    r'(<div class="jp-RenderedHTMLCommon jp-RenderedMarkdown[^>]*>)(.*?)(</div>\s*</div>)',
    re.DOTALL,
)
# A link to another page in a notebook, which MkDocs leaves as it is.
PAGE_LINK = re.compile(r'(<a href="(?![a-z]+:)[^"#]+)\.(?:md|ipynb)(?=[#"])')
DOLLARS = re.compile(r"\$\$(?P<display>.+?)\$\$|\$(?P<inline>[^$\n]+?)\$", re.DOTALL)
# nbconvert's text of a figure that code made.
NO_TEXT = "No description has been provided for this image"
UNTITLED = re.compile(rf'<img alt="{NO_TEXT}"([^>]*)>')
TITLED = re.compile(r'<p>(<img [^>]*?) title="([^"]*)"([^>]*>)</p>')
# Marks of code blocks, in pages' info strings, and what a reader is told.
MARK = re.compile(r"^( *`{3,}(?:python|text)) (gpu|no-run|output)$", re.MULTILINE)
TITLES = {"gpu": ' title="Needs an NVIDIA GPU"', "output": ' title="Output"', "no-run": ""}
MATHJAX = re.compile(r"<!-- Load mathjax -->.*?<!-- End of mathjax configuration -->", re.DOTALL)


def outside_fences(text: str, change: Any) -> str:
    """`text` with `change` applied to all that is not in a fenced code block."""
    parts, start, fence, fence_start = [], 0, "", 0
    for match in FENCE.finditer(text):
        if not fence:
            fence, fence_start = match[2], match.start()
            parts.append(change(text[start:fence_start]))
        elif match[2].startswith(fence) and not match[3].strip():
            parts.append(text[fence_start : match.end()])
            fence, start = "", match.end()
    parts.append(text[fence_start:] if fence else change(text[start:]))
    return "".join(parts)


def in_docs(path: str) -> bool:
    """Whether MkDocs itself finds the file; programs in docs/ are no part of the site."""
    return path.startswith("docs/") and not path.endswith(".py")


def home(path: str) -> str | None:
    """Where a file of the repository is in the site's sources; None for a folder, or nothing."""
    if path in PAGES:
        return PAGES[path]
    if in_docs(path):
        return path.removeprefix("docs/")
    if not (ROOT / path).is_file():
        return None
    shown = Path(path).suffix in SHOWN
    return f"{COPIES}/{path}" if shown else f"{COPIES}/{path}.txt"


def linked(source: str, target: str) -> str | None:
    """The file of the repository that a relative link in another one leads to."""
    if re.match(r"[a-z]+:|#|/", target):
        return None
    return posixpath.normpath(posixpath.join(posixpath.dirname(source), target.partition("#")[0]))


def source_of(file: File) -> str:
    return os.path.relpath(file.abs_src_path, ROOT).replace(os.sep, "/")


def on_files(files: Files, config: Any) -> Files:
    """Adds the pages from the root, and the copies that pages link to."""
    for source, page in PAGES.items():
        if (ROOT / source).is_file() and files.get_file_from_path(page) is None:
            files.append(File.generated(config, page, abs_src_path=str(ROOT / source)))
    for file in list(files.documentation_pages()):
        if not file.src_uri.endswith(".md"):
            continue
        for match in LINK.finditer(Path(file.abs_src_path).read_text()):
            path = linked(source_of(file), match[3])
            if path is None or in_docs(path) or not (ROOT / path).is_file():
                continue
            copy = home(path)
            if copy is not None and files.get_file_from_path(copy) is None:
                files.append(File.generated(config, copy, abs_src_path=str(ROOT / path)))
    return files


def on_page_markdown(markdown: str, *, page: Any, config: Any, files: Files) -> str:
    """Links as the site has them, and code blocks without their marks."""
    source = source_of(page.file)

    def relink(match: re.Match[str]) -> str:
        image, text, target, title = match.groups()
        path = linked(source, target)
        if path is None:
            return match[0]
        if in_docs(path) and source.startswith("docs/"):
            return match[0]
        if (ROOT / path).is_dir():
            return text
        there = home(path)
        if there is None:
            return match[0]
        anchor = target.partition("#")[1:]
        there = posixpath.relpath(there, posixpath.dirname(page.file.src_uri) or ".")
        return f"{image}[{text}]({there}{''.join(anchor)}{title})"

    markdown = outside_fences(markdown, lambda text: LINK.sub(relink, text))
    return MARK.sub(lambda mark: mark[1] + TITLES[mark[2]], markdown)


def mathml(tex: str, display: bool, page: Any) -> str:
    try:
        return convert(html.unescape(tex.strip()), display="block" if display else "inline")
    except Exception as error:
        raise PluginError(f"{page.file.src_uri}: cannot convert the formula {tex!r}") from error


def with_captions(content: str, page: Any) -> str:
    """A notebook's figures with the texts and captions of the cells that drew them, in order."""
    cells = json.loads(Path(page.file.abs_src_path).read_text())["cells"]
    told = [cell["metadata"]["figure"] for cell in cells if "figure" in cell["metadata"]]
    drawn = len(UNTITLED.findall(content))
    if drawn not in (0, len(told)):  # 0 where notebooks are not executed
        raise PluginError(f"{page.file.src_uri}: {drawn} figures, {len(told)} cells with captions")
    left = iter(told)

    def figure(match: re.Match[str]) -> str:
        said = {name: html.escape(text) for name, text in next(left).items()}
        image = f'<img alt="{said["text"]}"{match[1]}>'
        return f"<figure>{image}<figcaption>{said['caption']}</figcaption></figure>"

    return UNTITLED.sub(figure, content)


def on_page_content(content: str, *, page: Any, config: Any, files: Files) -> str:
    """MathML in place of TeX, captions, and a notebook's links to pages as the site has them."""
    if page.file.src_uri.endswith(".ipynb"):
        # No script that would load MathJax from elsewhere.
        content = MATHJAX.sub("", content)

        def formula(match: re.Match[str]) -> str:
            display = match["display"] is not None
            return mathml(match["display"] if display else match["inline"], display, page)

        def cell(match: re.Match[str]) -> str:
            text = PAGE_LINK.sub(r"\1.html", match[2])
            return match[1] + DOLLARS.sub(formula, text) + match[3]

        return MARKDOWN_CELL.sub(cell, with_captions(content, page))
    content = TITLED.sub(r"<figure>\1\3<figcaption>\2</figcaption></figure>", content)
    return FORMULA.sub(lambda match: mathml(match["tex"], match["tag"] == "div", page), content)
