"""Saving of a run at one rank: when a checkpoint is due, what it holds, how a rank goes on from one; and the policy.

Invariant: a checkpoint is of the end of an update. What a signal interrupts amid one is saved as it was before, while
the weights have not changed; once they have, it is not saved.
"""

import json
import logging
import os
import shutil
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from safetensors import SafetensorError

from impala_llm.learning.batch_source import BatchSource
from impala_llm.learning.checkpoints.files import name_of
from impala_llm.learning.checkpoints.past import Past
from impala_llm.learning.checkpoints.policy_folders import TRAINING_FILE, replace_folder
from impala_llm.learning.checkpoints.reader import CheckpointReader
from impala_llm.learning.checkpoints.writer import (
    POLICY,
    Checkpointer,
    RankState,
    Stateful,
    load_random_state,
    random_state,
    tensors_of,
)
from impala_llm.learning.optim import Optimizer
from impala_llm.learning.policy.lora import is_adapted
from impala_llm.learning.policy.model import PolicyModel
from impala_llm.learning.publishing import VersionPublisher
from impala_llm.learning.ranks.parallel import Ranks
from impala_llm.pipeline import LearnerEndpoint
from impala_llm.pipeline.shm.record import record_bytes
from impala_llm.pipeline.tickets.journal_rows import Row
from impala_llm.processes.programs import how_to_evaluate
from impala_llm.processes.supervised import SUPERVISED, say
from impala_llm.settings import LearnerConfig, holds_run

_log = logging.getLogger(__name__)
Tickets = tuple[Sequence[Row], Mapping[int, Callable[[], memoryview]]]
"""Rows of the tickets of a rank, and the records that they have brought: see `Receiver.rows` and `held`."""


@dataclass(frozen=True)
class RankParts:
    """Parts of a rank of which a checkpoint holds the state."""

    ranks: Ranks
    endpoint: LearnerEndpoint
    model: PolicyModel
    optimizer: Optimizer
    batches: BatchSource
    publisher: VersionPublisher
    files: Mapping[str, bytes]
    """Files of the policy beside its weights."""
    others: dict[str, Stateful] = field(default_factory=dict)
    """Further parts, by name."""


@dataclass(frozen=True)
class UpdateEnd:
    """End of an update."""

    update: int
    version: int
    seconds: float
    """Time for which the run has trained."""
    patience: int = 0
    """See `CheckpointManifest.patience`."""


class Saving:
    """Decides when a checkpoint is due, and collects what it holds. For the learner's thread.

    Args:
        config: of the learner.
        checkpointer: writes checkpoints.
        parts: of which a checkpoint holds the state.
        origin: the checkpoint that the run goes on from; None: it begins.
    """

    def __init__(
        self, config: LearnerConfig, checkpointer: Checkpointer, parts: RankParts, origin: CheckpointReader | None
    ) -> None:
        self._config, self._checkpointer, self._parts = config, checkpointer, parts
        self._before: dict[str, Any] | None = None
        """Amid an update, until the weights change: states of the other parts as they were before."""
        self._is_changed = False
        """Whether weights have changed since the last update that is over."""
        self._saved_at = time.monotonic()
        self._saved: UpdateEnd | None = None
        """The update of the last checkpoint."""
        checkpointer.went_on_from(-1 if origin is None else origin.manifest.update)
        if origin is not None:
            saved = origin.manifest
            self._saved = UpdateEnd(saved.update, saved.version, 60 * saved.minutes_used, saved.patience)

    # --- an update

    def begin_update(self) -> None:
        """Note the state that a signal amid the update goes back to."""
        self._before = self._states()

    def before_change(self) -> None:
        """Return once the weights may change."""
        self._is_changed = True
        self._checkpointer.wait_until_copied()

    def end_update(self) -> None:
        """Note that an update is over. Shared memory holds its work, and stays at the end of the run unless that work
        is saved."""
        self._before, self._is_changed = None, False
        if self._parts.ranks.is_main:
            self._parts.endpoint.run_dir.keep()

    @property
    def holds_signals_back(self) -> bool:
        """Whether a signal waits for the end of the update: not while its gradient is computed on the only rank."""
        return self._before is None or self._is_changed or self._parts.ranks.num_processes > 1

    @property
    def outlasts_signals(self) -> bool:
        """Whether a signal waits for the end of the update however long that takes, up to the launcher's limit: amid an
        update of several ranks, which can only save a checkpoint together."""
        return self._before is not None and self._parts.ranks.num_processes > 1

    # --- checkpoints

    def is_due_at_start(self, next_update: int) -> bool:
        """Whether the first update of this learner should end with a checkpoint: by number, or because the run has none
        yet, so that a lost host would cost all of it. All ranks find the same."""
        return self._checkpointer.is_on and (self._saved is None or self._is_due_by_number(next_update))

    def is_due(self, next_update: int, saves_now: bool) -> bool:
        """Whether an update should end with a checkpoint: by number, by time, for the best policy so far, or because
        the run has none yet.

        Args:
            next_update: the update.
            saves_now: whether the update before it ends with a checkpoint, which is begun after this call.
        """
        if saves_now:
            return self._is_due_by_number(next_update)
        if self._checkpointer.is_busy or not self._checkpointer.is_on:
            return False
        minutes = self._config.checkpoint_minutes
        is_late = minutes is not None and time.monotonic() - self._saved_at >= 60 * minutes
        return is_late or self._checkpointer.is_wanted or self.is_due_at_start(next_update)

    def _is_due_by_number(self, next_update: int) -> bool:
        every = self._config.checkpoint_every
        return bool(every) and next_update % every == 0

    def tickets(self, version: int) -> Tickets:
        """Return the tickets of this rank, and the trajectories that they have brought, as of a learner's version."""
        receiver = self._parts.endpoint.receiver
        return receiver.rows(version), receiver.held()

    def save(self, tickets: Tickets, end: UpdateEnd) -> None:
        """Begin to write a checkpoint of the last update that is over, unless another one is being written. All ranks
        call it."""
        parts, is_busy = self._parts, self._checkpointer.is_busy
        if parts.ranks.num_processes > 1:  # all write a part, or none does
            is_busy = parts.ranks.sum([float(is_busy)], of_processes=True)[0] > 0
        if is_busy or not self._checkpointer.is_on:
            return
        if parts.ranks.is_sharded:  # ranks meet in an export that each writes a part of: that is not put off
            self._export(end.update, partial(parts.publisher.export.save, files=parts.files))
        if self._checkpointer.save(self._state(tickets, end)):
            self._saved_at, self._saved = time.monotonic(), end

    def _export(self, update: int, write: Callable[[Path], None]) -> None:
        """Write the plain export of a checkpoint. One that cannot be written is left out, which is said."""
        folder = self._checkpointer.export_folder(update)
        try:
            write(folder)
        except Exception as error:
            shutil.rmtree(folder, ignore_errors=True)
            _say_no_export(update, error)

    def save_last(self, end: UpdateEnd) -> bool:
        """Write the last checkpoint, of the last update that is over, and return once it is on the disk. All ranks call
        it, since one that has failed on any of them is written again by all.

        Returns:
            Whether it is there. Where checkpoints are off: whether no older one is there, with which a later learner
            would go on from earlier work.
        """
        if not self._checkpointer.is_on:
            return self._saved is None or self._saved.update == end.update
        if self._is_changed or end.update == 0:
            return False
        ranks, is_there = self._parts.ranks, self._checkpointer.wait()
        saved = None if self._saved is None else (self._saved.update, self._saved.patience)
        is_missing = saved != (end.update, end.patience) or self._checkpointer.has_failed
        if ranks.sum([float(is_missing)], of_processes=True)[0]:
            if ranks.is_main:
                self._checkpointer.remove_parts()
            ranks.barrier()
            self.save(self.tickets(end.version), end)
            is_there = self._checkpointer.wait()
        if self._saved is None or self._saved.update != end.update or self._checkpointer.has_failed:
            return False
        if ranks.is_main:
            if is_there and self._saved.version == end.version:
                self._checkpointer.versions.end(end.version)
            # No checkpoint comes after it.
            self._checkpointer.mark_best_if_wanted(name_of(end.update), self._saved.version)
        return True

    def save_at_end(self, run_folder: Path, end: UpdateEnd, ends_together: bool) -> bool:
        """Save the policy and the last checkpoint; shared memory is not needed once both are on the disk.

        Args:
            ends_together: all ranks call this after the same update; else none of them writes a checkpoint.

        Returns:
            Whether no policy had to be left in shared memory.
        """
        ranks, is_saved, is_whole = self._parts.ranks, True, False
        try:
            if ranks.is_main or ranks.is_sharded:
                is_saved = self.save_last_policy(run_folder, end)
        finally:
            if ends_together:
                is_whole = self.save_last(end)
        if ranks.is_main and is_saved and is_whole:
            self._parts.endpoint.run_dir.release()
        return is_saved

    # --- the policy alone

    def save_policy(self, target: Path, update: int) -> bool:
        """Save the policy; nobody sees half of it, and a kill loses no earlier one. All ranks that share it call it,
        else rank 0.

        Args:
            target: folder; rank 0's counts.
            update: of the run, that made the policy.

        Returns:
            Whether it is saved; if not, that is said, and why.
        """
        ranks, is_saved = self._parts.ranks, True
        aside = target.with_name(f"{target.name}.new-{os.getpid()}")
        files = {**self._parts.files, TRAINING_FILE: json.dumps({"update": update}).encode()}
        try:
            self._parts.publisher.export.save(aside, files)
            if ranks.is_main:
                replace_folder(aside, target)
        except Exception as error:
            shutil.rmtree(aside, ignore_errors=True)
            _say_failure(f"the policy of update {update} cannot be saved on the disk of {target}", error)
            is_saved = False
        return ranks.sum([float(not is_saved)], of_processes=True)[0] == 0 if ranks.is_sharded else is_saved

    def save_last_policy(self, run_folder: Path, end: UpdateEnd) -> bool:
        """Save the policy at the end of training, on the disk or, where that is full, in shared memory.

        All ranks that share the policy call it, else rank 0.

        Returns:
            Whether it is on the disk.
        """
        target, parts = run_folder / "policy", self._parts
        is_saved = self.save_policy(target, end.update)
        if not is_saved:
            parts.publisher.keep(end.version)
        if not parts.ranks.is_main:
            return is_saved
        if is_saved:
            say(f"learner: the policy is saved in {target}, at update {end.update}")
            if SUPERVISED not in os.environ:  # the supervisor says it once all have ended
                say(how_to_evaluate(run_folder))
            return True
        parts.endpoint.run_dir.keep()
        resume = "" if holds_run(run_folder) else " with run.resume=true"  # else the same command would begin anew
        say(
            f"learner: the policy of update {end.update} stays in {parts.endpoint.run_dir.path}, in memory until "
            f"this host is restarted: mend what was said above (for a full disk: make room in {run_folder}), then the "
            f"same command{resume} goes on from there and saves it"
        )
        return False

    # --- the state

    def restore(self, checkpoint: CheckpointReader, past: Past, version: int, is_lost: bool) -> None:
        """Take over the state of a checkpoint beside weights and tickets.

        Args:
            version: that the learner goes on with.
            is_lost: also what the trajectory store and the buffer held; else they lie in shared memory.
        """
        parts = self._parts
        checkpoint.load_optimizer(parts.optimizer)
        for name, state in past.plain["states"].items():
            if name in parts.others:
                parts.others[name].load_state_dict(state)
        if not is_lost or not parts.ranks.leads:
            return
        load_random_state(past.plain["random"])
        arrived = {t.unroll_id: t for t in parts.endpoint.receiver.drain(0.0)}
        parts.batches.load_state_dict(past.plain["batches"], {**past.settled, **arrived}, version)

    def _states(self) -> dict[str, Any]:
        return {name: part.state_dict() for name, part in self._parts.others.items()}

    def _state(self, tickets: Tickets, end: UpdateEnd) -> RankState:
        """Collect what a checkpoint holds."""
        rows, held = tickets
        parts = self._parts
        buffered = parts.batches.snapshot()
        records: dict[int, Callable[[], bytes | memoryview]] = dict(held)
        for t in buffered.buffer.trajectories:
            if t.unroll_id not in held:
                records[t.unroll_id] = partial(record_bytes, t)
        plain = {
            "states": self._states() if self._before is None else self._before,
            "batches": parts.batches.state_dict(buffered),
            "rows": np.array(rows, np.int64),
            "held": list(held),
            "random": random_state(),
            "bases": dict(parts.model.bases),
        }
        exports = parts.ranks.is_main and not parts.ranks.is_sharded and not is_adapted(parts.model.lm)
        return RankState(
            update=end.update,
            version=end.version,
            run_id=parts.endpoint.run_dir.run_id,
            minutes_used=end.seconds / 60,
            plain=plain,
            records=records,
            tensors=tensors_of(parts.model, parts.optimizer, parts.ranks.is_main, parts.ranks.exports),
            policy=dict(parts.model.policy_weights()) if exports else {},
            files=parts.model.config_files(parts.files) if exports else {},
            patience=end.patience,
            start=parts.model.start,
            export=self._merged_export(end.update),
        )

    def _merged_export(self, update: int) -> Callable[[], None] | None:
        """Return what writes the plain export of a policy with adapters, later; None where this rank writes none so."""
        parts = self._parts
        if not parts.ranks.is_main or parts.ranks.is_sharded or not is_adapted(parts.model.lm):
            return None
        try:
            return partial(self._export, update, parts.publisher.export.as_it_is(parts.files))
        except Exception as error:
            _say_no_export(update, error)
            return None


def _say_no_export(update: int, error: Exception) -> None:
    _say_failure(f"checkpoint {name_of(update)} has no {POLICY}/, but the run can go on from it", error)


def _say_failure(what: str, error: Exception) -> None:
    """Say what could not be written: to a full disk, as a rule. Of any other error the log has its place as well."""
    say(f"learner: {what}: {' '.join(str(error).split()) or type(error).__name__}")
    if not isinstance(error, OSError | SafetensorError):
        _log.error("the error came from here", exc_info=error)
