"""The project's own files: what they promise each other, and what they must not contain."""

from __future__ import annotations

import fnmatch
import hashlib
import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
PYPROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
README = (ROOT / "README.md").read_text()
MAKEFILE = (ROOT / "Makefile").read_text()

# The text as published by the Apache Software Foundation, unmodified.
APACHE_2_SHA256 = "cfc7749b96f63bd31c3c42b5c471bf756814053e847c10f3eb003417bc523d30"

# Folders of somebody's machine, and the registries' hosts.
NOT_FOR_A_PROJECT = re.compile(
    r"(?<![\w.})/-])/(?:home|root|Users|work|tmp)/\w"
    r"|\b(?:pypi|pythonhosted|anaconda|npmjs)\.(?:org|com)\b"
    r"|\bdownload\.pytorch\.org\b"
)


def tracked_text() -> dict[str, str]:
    """Every text file that git tracks, by its path."""
    try:
        listing = subprocess.run(
            ["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, check=True, text=True
        ).stdout
    except (FileNotFoundError, subprocess.CalledProcessError):
        pytest.skip("not a git checkout")
    texts = {}
    for name in filter(None, listing.split("\0")):
        path = ROOT / name
        if not path.is_file():  # removed here and not committed yet
            continue
        content = path.read_bytes()
        if b"\0" not in content:
            texts[name] = content.decode(errors="replace")
    return texts


def test_extras():
    extras = PYPROJECT["project"]["optional-dependencies"]
    assert set(extras) == {
        "cuda12",
        "cuda13",
        "flax",
        "torch",
        "triton",
        "transformers",
        "bench",
        "examples",
        "docs",
        "dev",
    }
    assert PYPROJECT["project"]["dependencies"] == ["jax>=0.10.2"]


def test_nothing_depends_on_the_empty_dlpack_package():
    project = PYPROJECT["project"]
    for requirements in [project["dependencies"], *project["optional-dependencies"].values()]:
        assert not [requirement for requirement in requirements if "dlpack" in requirement]


def test_package_and_project_have_one_version():
    assert (
        f'__version__ = "{PYPROJECT["project"]["version"]}"'
        in (ROOT / "ato_jax" / "__init__.py").read_text()
    )


def test_both_packages_tell_the_projects_version():
    import ato_jax

    assert ato_jax.__version__ == PYPROJECT["project"]["version"]
    pytest.importorskip("torch")
    import ato_torch

    assert ato_torch.__version__ == ato_jax.__version__


@pytest.mark.parametrize("package", ["ato_jax", "ato_torch"])
def test_packages_say_that_they_are_typed(package):
    """A type checker reads the annotations of an installed package by this file alone."""
    assert (ROOT / package / "py.typed").is_file()
    assert package in PYPROJECT["tool"]["hatch"]["build"]["targets"]["wheel"]["packages"]


def test_source_distribution_holds_all_that_is_tracked():
    included = PYPROJECT["tool"]["hatch"]["build"]["targets"]["sdist"]["include"]
    # By hatchling itself, whatever is listed.
    always = {"/pyproject.toml", "/README.md", "/LICENSE", "/.gitignore"}

    def is_included(path):
        return path in always or any(
            fnmatch.fnmatch(path, pattern) or path.startswith(f"{pattern}/") for pattern in included
        )

    assert [name for name in tracked_text() if not is_included(f"/{name}")] == []


HIDE = """
import sys
class Hidden:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] == {hidden!r}:
            raise ModuleNotFoundError(f"No module named {{name!r}}", name=name)
sys.meta_path.insert(0, Hidden())
try:
    import {package}
except ImportError as error:
    print(error)
"""


@pytest.mark.parametrize(("package", "extra"), [("ato_torch", "torch"), ("ato_jax.nn", "flax")])
def test_an_import_names_the_extra_that_is_missing(package, extra):
    program = HIDE.format(hidden=extra, package=package)
    told = subprocess.check_output([sys.executable, "-c", program], cwd=ROOT, text=True)
    assert package in told and f"pip install 'ato-jax[{extra}]'" in told
    assert extra in PYPROJECT["project"]["optional-dependencies"]


def test_install_page_names_every_extra():
    page = (ROOT / "docs" / "install.md").read_text()
    for extra in PYPROJECT["project"]["optional-dependencies"]:
        assert f"| `{extra}` |" in page


def test_license_is_apache_2():
    assert hashlib.sha256((ROOT / "LICENSE").read_bytes()).hexdigest() == APACHE_2_SHA256
    assert PYPROJECT["project"]["license"] == "Apache-2.0"


@pytest.mark.parametrize("document", ["README.md", "CONTRIBUTING.md", "BUILD_NOTES.md"])
def test_make_commands_in_documents_exist(document):
    text = (ROOT / document).read_text()
    commands = set(re.findall(r"(?:^ {4}|`)make ([a-z-]+)", text, flags=re.MULTILINE))
    targets = set(re.findall(r"^([a-z-]+):", MAKEFILE, flags=re.MULTILINE))
    assert commands, f"{document} names no make command"
    assert commands <= targets


def test_readme_names_the_two_commands():
    assert "    make demo" in README
    assert "    make test" in README
    assert "docs/support.md" in README


def test_ci_runs_the_readme_test_command():
    script = ROOT / ".ci" / "run"
    assert os.access(script, os.X_OK)
    lines = script.read_text().splitlines()
    assert lines[0] == "#!/usr/bin/env bash"
    assert "set -euo pipefail" in lines
    assert [line for line in lines if re.match(r"make test( |$)", line)]


def test_both_ends_of_the_version_range_are_tested():
    [minimum] = re.findall(r"^OLDEST_JAX := jax==(.*)$", MAKEFILE, flags=re.MULTILINE)
    assert PYPROJECT["project"]["dependencies"] == [f"jax>={minimum}"]
    [test_target] = re.findall(r"^test: (.*)$", MAKEFILE, flags=re.MULTILINE)
    for prerequisite in ("ready", "test-oldest", "test-newest"):
        assert prerequisite in test_target
    [recipe] = re.findall(r"^ready:\n((?:\t.*\n)+)", MAKEFILE, flags=re.MULTILINE)
    assert "lint" in recipe.split()


def test_no_machine_paths_or_registry_hosts():
    # A path of one part, such as a container's home, is too short to tell anything.
    own = [str(path) + "/" for path in (ROOT, Path.home()) if len(path.parts) > 2]
    found = []
    for name, text in tracked_text().items():
        for number, line in enumerate(text.splitlines(), start=1):
            if NOT_FOR_A_PROJECT.search(line) or any(path in line for path in own):
                found.append(f"{name}:{number}: {line.strip()}")
    assert found == []
