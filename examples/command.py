"""What the examples' command lines share: help from the docstring, and folders to write to."""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path


def parser(description: str | None, *, output: str | None = None) -> argparse.ArgumentParser:
    """With --help, and --output where an example writes something."""
    found = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    if output is not None:
        found.add_argument(
            "--output", type=writable_folder, default=output, help="folder to write to"
        )
    return found


def writable_folder(name: str) -> Path:
    """A folder, made if need be; one that cannot be written to is an error before the run."""
    path = Path(name)
    try:
        path.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=path):
            pass
    except OSError as error:
        raise argparse.ArgumentTypeError(f"{name} cannot be written to: {error}") from None
    return path


def told(path: Path) -> Path:
    """Prints that the file or folder was written."""
    print(f"wrote {path.resolve()}")
    return path
