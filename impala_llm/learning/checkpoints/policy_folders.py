"""Folders of policies in a run's folder: one takes the place of another, and a kill leaves one of them. No torch here.

A folder cannot be renamed onto another that has files: the earlier one is renamed first, and removed last. If a learner
is killed in between, the next one puts the folders back or removes them.
"""

import json
import os
import re
import shutil
from contextlib import suppress
from pathlib import Path

CANDIDATE = "policy-candidate"
"""Folder of the policy whose evaluation is under way."""
SCORE_FILE = "evaluation.json"
"""File of the best policy's folder: what its evaluation has found."""
TRAINING_FILE = "training.json"
"""File of a saved policy's folder: the update of its run. A policy that learns on from it has another one, or none."""
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
        remove_folder(replaced)
        target.rename(replaced)
    try:
        new.rename(target)
    except OSError:
        if os.path.lexists(replaced):
            replaced.rename(target)
        raise
    remove_folder(replaced)


def put_policies_back(run_folder: Path) -> None:
    """Undo or finish what a learner that was killed was doing to the policies of its run."""
    for path in list(run_folder.glob(f"policy*{_REPLACED}")):
        target = path.with_name(path.name.removesuffix(_REPLACED))
        if os.path.lexists(target):
            remove_folder(path)
        else:
            path.rename(target)
    for path in list(run_folder.glob("policy*")):
        if _UNFINISHED.fullmatch(path.name):
            shutil.rmtree(path, ignore_errors=True)


def trained_update(policy: Path) -> int:
    """Return the update of its run that made a saved policy; -1 where its folder is missing or does not say."""
    try:
        return int(json.loads((policy / TRAINING_FILE).read_text())["update"])
    except (OSError, ValueError, KeyError, TypeError):
        return -1


def learned_policies(run_folder: Path) -> list[Path]:
    """Return the policies in a run's folder that are of one of its updates, or may be.

    The others are the one that the run began with, and those that are being written or evaluated.
    """
    found = []
    for path in run_folder.glob("policy*"):
        update = None
        with suppress(OSError, ValueError, KeyError, TypeError):
            update = json.loads((path / SCORE_FILE).read_text())["evaluation/update"]
        if update != 0 and path.name != CANDIDATE and not _UNFINISHED.fullmatch(path.name):
            found.append(path)
    return found


def remove_folder(path: Path) -> None:
    """Remove a folder, or a link to one: what it leads to stays. What cannot be removed stays, too."""
    if path.is_symlink():
        with suppress(OSError):
            path.unlink()
    else:
        shutil.rmtree(path, ignore_errors=True)
