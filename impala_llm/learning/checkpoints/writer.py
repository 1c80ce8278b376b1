"""Checkpoints of the learner: all that it needs to go on, written in the background. Read by reader.py.

A checkpoint has two kinds of state. Tensors (weights, moments) are large and change with each optimizer step: a thread
copies them to host memory while the learner goes on, and the learner waits for the copy before it changes them. All
else (tickets, trajectories, replay, control, random numbers) is taken at the moment of the call.

Nothing is pickled. torch.distributed.checkpoint pickles its metadata and, over several ranks, its plans; here each rank
writes what it holds in safetensors, of tensors that are shared its shares, and the manifest says where each piece lies
in the whole. So any number of ranks can read what any other number has written. Ranks meet in the folder and not in
collectives: they can also write it while they are being ended.

Invariant: a checkpoint that cannot be written leaves the earlier ones as they are, and the run goes on.
"""

import logging
import shutil
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import msgpack
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from impala_llm.learning.checkpoints.arrays import pack
from impala_llm.learning.checkpoints.files import (
    FOLDER,
    MANIFEST,
    NEW,
    REPLACED,
    CheckpointError,
    CheckpointManifest,
    Part,
    VersionMark,
    best_of,
    checksum,
    manifest_bytes,
    mark_best,
    name_of,
    read_manifest,
    remove_unfinished,
    retire_old,
    sync,
    update_of,
    write_file,
)
from impala_llm.learning.checkpoints.files import checkpoints as folders_of
from impala_llm.learning.checkpoints.parts import Written, write_tensors
from impala_llm.learning.checkpoints.policy_folders import put_policies_back, remove_folder
from impala_llm.learning.optim import Optimizer
from impala_llm.learning.policy.model import PolicyModel
from impala_llm.learning.ranks.parallel import is_shared
from impala_llm.processes.supervised import say

_log = logging.getLogger(__name__)
POLICY = "policy"
_WEIGHTS = f"{POLICY}/model.safetensors"
_RANKS_TIMEOUT_S = 120.0
"""Seconds that rank 0 waits for what the others write."""
_POLL_S = 0.02


@dataclass(frozen=True)
class RankState:
    """State of a rank at the end of an update.

    Attributes:
        update, version, run_id, minutes_used, patience, start: see `Manifest`.
        plain: numbers, strings, lists, dicts and arrays.
        records: trajectories by `unroll_id`, each as a function that returns its bytes; cleared once they are copied.
        tensors: that this rank alone writes, or its share of; by name. They are copied later.
        policy: weights of the plain Hugging Face export, by the names there; of rank 0 alone.
        files: of the export beside its weights, by name.
        export: writes the export in place of both, where `Checkpointer.export_folder` says.
    """

    update: int
    version: int
    run_id: int
    minutes_used: float
    plain: Mapping[str, Any]
    records: dict[int, Callable[[], bytes | memoryview]]
    tensors: Mapping[str, Tensor]
    policy: Mapping[str, Tensor] = field(default_factory=dict)
    files: Mapping[str, bytes] = field(default_factory=dict)
    patience: int = 0
    start: int | None = None
    export: Callable[[], None] | None = None


def tensors_of(model: PolicyModel, optimizer: Optimizer, is_main: bool, exports: bool = True) -> dict[str, Tensor]:
    """Weights that learn, and their moments, that a process has to save: of those that all hold alike, rank 0.

    Args:
        exports: whether no process before this one holds the same shares.
    """
    found = {f"model.{name}": tensor for name, tensor in learned(model).items()}
    found |= {f"optimizer.{name}": tensor for name, tensor in optimizer.state_dict().items()}
    return {name: t.detach() for name, t in found.items() if is_main or (exports and is_shared(t))}


def learned(model: PolicyModel) -> dict[str, Tensor]:
    """Tensors of a model but those that stay as they were at its start, beside adapters."""
    state = model.state_dict(keep_vars=True)
    return {name: t.detach() for name, t in state.items() if t.requires_grad or not isinstance(t, nn.Parameter)}


def random_state() -> dict[str, Any]:
    """State of torch's generators, of the CPU and the GPU in use."""
    found = {"cpu": torch.get_rng_state().numpy()}
    if torch.cuda.is_available():
        found["cuda"] = torch.cuda.get_rng_state().numpy()
    return found


def load_random_state(state: Mapping[str, Any]) -> None:
    """Restore `random_state`, as far as the devices are there."""
    torch.set_rng_state(torch.from_numpy(state["cpu"].copy()))
    if "cuda" in state and torch.cuda.is_available():
        torch.cuda.set_rng_state(torch.from_numpy(state["cuda"].copy()))


class Stateful(Protocol):
    """A part of the learner with a state of plain numbers, strings, lists, dicts and arrays."""

    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state: Mapping[str, Any]) -> object: ...


class Checkpointer:
    """Writes the checkpoints of a run. One for each rank, for one thread.

    Args:
        run_folder: `run.dir`.
        num_kept: newest checkpoints that stay; 0: none is written.
        rank: of this process; from `num_ranks` on it shares one with another process.
        num_processes: that write; None: one for each rank.
        is_taken: whether another learner has the folder by now: then nothing is written there any more.
    """

    def __init__(
        self,
        run_folder: Path,
        num_kept: int,
        rank: int = 0,
        num_ranks: int = 1,
        num_processes: int | None = None,
        is_taken: Callable[[], bool] = lambda: False,
    ) -> None:
        self._is_taken = is_taken
        self._run_folder, self._num_kept = run_folder, num_kept
        self._folder = run_folder / FOLDER
        self._rank, self._num_ranks, self._num_processes = rank, num_ranks, num_processes or num_ranks
        self._thread: threading.Thread | None = None
        self._is_copied = threading.Event()
        self._is_copied.set()
        self._is_written = False
        self._best: int | None = None
        self._wants_best = False
        self._passed_over: set[str] = set()
        """Names of damaged checkpoints that cannot be set aside."""
        self._names = threading.Lock()
        """Held while the best one is marked, or old ones lose their names: what is marked is there."""
        self.versions = VersionMark(self._folder)

    @property
    def is_on(self) -> bool:
        return self._num_kept > 0

    @property
    def is_busy(self) -> bool:
        """Whether a checkpoint is being written."""
        return self._thread is not None and self._thread.is_alive()

    @property
    def has_failed(self) -> bool:
        """Whether the last checkpoint that was begun could not be written."""
        return self._thread is not None and not self.is_busy and not self._is_written

    @property
    def is_wanted(self) -> bool:
        """Whether a checkpoint should be written soon: the best policy so far is in none.

        After a checkpoint that could not be written it is False, so that a full disk is not tried at each update: the
        next checkpoint that is due by time or number holds that policy.
        """
        return self._wants_best and not self.is_busy and not self.has_failed

    def begin(self) -> None:
        """Remove what a process that died amid a checkpoint left, and say so; put back a policy that it was replacing.
        On rank 0, before others write."""
        put_policies_back(self._run_folder)
        for path in remove_unfinished(self._run_folder):
            end = f"stays: {path} cannot be removed" if path.exists() else "is removed"
            say(f"learner: checkpoint {path.stem} is half-written, since its learner died, and {end}")

    def went_on_from(self, update: int) -> None:
        """Note the update of the checkpoint that the run goes on from: later ones were passed over. -1: all of them."""
        self._passed_over = {path.name for path in folders_of(self._run_folder) if update_of(path) > update}

    def remove_parts(self) -> None:
        """Remove what ranks have left of checkpoints that failed. On rank 0, while no rank writes one."""
        remove_unfinished(self._run_folder)

    def export_folder(self, update: int) -> Path:
        """Folder in which ranks that share the policy put its plain export before they call `save`."""
        return self._folder / (name_of(update) + NEW) / POLICY

    def save(self, state: RankState) -> bool:
        """Begin to write a checkpoint. Its tensors must not change before `wait_until_copied` has returned.

        Returns:
            Whether it was begun: not while another is being written, nor where checkpoints are off.
        """
        if not self.is_on or self.is_busy:
            return False
        self._is_copied.clear()
        self._is_written = False
        self._thread = threading.Thread(target=self._write, args=(state,), name="checkpoint", daemon=True)
        self._thread.start()
        return True

    def wait_until_copied(self) -> None:
        """Return once tensors may change again."""
        self._is_copied.wait()

    def wait(self) -> bool:
        """Return once nothing is being written. Returns whether the last checkpoint that was begun is on the disk."""
        if self._thread is not None:
            self._thread.join()
        return self._is_written

    def mark_best(self, version: int, update: int) -> None:
        """Keep the checkpoint of this version, and no longer the one that was the best before. On rank 0.

        Where there is none of this version the next one counts, and one is written soon, unless one of a later update
        is marked already. A refusal is only said. A repeated call changes nothing.

        Args:
            update: of the run, that made the version.
        """
        with self._names:
            self._best, self._wants_best = version, False
            try:
                for path in folders_of(self._run_folder):
                    with suppress(CheckpointError):
                        if read_manifest(path).version == version:
                            mark_best(self._run_folder, path.name)
                            return
            except OSError as error:
                self._say_unmarked(error)
                return
            marked = best_of(self._run_folder)
            self._wants_best = self.is_on and (marked is None or update_of(Path(marked)) < update)

    def mark_best_if_wanted(self, name: str, version: int) -> None:
        """Mark a checkpoint as the best one, where the best policy so far is in none. On rank 0."""
        with self._names:
            # One that was being written when a later version turned out to be the best is not it.
            if self._wants_best and self._best is not None and version >= self._best:
                self._wants_best = False
                try:
                    mark_best(self._run_folder, name)
                except OSError as error:
                    self._say_unmarked(error)

    # --- the thread

    def _write(self, state: RankState) -> None:
        target = self._folder / name_of(state.update)
        aside = target.with_name(target.name + NEW)
        try:
            try:
                copied = _Copied(state)
            finally:
                self._is_copied.set()
            self._check_owner()
            if self._rank == 0:
                # Parts that other ranks have written of a checkpoint that failed.
                remove_unfinished(self._run_folder, but=aside)
            aside.mkdir(parents=True, exist_ok=True)
            mine = self._write_part(state, copied, aside)
            del copied
            if self._rank == 0:
                self._finish(state, mine, aside, target)
            self._is_written = True
        except Exception as error:  # a full disk, as a rule; whatever it is, the run goes on
            if self._rank == 0 and not self._is_taken():
                shutil.rmtree(aside, ignore_errors=True)
            reason = " ".join((error.strerror if isinstance(error, OSError) and error.strerror else str(error)).split())
            kept = next((p.name for p in folders_of(self._run_folder) if p.name not in self._passed_over), None)
            stays = f"{kept} stays the newest" if kept else "there is none yet"
            say(f"learner: checkpoint {target.name} cannot be written to {self._folder} ({reason}): {stays}")
            if not isinstance(error, OSError | CheckpointError):
                _log.exception("a checkpoint could not be written")

    def _write_part(self, state: RankState, copied: "_Copied", aside: Path) -> Written:
        """Write the files of this rank."""
        written = Written()
        prefix = f"rank-{self._rank}"
        exported = aside / POLICY
        if state.export is not None:
            state.export()
        if state.policy:
            exported.mkdir()
            for name, content in state.files.items():
                written.files[f"{POLICY}/{name}"] = write_file(aside / POLICY / name, [content])
            named = {key: (key, t) for key, t in copied.policy.items()}
            written.files[_WEIGHTS] = write_tensors(aside / _WEIGHTS, named)
        elif self._rank == 0 and exported.is_dir():  # by `state.export`, or by all ranks together
            for path in exported.rglob("*"):
                sync(path)
                if (found := checksum(path)) is not None:
                    written.files[str(path.relative_to(aside))] = found
        own = {name: (name, t) for name, t in copied.tensors.items() if name not in copied.exported}
        written.files[f"{prefix}.safetensors"] = write_tensors(aside / f"{prefix}.safetensors", own)
        for name, offsets in copied.offsets.items():
            file, key = (
                (_WEIGHTS, copied.exported[name]) if name in copied.exported else (f"{prefix}.safetensors", name)
            )
            written.tensors[name] = [Part(file, key, offsets)]
        written.files[f"{prefix}.records"] = write_file(aside / f"{prefix}.records", copied.records.values())
        index = [[number, len(record)] for number, record in copied.records.items()]
        packed = msgpack.packb({**state.plain, "records": index}, default=pack)
        written.files[f"{prefix}.msgpack"] = write_file(aside / f"{prefix}.msgpack", [packed])
        if self._rank:
            write_file(aside / f"{prefix}.json", [written.to_bytes()])
        return written

    def _finish(self, state: RankState, written: Written, aside: Path, target: Path) -> None:
        """Write the manifest once all ranks have written theirs, give the checkpoint its name, and remove old ones."""
        deadline = time.monotonic() + _RANKS_TIMEOUT_S
        for rank in range(1, self._num_processes):
            path = aside / f"rank-{rank}.json"
            while not path.exists():
                if time.monotonic() > deadline:
                    raise CheckpointError(f"rank {rank} has not written its part for {_RANKS_TIMEOUT_S:.0f} s")
                time.sleep(_POLL_S)
            written.add(path.read_bytes())
            path.unlink()
        tensors = {name: tuple(parts) for name, parts in written.tensors.items()}
        facts = (state.update, state.version, state.run_id, self._num_ranks, state.minutes_used)
        manifest = CheckpointManifest(aside, *facts, written.files, tensors, state.patience, state.start)
        write_file(aside / MANIFEST, [manifest_bytes(manifest)])
        for folder in (aside / POLICY, aside):
            if folder.is_dir():
                sync(folder)
        # A learner that went on from a checkpoint and ended at once writes one of the same update again.
        self._check_owner()
        replaced = target.with_name(target.name + REPLACED)
        if target.exists():
            target.rename(replaced)
        aside.rename(target)
        sync(self._folder)
        remove_folder(replaced)
        self.mark_best_if_wanted(target.name, state.version)
        self._passed_over.discard(target.name)
        with self._names:
            retired, failed = retire_old(self._run_folder, self._num_kept, self._passed_over)
        for path in retired:  # may take long: meanwhile the learner's thread can mark the best one
            remove_folder(path)
        for reason in failed:
            say(f"learner: checkpoint {reason}: remove it by hand, or let this user do so")

    def _check_owner(self) -> None:
        """This process may have been frozen, or cut off from the folder, since the checkpoint was begun."""
        if self._is_taken():
            raise CheckpointError("another learner has taken the run's folder")

    def _say_unmarked(self, error: OSError) -> None:
        say(
            f"learner: the best checkpoint cannot be marked in {self._folder} ({error.strerror}), and goes as others "
            "do: let this user make links there"
        )


class _Copied:
    """Copy of a state's tensors and records in host memory; each piece of memory is copied once."""

    def __init__(self, state: RankState) -> None:
        copies: dict[tuple[object, ...], Tensor] = {}
        keys: dict[tuple[object, ...], str] = {}

        def copy(tensor: Tensor) -> tuple[tuple[object, ...], Tensor]:
            local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
            memory = (local.device, local.data_ptr(), local.dtype, tuple(local.shape), local.stride())
            if local.numel() == 0 or memory not in copies:
                copies[memory] = local.to("cpu", copy=True).contiguous()
            return memory, copies[memory]

        self.policy: dict[str, Tensor] = {}
        self.tensors: dict[str, Tensor] = {}
        self.exported: dict[str, str] = {}
        """Tensors that the export holds already: name -> its key there."""
        self.offsets: dict[str, tuple[int, ...]] = {}
        for key, tensor in state.policy.items():
            memory, self.policy[key] = copy(tensor)
            keys[memory] = key
        for name, tensor in state.tensors.items():
            memory, self.tensors[name] = copy(tensor)
            if memory in keys and not isinstance(tensor, DTensor):
                self.exported[name] = keys[memory]
            self.offsets[name] = offsets_of(tensor)
        self.records = {number: bytes(read()) for number, read in state.records.items()}
        state.records.clear()  # their space in the trajectory store is wanted


def offsets_of(tensor: Tensor) -> tuple[int, ...]:
    """Where this rank's share of a tensor begins."""
    if not isinstance(tensor, DTensor):
        return (0,) * tensor.ndim
    _, offsets = compute_local_shape_and_global_offset(tensor.shape, tensor.device_mesh, tensor.placements)
    return tuple(offsets)
