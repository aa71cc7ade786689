"""The documentation: what its pages say runs, what they link to is there, and the API is complete.

Every block of a page that is marked `python`, and nothing else, runs on a CPU: the blocks of a page
share one namespace, from top to bottom, in an empty folder. `python gpu` marks one that needs a
GPU, `python no-run` one that only illustrates. `text output` marks what the Python block before it
prints, or some of its lines. What needs MkDocs is checked by `make docs`.
"""

from __future__ import annotations

import doctest
import importlib
import importlib.util
import inspect
import json
import re
import sys
import types
from pathlib import Path

import pytest

from tests.replaced import delta_rule_put_back  # noqa: F401

ROOT = Path(__file__).resolve().parents[1]
DOCS = ROOT / "docs"
# Built by `make docs`, from docs/ and from these in the root.
IN_ROOT = ("README.md", "CONTRIBUTING.md", "BUILD_NOTES.md", "CHANGELOG.md")
DOCUMENTS = sorted(DOCS.rglob("*.md")) + [
    ROOT / name for name in IN_ROOT if (ROOT / name).is_file()
]
NOTEBOOKS = sorted(DOCS.rglob("*.ipynb"))

FENCE = re.compile(r"^( *)(`{3,})([^\n`]*)\n(.*?)^\1\2 *$", re.MULTILINE | re.DOTALL)
MARKS = ("", "gpu", "no-run")
# An import of what only some environments have: the page is skipped there.
OPTIONAL = {"torch": "torch", "ato_torch": "torch", "transformers": "transformers"}

MODULES = ("ato_jax", "ato_jax.nn", "ato_jax.parallel", "ato_torch")
OURS = ("ato_jax", "ato_torch")
# Methods that a layer or nnx calls, not a user.
CALLED_BY_LAYERS = ("attend", "decay", "set_view")
SECTIONS = ("Args", "Attributes", "Returns", "Yields", "Raises", "Example")


def label(path: Path) -> str:
    return str(path.relative_to(ROOT))


def python_blocks(text: str) -> list[tuple[int, str, str]]:
    """Of each Python block the line where it starts, its mark and its code."""
    found = []
    for match in FENCE.finditer(text):
        language, _, mark = match[3].strip().partition(" ")
        if language == "python":
            code = re.sub(rf"^{match[1]}", "", match[4], flags=re.MULTILINE)
            found.append((text.count("\n", 0, match.start(4)), mark.strip(), code))
    return found


def shown_outputs(text: str) -> list[str]:
    """The lines that a page shows as printed by its blocks."""
    blocks = [match[4] for match in FENCE.finditer(text) if match[3].strip() == "text output"]
    return [line for block in blocks for line in block.splitlines()]


def skip_without(code: str) -> None:
    """Skips the test where an optional package is missing that the code imports."""
    for name in re.findall(r"^\s*(?:from|import) (\w+)", code, flags=re.MULTILINE):
        if name in OPTIONAL:
            pytest.importorskip(OPTIONAL[name])


def run(path: Path, pieces: list[tuple[int, str]], request: pytest.FixtureRequest) -> None:
    """Runs pieces of code in one module; a traceback names the page and its line."""
    code = "\n".join(code for _, code in pieces)
    skip_without(code)
    if "replace_delta_rule" in code:
        request.getfixturevalue("delta_rule_put_back")
    module = types.ModuleType("page")
    sys.modules["page"] = module  # dataclasses and pickles look it up
    try:
        for line, code in pieces:
            exec(compile("\n" * line + code, label(path), "exec"), module.__dict__)
    finally:
        del sys.modules["page"]
        if "matplotlib.pyplot" in sys.modules:
            sys.modules["matplotlib.pyplot"].close("all")


@pytest.fixture
def elsewhere(tmp_path, monkeypatch):
    """An empty folder to run in, and figures that open no window."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("MPLBACKEND", "Agg")


WITH_CODE = [path for path in DOCUMENTS if python_blocks(path.read_text())]


@pytest.mark.parametrize("path", WITH_CODE, ids=label)
def test_python_blocks_run(path, elsewhere, capsys, request):
    """And print the lines that the page shows, in their order, and no comparison that is false."""
    text = path.read_text()
    blocks = python_blocks(text)
    assert [mark for _, mark, _ in blocks if mark not in MARKS] == []
    pieces = [(line, code) for line, mark, code in blocks if not mark]
    run(path, pieces, request)
    printed = capsys.readouterr().out
    assert not re.findall(r"^(?:False|tensor\(False\))$", printed, re.MULTILINE)
    left = iter(printed.splitlines())
    assert [line for line in shown_outputs(text) if line not in left] == []


def notebook_cells(path: Path) -> list[dict[str, object]]:
    return json.loads(path.read_text())["cells"]


def source(cell: dict[str, object]) -> str:
    found = cell["source"]
    return found if isinstance(found, str) else "".join(found)


@pytest.mark.parametrize("path", NOTEBOOKS, ids=label)
def test_notebooks_run(path, elsewhere, request):
    """Without Jupyter, so a notebook is plain Python, no magics; `make docs` runs it in Jupyter."""
    pieces = [(0, source(cell)) for cell in notebook_cells(path) if cell["cell_type"] == "code"]
    run(path, pieces, request)


@pytest.mark.parametrize("path", NOTEBOOKS, ids=label)
def test_notebooks_are_kept_without_outputs(path):
    """What a cell gave is made when the site is built, and cannot be out of date."""
    outputs = [cell["outputs"] for cell in notebook_cells(path) if cell["cell_type"] == "code"]
    assert [output for output in outputs if output] == []


# Links


def text_of(path: Path) -> str:
    """A page's Markdown, without its code."""
    if path.suffix == ".ipynb":
        cells = [cell for cell in notebook_cells(path) if cell["cell_type"] == "markdown"]
        text = "\n\n".join(map(source, cells))
    else:
        text = path.read_text()
    return re.sub(r"`[^`\n]+`", "", FENCE.sub("", text))


def anchors(path: Path) -> set[str]:
    """The anchors of a page: its headings as Python-Markdown names them, and its API objects."""
    if path.suffix == ".ipynb":
        text = "\n\n".join(map(source, notebook_cells(path)))
    else:
        text = path.read_text()
    text = FENCE.sub("", text)
    found: set[str] = set()
    for heading in re.findall(r"^#{1,6} +(.+?)#*$", text, flags=re.MULTILINE):
        words = re.sub(r"\]\([^)]*\)", "]", heading)
        slug = re.sub(r"[^\w\s-]", "", words).strip().lower()
        slug = unique = re.sub(r"[-\s]+", "-", slug)
        count = 0
        while unique in found:
            count += 1
            unique = f"{slug}_{count}"
        found.add(unique)
    found |= set(re.findall(r"<a (?:id|name)=\"([^\"]+)\"", text))
    for name in re.findall(r"^::: (\S+)$", text, flags=re.MULTILINE):
        found.add(name)
        module, _, attribute = name.rpartition(".")
        for member in public_members(getattr(importlib.import_module(module), attribute, None)):
            found.add(f"{name}.{member}")
    return found


LINK = re.compile(r"(!?)\[((?:[^\[\]]|\[[^\]]*\])*)\]\(([^()\s]+)(?:\s+\"[^\"]*\")?\)")


@pytest.mark.parametrize("path", DOCUMENTS + NOTEBOOKS, ids=label)
def test_links_and_figures(path):
    """Each relative link leads to a file and to an anchor that there is, each figure has a text."""
    faults = []
    for image, text, target in LINK.findall(text_of(path)):
        if image and not text.strip():
            faults.append(f"{target} has no alt text")
        if re.match(r"[a-z]+:", target):
            if image:
                faults.append(f"{target} is an image of another host")
            continue
        file, _, anchor = target.partition("#")
        there = (path.parent / file).resolve() if file else path
        if not there.exists():
            faults.append(f"{target} leads to no file")
        elif anchor and there.suffix in (".md", ".ipynb"):
            if "ato_torch" in anchor or "ato_jax.nn" in anchor:
                pytest.importorskip("torch" if "ato_torch" in anchor else "flax")
            if anchor not in anchors(there):
                faults.append(f"{target} leads to no heading")
    assert faults == []


def test_every_page_is_in_the_navigation():
    yaml = pytest.importorskip("yaml")

    def pages(entries):
        for entry in entries:
            value = next(iter(entry.values())) if isinstance(entry, dict) else entry
            yield from pages(value) if isinstance(value, list) else [value]

    # By itself: the rest has tags that only MkDocs reads.
    navigation = (ROOT / "mkdocs.yml").read_text().partition("\nnav:\n")[2]
    listed = sorted(pages(yaml.safe_load(navigation)))
    of_root = {"BUILD_NOTES.md": "notes/build.md", "CONTRIBUTING.md": "contributing.md"}
    if (ROOT / "CHANGELOG.md").is_file() and not (DOCS / "changelog.md").is_file():
        of_root["CHANGELOG.md"] = "changelog.md"
    there = [str(path.relative_to(DOCS)) for path in NOTEBOOKS]
    there += [str(path.relative_to(DOCS)) for path in DOCS.rglob("*.md")]
    assert listed == sorted(there + list(of_root.values()))


# How pages quote the validation losses of the table in docs/examples.md, by the row's first word;
# README.md rounds them to two digits.
LOSSES = {
    "docs/guides/choosing.md": (
        "| {softmax} | {linear} | {gated} |",
        "whose loss was {hybrid}.",
        "was {delta}, between the {gated} of gated linear attention and the {linear} of",
    ),
    "docs/faq.md": (
        "reached {softmax} nats a character, linear attention with gates {gated}, the delta rule "
        "{delta}, and linear attention {linear}, in",
        "A hybrid with one softmax layer in four reached {hybrid},",
    ),
    "docs/tutorials/03-linear-attention.md": (
        "| softmax | {softmax} |\n| linear | {linear} |\n| gated linear | {gated} |\n",
        "| gated, every fourth layer softmax | {hybrid} |",
    ),
    "README.md": (
        "text: {linear} nats a character where softmax reaches {softmax} |",
        "text: {gated} nats where softmax reaches {softmax} |",
        "text: {delta} nats where softmax reaches {softmax} |",
        "text: {hybrid} nats where softmax reaches {softmax} |",
    ),
}


@pytest.mark.parametrize("page", LOSSES)
def test_losses_are_quoted_as_they_were_measured(page):
    measured = (DOCS / "examples.md").read_text().partition("\n## A character language model\n")[2]
    table = measured.partition("\n## ")[0]
    rows = re.findall(r"^\| (\w+)[^|]*\| [\d,]+ \| (\d\.\d{3}) \|", table, flags=re.MULTILINE)
    digits = 2 if page == "README.md" else 3
    losses = {kind: f"{float(loss):.{digits}f}" for kind, loss in rows}
    wanted = [quote.format(**losses) for quote in LOSSES[page]]
    text = (ROOT / page).read_text()
    assert [quote for quote in wanted if quote not in text] == []


# The API reference


def public_members(found: object) -> list[str]:
    """The methods that a class of ours defines and shows.

    Flax puts methods of its own into the class of a layer when it makes the first one.
    """
    if not inspect.isclass(found):
        return []
    return [
        name
        for name, member in vars(found).items()
        if not name.startswith("_")
        and name not in CALLED_BY_LAYERS
        and (inspect.isfunction(member) or isinstance(member, classmethod | staticmethod))
        and member.__module__.partition(".")[0] in OURS
    ]


def public_objects(module_name: str) -> dict[str, object]:
    """What a module exports, and the public methods of its classes, by name."""
    module = importlib.import_module(module_name)
    found = {}
    for name in module.__all__:
        found[f"{module_name}.{name}"] = exported = getattr(module, name)
        for member in public_members(exported):
            found[f"{module_name}.{name}.{member}"] = getattr(exported, member)
    return found


def sections(text: str) -> dict[str, str]:
    """The sections of a docstring by name."""
    parts = re.split(rf"^({'|'.join(SECTIONS)}):\n", inspect.cleandoc(text), flags=re.MULTILINE)
    return dict(zip(parts[1::2], parts[2::2], strict=True))


def entries(section: str) -> list[str]:
    """The names that a section explains, one an entry."""
    return re.findall(r"^  (\*{0,2}[\w.]+):", section, flags=re.MULTILINE)


def faults_of_docstring(found: object) -> list[str]:
    """What the docstring of a public object lacks."""
    text = found.__doc__ or ""
    if not text.strip():
        # A method may leave it to the one that it overrides.
        return [] if inspect.getdoc(found) else ["has no docstring"]
    if inspect.isclass(found) and found.__doc__ == getattr(found.__base__, "__doc__", None):
        return ["has no docstring of its own"]
    told = sections(text)
    faults = []
    if "Example" not in told or ">>> " not in told.get("Example", ""):
        faults.append("has no Example with a line of >>>")
    is_class = inspect.isclass(found)
    if is_class and issubclass(found, BaseException):
        return faults
    if is_class and hasattr(found, "_fields"):  # a NamedTuple: its fields
        if entries(told.get("Attributes", "")) != list(found._fields):
            faults.append(f"Attributes must name {', '.join(found._fields)} in this order")
        return faults
    # nnx puts a signature of its own before that of a layer's constructor.
    signature = inspect.signature(found.__init__ if is_class else inspect.unwrap(found))
    # With their stars, as in the signature.
    stars = {inspect.Parameter.VAR_POSITIONAL: "*", inspect.Parameter.VAR_KEYWORD: "**"}
    named = [
        stars.get(parameter.kind, "") + name
        for name, parameter in signature.parameters.items()
        if name != "self"
    ]
    if sorted(entries(told.get("Args", ""))) != sorted(named):
        faults.append(f"Args must name {', '.join(named)}, each in an entry of its own")
    untyped = [
        name
        for name, parameter in signature.parameters.items()
        if name != "self"
        and parameter.kind not in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD)
        and parameter.annotation in ("Any", parameter.empty)
    ]
    if untyped:
        faults.append(f"has no type for {', '.join(untyped)}")
    if not entries(told.get("Raises", "")):
        faults.append("has no Raises")
    if not is_class and signature.return_annotation not in (None, "None"):
        if not told.get("Returns", "").strip() and not told.get("Yields", "").strip():
            faults.append("has no Returns")
    return faults


def import_or_skip(module_name: str) -> None:
    needed = {"ato_jax.nn": "flax", "ato_torch": "torch"}
    if module_name in needed:
        pytest.importorskip(needed[module_name])


@pytest.mark.parametrize("module_name", MODULES)
def test_docstrings_have_their_sections(module_name):
    import_or_skip(module_name)
    faults = {
        name: faults
        for name, found in public_objects(module_name).items()
        if (faults := faults_of_docstring(found))
    }
    assert faults == {}


@pytest.mark.parametrize("op", ["attention", "linear_attention", "delta_rule"])
def test_the_docstring_of_an_op_names_its_backends(op):
    api = importlib.import_module(f"ato_jax.ops.{op}.api")
    told = sections(getattr(api, api.OP.name).__doc__)["Args"].partition("implementation:")[2]
    assert [name for name in api.OP.backends if f'"{name}"' not in told] == []


@pytest.mark.parametrize("module_name", MODULES)
def test_the_reference_shows_every_public_object(module_name):
    import_or_skip(module_name)
    shown = set()
    for page in (DOCS / "reference").glob("*.md"):
        shown |= set(re.findall(r"^::: (\S+)$", page.read_text(), flags=re.MULTILINE))
    exported = importlib.import_module(module_name).__all__
    assert [name for name in exported if f"{module_name}.{name}" not in shown] == []


class Runner(doctest.DocTestRunner):
    """An exception that an example does not expect is the test's own, for skips to see."""

    def report_unexpected_exception(self, out, test, example, exc_info):
        raise exc_info[1]


@pytest.mark.parametrize("module_name", MODULES)
def test_examples_of_docstrings(module_name, elsewhere):
    import_or_skip(module_name)
    finder = doctest.DocTestFinder(recurse=False)
    failed = []
    for name, found in public_objects(module_name).items():
        for test in finder.find(found, name, globs={}):
            report: list[str] = []
            if Runner().run(test, out=report.append).failed:
                failed.append("".join(report))
    assert not failed, "\n".join(failed)


# The checks themselves


def load_check() -> types.ModuleType:
    spec = importlib.util.spec_from_file_location("check", DOCS / "site" / "check.py")
    assert spec is not None and spec.loader is not None
    check = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(check)
    return check


# As mkdocstrings writes what a function returns, and another entry of it.
RETURNS = (
    '<p><span class="doc-section-title">Returns:</span></p>'
    '<ul><li class="doc-section-item field-body">out, a sentence</li>'
)
ENTRY = '<li class="doc-section-item field-body">that goes on</li>'
RAISES = f'</ul><p><span class="doc-section-title">Raises:</span></p><ul>{2 * ENTRY}</ul>'
GOOD = (
    f'{RETURNS}{RAISES}<h1 id="top">Page</h1><a href="other.html#part">on</a>'
    '<img src="a.png" alt="A figure">'
)
FAULTS = {
    '<a href="missing.html">on</a>': "missing.html leads to no file",
    '<a href="other.html#gone">on</a>': "other.html#gone leads to no anchor",
    '<a href="#gone">on</a>': "#gone leads to no anchor",
    '<img src="a.png" alt="">': "image a.png has no alt text",
    '<img src="b.png" alt="A figure">': "b.png leads to no file",
    '<img src="https://example.org/b.png" alt="A figure">': "from another host",
    '<script src="//example.org/a.js"></script>': "from another host",
    '<link rel="preconnect" href="https://example.org">': "from another host",
    "<style>@font-face { src: url(https://example.org/a.woff) }</style>": "from another host",
    f"{RETURNS}{ENTRY}": "has several entries, one for each line",
}


def make_site(folder: Path, text: str) -> Path:
    (folder / "index.html").write_text(text)
    (folder / "other.html").write_text('<p id="part"></p><a href="https://example.org">paper</a>')
    (folder / "a.png").write_bytes(b"")
    return folder


def test_the_check_of_the_site_wants_captions_of_the_figures_of_tutorials(tmp_path):
    folder = tmp_path / "tutorials"
    folder.mkdir()
    image = '<img src="a.png" alt="A figure">'
    make_site(folder, f"{image}<figure>{image}<figcaption>Caption</figcaption></figure>")
    assert load_check().faults(tmp_path) == ["tutorials/index.html: 2 images, 1 captions"]


def test_the_check_of_the_site_finds_no_fault_in_a_good_one(tmp_path):
    assert load_check().faults(make_site(tmp_path, GOOD)) == []
    assert load_check().faults(tmp_path / "empty") != []


@pytest.mark.parametrize("fault", FAULTS)
def test_the_check_of_the_site_finds(fault, tmp_path):
    [found] = load_check().faults(make_site(tmp_path, GOOD + fault))
    assert found.startswith("index.html: ") and found.endswith(FAULTS[fault])


def test_a_block_that_raises_fails_with_its_page_and_line(request):
    pages = ("python", "x = 1"), ("python gpu", "raise"), ("python", "x.missing")
    text = "# Page\n\n" + "\n".join(f"```{info}\n{code}\n```\n" for info, code in pages)
    blocks = python_blocks(text)
    assert [(line, mark) for line, mark, _ in blocks] == [(3, ""), (7, "gpu"), (11, "")]
    pieces = [(line, code) for line, mark, code in blocks if not mark]
    with pytest.raises(AttributeError) as raised:
        run(DOCS / "page.md", pieces, request)
    last = raised.traceback[-1]
    assert str(last.path).endswith("docs/page.md") and last.lineno + 1 == 12


def documented(x: int, *, y: int = 0, **rest: int) -> int:
    """Adds.

    Args:
      x: One.
      y: Another.
      **rest: None of them.

    Returns:
      The sum.

    Raises:
      ValueError: Never.

    Example:
      >>> documented(1)
      1
    """
    return x + y


@pytest.mark.parametrize(
    ("old", "new", "fault"),
    [
        ("  y: Another.", "", "Args must name x, y, **rest, each in an entry of its own"),
        ("  x: One.\n  y: Another.", "  x, y: Both.", "Args must name x, y"),
        ("  **rest:", "  rest:", "Args must name x, y, **rest"),
        ("Returns:", "Gives:", "has no Returns"),
        ("Raises:", "Fails:", "has no Raises"),
        ("Example:", "So:", "has no Example"),
        (">>> documented(1)", "documented(1)", "has no Example"),
    ],
)
def test_a_docstring_that_lacks_something_is_found(old, new, fault):
    assert faults_of_docstring(documented) == []

    def lacking(x: int, *, y: int = 0, **rest: int) -> int:
        return x + y

    text = inspect.cleandoc(documented.__doc__ or "")
    assert old in text
    lacking.__doc__ = text.replace(old, new)
    [found] = faults_of_docstring(lacking)
    assert found.startswith(fault)
