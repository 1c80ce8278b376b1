"""Starts the parts of an SGLang server on a CPU as forks of it; a .pth file loads it at interpreter start.

Why: scheduler and detokenizer are spawned, so that each imports torch and SGLang again, which takes most of the 19 s
until a server answers: with forks 8 s. SGLang spawns because a forked process cannot use CUDA,
which no process of a server on a CPU does.
"""

import multiprocessing
import os

_set_start_method = multiprocessing.set_start_method


def set_start_method(method: str | None, force: bool = False) -> None:
    """Do as multiprocessing does, except that a server on a CPU forks where it asks for "spawn"."""
    forks = method == "spawn" and os.environ.get("SGLANG_USE_CPU_ENGINE") == "1"
    _set_start_method("fork" if forks else method, force)


multiprocessing.set_start_method = set_start_method
