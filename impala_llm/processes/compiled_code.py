"""Where torch.compile keeps what it has compiled: a folder into which only this user can put code."""

import os
import sys
import tempfile
from collections.abc import MutableMapping
from pathlib import Path

VARIABLE = "TORCHINDUCTOR_CACHE_DIR"


def keep_compiled_code(otherwise: Path, environment: MutableMapping[str, str] = os.environ) -> None:
    """Set torch's variable, unless it names a folder of the user's choice.

    By itself torch runs code from a folder in /tmp that another user may have made, and any process that imports torch
    has that folder in the variable.

    Args:
        otherwise: folder for this run alone, where the lasting one, in the user's home, is open to others.
        environment: changed in place; that of this process, unless told.
    """
    of_torch = f"{tempfile.gettempdir()}/torchinductor_"
    if environment.get(VARIABLE, of_torch).startswith(of_torch):
        environment[VARIABLE] = str(_lasting() or otherwise.absolute())


def _lasting() -> Path | None:
    """The lasting folder; None where others could put code there."""
    try:
        cache = Path.home() / ".cache" / "impala_llm" / "inductor"
        for each in (cache.parent, cache):
            each.mkdir(mode=0o700, parents=True, exist_ok=True)
            status = each.stat()
            if status.st_uid != os.getuid() or status.st_mode & 0o022:
                raise PermissionError(
                    f"{each} must be user {os.getuid()}'s, and others must not write: chmod go-w {each}"
                )
        return cache
    except (OSError, RuntimeError) as error:
        print(f"each start compiles anew, as compiled code has no safe place: {error}", file=sys.stderr)
        return None
