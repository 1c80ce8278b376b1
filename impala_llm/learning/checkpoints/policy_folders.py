"""Folders of policies in a run's folder: one takes the place of another, and a kill leaves one of them. No torch here.

A folder cannot be renamed onto another that has files: the earlier one is renamed first, and removed last. If a learner
is killed in between, the next one puts the folders back or removes them.
"""

import os
import re
import shutil
from pathlib import Path

_REPLACED = ".replaced"
"""Suffix of a policy while another takes its name; it counts where none has it."""
_UNFINISHED = re.compile(r"policy.*\.new-\d+")
"""Name of a policy that is being written: by `Saving.save_policy`, with the number of its process."""


def replace_folder(new: Path, target: Path) -> None:
    """Give a folder its name, in place of an earlier one of that name.

    Raises:
        OSError: it cannot be renamed; the earlier one is where it was.
    """
    replaced = target.with_name(target.name + _REPLACED)
    if os.path.lexists(target):
        _remove(replaced)
        target.rename(replaced)
    try:
        new.rename(target)
    except OSError:
        if os.path.lexists(replaced):
            replaced.rename(target)
        raise
    _remove(replaced)


def put_policies_back(run_folder: Path) -> None:
    """Undo or finish what a learner that was killed was doing to the policies of its run."""
    for path in list(run_folder.glob(f"policy*{_REPLACED}")):
        target = path.with_name(path.name.removesuffix(_REPLACED))
        if os.path.lexists(target):
            _remove(path)
        else:
            path.rename(target)
    for path in list(run_folder.glob("policy*")):
        if _UNFINISHED.fullmatch(path.name):
            shutil.rmtree(path, ignore_errors=True)


def _remove(path: Path) -> None:
    """Remove a folder, or a link to one: what it leads to stays."""
    if path.is_symlink():
        path.unlink()
    else:
        shutil.rmtree(path, ignore_errors=True)
