"""Starts the parts of an SGLang server on a CPU as forks of it; a .pth file loads it at interpreter start.

Why: scheduler and detokenizer are spawned, so that each imports torch and SGLang again, which takes most of the 19 s
until a server answers: with forks 8 s. SGLang spawns because a forked process cannot use CUDA,
which no process of a server on a CPU does.

Until the server says how its parts start, which it does when all is imported, nothing is searched for garbage: there is
none, and the search takes 1.3 of 9 s.
"""

import gc
import multiprocessing
import os

_set_start_method = multiprocessing.set_start_method


def set_start_method(method: str | None, force: bool = False) -> None:
    """Do as multiprocessing does, except that a server on a CPU forks where it asks for "spawn"."""
    _set_start_method("fork" if method == "spawn" and IS_CPU else method, force)
    if IS_CPU:
        gc.freeze()  # a fork that looks through all that was imported copies its memory
        gc.enable()


IS_CPU = os.environ.get("SGLANG_USE_CPU_ENGINE") == "1"
if IS_CPU:
    gc.disable()
multiprocessing.set_start_method = set_start_method
