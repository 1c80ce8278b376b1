"""Command lines for the user to type next."""

import shlex
import shutil
import sys
from pathlib import Path


def program(name: str) -> str:
    """The word by which a shell calls a program of this environment: its path where PATH has another or none."""
    ours = Path(sys.executable).with_name(name)
    found = shutil.which(name)
    if not ours.is_file() or (found and Path(found).absolute() == ours):
        return name
    return shlex.quote(str(ours.relative_to(Path.cwd()) if ours.is_relative_to(Path.cwd()) else ours))


def how_to_evaluate(run_folder: Path) -> str:
    """A line with the command that plays what a run has learned, and how its best policy is played if it kept one."""
    command = f"{program('impala-llm')} evaluate --config {shlex.quote(f'{run_folder}/config.yaml')}"
    best = run_folder / "policy-best"
    beside = f" (the best by validation tasks: with model.path={shlex.quote(str(best))})" if best.is_dir() else ""
    return f"evaluate it: {command}{beside}"
