"""Processes that run a module of this package."""

import os
import sys
from pathlib import Path


def module_command(module: str) -> list[str]:
    """Return the command line that runs a module of this package, without its arguments. It needs `python_path`.

    With -P no file in the current directory, such as a calendar.py of the user's, hides a module of Python's. The
    user's own modules are found there all the same: `plugs.load` looks in it last.
    """
    return [sys.executable, "-P", "-m", module]


def python_path() -> dict[str, str]:
    """Return the variable by which a process finds the package where it is not installed, beside what it has there."""
    folders = filter(None, [str(Path(__file__).resolve().parents[2]), os.environ.get("PYTHONPATH")])
    return {"PYTHONPATH": os.pathsep.join(folders)}
