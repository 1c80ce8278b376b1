"""Where torch.compile keeps what it has compiled: a folder into which only this user can put code."""

import os
import struct
import sys
import tempfile
from collections.abc import Mapping, MutableMapping
from contextlib import suppress
from pathlib import Path

import psutil

VARIABLE = "TORCHINDUCTOR_CACHE_DIR"


def keep_compiled_code(otherwise: Path, environment: MutableMapping[str, str] = os.environ) -> None:
    """Set torch's variable, unless it names a folder of the user's choice.

    By itself torch runs code from a folder in /tmp that another user may have made, and any process that imports torch
    has that folder in the variable.

    Args:
        otherwise: folder for this run alone, where the lasting one, in the user's home, is open to others.
        environment: changed in place; that of this process, unless told.
    """
    environment[VARIABLE] = compiled_folder(otherwise, environment)
    _remove_unfinished(Path(environment[VARIABLE]))


def compiled_folder(otherwise: Path, environment: Mapping[str, str] = os.environ) -> str:
    """The folder that `keep_compiled_code` sets, of the same arguments."""
    of_torch = f"{tempfile.gettempdir()}/torchinductor_"
    named = environment.get(VARIABLE, of_torch)
    return str(_lasting() or otherwise.absolute()) if named.startswith(of_torch) else named


def _remove_unfinished(folder: Path) -> None:
    """Remove libraries whose compiler was killed: torch loads what is there, and fails at each start from then on."""
    for path in [path for path in folder.rglob("*.so") if not _is_whole(path)]:
        # Unless another run's compiler is at it.
        if not any(
            str(path) in word for each in psutil.process_iter(["cmdline"]) for word in each.info["cmdline"] or ()
        ):
            with suppress(OSError):  # another rank has removed it, or it is not this user's
                path.unlink()


def _is_whole(library: Path) -> bool:
    """Whether a file has all that its ELF header names: the table of sections is the last part (elf(5))."""
    try:
        with library.open("rb") as file:
            header, num_bytes = file.read(64), os.fstat(file.fileno()).st_size
    except OSError:
        return True
    if header[:4] != b"\x7fELF":
        return len(header) >= 4  # of another system
    if len(header) < 64:
        return False
    begin, size, number = struct.unpack_from("<40xQ10xHH", header)
    return bool(begin + size * number <= num_bytes)


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
