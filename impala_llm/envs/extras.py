"""Libraries that an environment needs and that not everybody has."""

import importlib
from typing import Any


class MissingPackage(RuntimeError):
    """A library is not installed. The message names it and says how to install it."""


def needed(module: str, extra: str) -> Any:
    """Import a library of an optional extra.

    Args:
        module: its import name.
        extra: of this package, that installs it.

    Raises:
        MissingPackage: it is not installed, or a library that it needs is not.
    """
    try:
        return importlib.import_module(module)
    except ImportError as error:
        reason = f" ({error})" if error.name != module.partition(".")[0] else ""
        raise MissingPackage(
            f"the package {module} cannot be imported{reason}: pip install 'impala-llm[{extra}]'"
        ) from error
