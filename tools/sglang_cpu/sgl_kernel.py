"""Takes the place of SGLang's compiled CUDA kernels on a machine without a GPU.

Why: SGLang's layers do `from sgl_kernel import ...` at the top of their modules, also where a CPU never calls what they
import, and the real package is hundreds of megabytes of CUDA binaries that do not load here. With
SGLANG_USE_CPU_ENGINE=1 the torch implementations are used. So a name may be imported; a call of it raises an error.
"""

from collections.abc import Callable
from typing import NoReturn


def __getattr__(name: str) -> Callable[..., NoReturn]:
    # Python's own look-ups (__path__, __spec__, ...) must fail as they do in any plain module.
    if name.startswith("__") and name.endswith("__"):
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")

    def kernel(*_arguments: object, **_keywords: object) -> NoReturn:
        raise NotImplementedError(f"{name} is a CUDA kernel of SGLang; this installation runs on the CPU alone")

    kernel.__name__ = name
    return kernel
