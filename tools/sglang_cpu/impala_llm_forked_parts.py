"""Starts the parts of an SGLang server on a CPU as forks of it; a .pth file loads it at interpreter start.

Why: scheduler and detokenizer are spawned, so that each imports torch and SGLang again, which takes most of the 19 s
until a server answers. SGLang spawns because a forked process cannot use CUDA,
which no process of a server on a CPU does.

Until it asks for that, when all is imported, the server searches for no garbage: there is none, and the search takes
1.3 of the 9 s of its imports.
"""

import gc
import multiprocessing
import os
import sys

_set_start_method = multiprocessing.set_start_method


def set_start_method(method: str | None, force: bool = False) -> None:
    """Do as multiprocessing does, except that a server on a CPU forks where it asks for "spawn"."""
    is_cpu = os.environ.get("SGLANG_USE_CPU_ENGINE") == "1"
    if _is_server:
        gc.freeze()  # a fork that looks through all that was imported copies its memory
        gc.enable()
    _set_start_method("fork" if method == "spawn" and is_cpu else method, force)


_is_server = "sglang.launch_server" in sys.orig_argv
if _is_server:
    gc.disable()
multiprocessing.set_start_method = set_start_method
