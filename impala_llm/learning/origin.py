"""Origin of a learner: the weights from which it continues, and their version.

They lie on a board in shared memory, in a checkpoint, or in the directory of the configured start.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch

from impala_llm.config import ConfigError
from impala_llm.engines.base import ModelRefused
from impala_llm.learning.cautions import cautions, other_value_head
from impala_llm.learning.checkpoints.files import (
    FOLDER,
    RESERVED,
    VERSIONS,
    CheckpointError,
    VersionMark,
    checkpoints,
    newest_whole,
    read_manifest,
    set_aside,
    update_of,
)
from impala_llm.learning.checkpoints.past import Past
from impala_llm.learning.checkpoints.reader import CheckpointReader
from impala_llm.learning.checkpoints.writer import POLICY
from impala_llm.learning.packing import LESS, memory_for, without_tensor_parallel
from impala_llm.learning.policy.attention_choice import choose_attention
from impala_llm.learning.policy.lora import add_adapters, load_adapters, without_prefix
from impala_llm.learning.policy.model import PolicyModel
from impala_llm.learning.policy.model_files import base_checksum, float32_bytes, model_checksum
from impala_llm.learning.policy.policy_files import resolve_policy
from impala_llm.learning.policy.products import give_back_memory
from impala_llm.learning.ranks.parallel import Ranks
from impala_llm.pipeline.weights.board import WeightReader
from impala_llm.processes.supervised import say
from impala_llm.settings import Config, LearnerConfig, model_directory, other_models

_NONE, _NONE_WHOLE = -1, -2
"""In place of a checkpoint's update, between ranks: there is no checkpoint; there are, and all are damaged."""


@dataclass(frozen=True)
class Origin:
    """Starting point of a learner: weights, version, and the state that belongs to them."""

    update: int
    version: int
    """Version of its first weights; if they are from a lost host's checkpoint, one that was never published."""
    board: WeightReader | None
    """Board with these weights; None: they are those of the checkpoint, or the configured start."""
    checkpoint: CheckpointReader | None
    """Newest undamaged checkpoint; at least the optimizer and the state of the trainer are read from it."""
    is_lost: bool
    """Whether shared memory is gone, and tickets, trajectories and replay come from the checkpoint, if there is one."""

    @property
    def begins(self) -> bool:
        """Whether it is the configured start."""
        return self.board is None and self.checkpoint is None

    def past(self, ranks: Ranks) -> Past | None:
        """Read what a rank had in the checkpoint; None where there is none."""
        if self.checkpoint is None:
            return None
        return Past.of(self.checkpoint, ranks.rank, ranks.world_size, self.version, self.is_lost)


def find_origin(run_folder: Path, newest: WeightReader | None, versions: VersionMark, ranks: Ranks) -> Origin:
    """Find the state from which the learner continues; rank 0 reports a checkpoint. All ranks call it.

    Args:
        newest: board with what an earlier learner of this run has left in shared memory.

    Raises:
        CheckpointError: the run has checkpoints, none of them is whole, and no board is left.
    """
    on_board = None if newest is None else newest.latest()
    update = _NONE
    if ranks.is_main:
        manifest, passed_over = newest_whole(run_folder)
        if manifest is not None:
            update = manifest.update
        elif passed_over and on_board is None:
            update = _NONE_WHOLE
        # As newest ones they would count among those that are kept, and new ones be removed at once.
        for path, reason in zip(checkpoints(run_folder), passed_over, strict=False):
            under = "" if update == _NONE_WHOLE else f", {set_aside(path)}"
            say(f"learner: checkpoint {reason}: it is passed over{under}")
    update = int(ranks.sum([float(update) if ranks.is_main else 0.0])[0])
    if update == _NONE_WHOLE:
        damaged = ", ".join(path.name for path in checkpoints(run_folder))
        raise CheckpointError(
            f"no checkpoint in {run_folder / FOLDER} is whole ({damaged}), and nothing of the run is left in shared "
            "memory: restore the files of one from a copy, or set another run.name, and another run.dir if you set one"
        )
    checkpoint = None
    if update >= 0:
        folder = next(path for path in checkpoints(run_folder) if update_of(path) == update)
        checkpoint = CheckpointReader(read_manifest(folder))
    if checkpoint is None and on_board is None and versions.reserved >= 0:  # it was lost before its first checkpoint
        return Origin(0, versions.unused(0), None, None, is_lost=True)
    if checkpoint is None or (on_board is not None and on_board >= checkpoint.manifest.version):
        version, ahead = on_board or 0, versions.ahead
        if versions.reserved < 0 and checkpoint is not None:  # versions.json is lost
            ahead = checkpoint.manifest.version - checkpoint.manifest.update
        return Origin(max(0, version - ahead), version, newest, checkpoint, is_lost=False)
    saved, is_lost = checkpoint.manifest, on_board is None
    version = versions.unused(saved.version) if is_lost else saved.version
    if ranks.is_main:
        if is_lost and versions.reserved < 0:
            say(
                f"learner: {run_folder / FOLDER / VERSIONS} is missing or damaged: {RESERVED} versions are left out, "
                "as many as are reserved at a time"
            )
        taken = f", as version {version}: numbers up to {version - 1} may have been published before"
        under = "" if version == saved.version else taken
        say(f"learner: going on from update {update}, checkpoint {saved.path}{under}")
        if saved.num_ranks != ranks.world_size and is_lost:
            say(
                f"learner: it is of learner.num_ranks={saved.num_ranks}: tickets, trajectories and replay are dealt "
                f"among {ranks.world_size} anew, and the order of random draws is another"
            )
    return Origin(update, version, None, checkpoint, is_lost)


def make_model(config: Config, origin: Origin, ranks: Ranks) -> PolicyModel:
    """Make the policy of a rank, with the weights of its origin, where it computes. All ranks call it.

    Raises OutOfMemory where the device does not hold it, and ModelRefused where it cannot be trained.
    """
    checkpoint, is_on_board = origin.checkpoint, origin.board is not None
    beside = checkpoint.manifest.path.name if checkpoint is not None and is_on_board else None
    on_device = partial(
        memory_for, f"model.path={config.model.path} on {ranks.device}", _less_of_policy(config.learner)
    )
    refused: ModelRefused | None = None
    # Processes that divide each matrix hold all of the policy until they join.
    is_cut = config.learner.tensor_parallel == 1
    with ranks.in_turns(float32_bytes(config.model.path) if is_cut else 0):
        model = start_model(config, origin.board, origin.update, ranks.is_main, beside)
        if ranks.is_sharded and ranks.is_main:  # whole, in the host's memory, as a device may not hold it
            try:
                model.check(config.engine.max_length)
            except ModelRefused as error:
                refused = error
        with on_device():
            ranks.cut(model, config.learner.precision)
        give_back_memory()  # glibc keeps the pages of small matrices, which the next one needs
    if ranks.is_sharded:
        reasons = ranks.gather({"refused": [str(refused or "")]}, of_processes=True)
        if reason := reasons[0]["refused"][0]:
            raise ModelRefused(reason) from refused
    _note_bases(model, config, checkpoint, ranks.is_main)
    with on_device():
        ranks.join(model)
        # A checkpoint of the board's version has the full precision, which a narrower type on the board may lack, even
        # if only earlier settings had that type.
        if checkpoint is not None and (not is_on_board or checkpoint.manifest.version == origin.version):
            checkpoint.load_model(model)
        if not ranks.is_sharded:
            model.check(config.engine.max_length)
    choose_attention(model, config.learner, config.engine.max_length, ranks)
    if ranks.is_main:
        describe(config, ranks, model, origin)
    return model


def _note_bases(model: PolicyModel, config: Config, checkpoint: CheckpointReader | None, is_main: bool) -> None:
    """Note what the policy's training rests on. Raises ConfigError where a checkpoint's rests on something else."""
    model.bases = base_checksums(config)
    if checkpoint is not None and checkpoint.manifest.start is not None:
        model.start = checkpoint.manifest.start  # the directory may hold other weights by now
    elif is_main and (directory := model_directory(config.model.path)) is not None:
        model.start = model_checksum(directory)
    if checkpoint is not None and model.bases:
        _compare_bases(model.bases, checkpoint)


def _less_of_policy(learner: LearnerConfig) -> str:
    """Fix for a process whose device does not hold its part of the policy."""
    also = without_tensor_parallel(learner.tensor_parallel)
    fix = f"learner.sharding=fsdp2{also} with more ranks (there also learner.cpu_offload=true)"
    if learner.sharding == "fsdp2":
        offload = "" if learner.cpu_offload else "learner.cpu_offload=true or "
        fix = f"{offload}more than learner.num_ranks={learner.num_ranks}"
    return f"set {fix}, or {LESS}"


def base_checksums(config: Config) -> dict[str, int]:
    """Checksums of the weights that stay as they are while the policy learns: those under adapters, of a reference and
    of a teacher. Their keys are the settings that name them, with their values."""
    algorithm = config.algorithm
    paths = {f"{key}={path}": model_directory(path) for key, path in other_models(config).items()}
    if config.model.lora.rank or (algorithm.uses_reference and algorithm.reference is None):
        paths[f"model.path={config.model.path}"] = resolve_policy(config)
    return {word: base_checksum(directory) for word, directory in paths.items() if directory is not None}


def _compare_bases(bases: Mapping[str, int], checkpoint: CheckpointReader) -> None:
    """Raise ConfigError where such weights differ from those that a checkpoint was trained with."""
    before, folder = checkpoint.plain(0)["bases"], checkpoint.manifest.path
    # The start of a run may lie in another directory by now, or be spelt otherwise.
    start = next((number for word, number in before.items() if word.startswith("model.path=")), None)
    for word, base in bases.items():
        if (start if word.startswith("model.path=") else before.get(word)) not in (None, base):
            raise ConfigError(
                f"{word} has other weights than those that checkpoint {folder.name} was trained with, under its "
                "adapters, as its reference or as its teacher: put these back, or train its policy further with "
                f"model.path={folder / POLICY} and another run.name, and another run.dir if you set one"
            )


def start_model(
    config: Config, newest: WeightReader | None, update: int = 0, is_main: bool = True, checkpoint: str | None = None
) -> PolicyModel:
    """The policy to continue with.

    Args:
        newest: board with what a killed learner published or kept last; None: the configured start.
        update: of the run, that made it.
        is_main: whether this rank reports where it continues from.
        checkpoint: name of the one that the optimizer comes from; None: it begins anew.
    """
    sizes = (config.model.value_hidden_size, config.model.value_trunk_gradient)
    if newest is None:
        model = PolicyModel.from_pretrained(resolve_policy(config), *sizes)
        add_adapters(model.lm, config.model.lora)
        return model
    with newest.lease() as lease:
        _, of_adapters = without_prefix(lease.extra())
        # The weights on the board have the adapters merged.
        model = PolicyModel.from_pretrained(resolve_policy(config) if of_adapters else lease.path, *sizes)
        add_adapters(model.lm, config.model.lora)
        if of_adapters and not load_adapters(model.lm, of_adapters):
            raise ConfigError(
                f"model.lora.rank={config.model.lora.rank} with these targets does not fit the adapters of update "
                f"{update}, which this run goes on from: leave model.lora as it was, or set another run.name"
            )
        anew = "the optimizer begins" if model.load_value_head(lease.extra()) else "optimizer and value head begin"
        is_rounded = not of_adapters and "BF16" in {dtype for dtype, _, _ in lease.tensors(verify=False).values()}
        if is_main:
            if is_rounded:
                say(
                    f"learner: update {update} lies on the board in bfloat16: unless a checkpoint has it, its "
                    "weights are rounded; pipeline.weights_dtype=float32 avoids that"
                )
            rest = f"{anew} anew" if checkpoint is None else f"the optimizer is that of checkpoint {checkpoint}"
            say(f"learner: going on from update {update}, in shared memory; {rest}")
        return model


def board_dtype(config: Config) -> torch.dtype | None:
    """Type of the weights on the board for engines; None: the learner's."""
    return torch.bfloat16 if config.publishes_bfloat16 else None


def describe(config: Config, ranks: Ranks, model: PolicyModel, origin: Origin) -> None:
    """Say what is trained, and what about it may go wrong."""
    for caution in [*cautions(config, model), *(other_value_head(config, model) if origin.begins else [])]:
        say(f"learner: {caution}")
    size = sum(p.numel() for p in model.lm.parameters())
    learning = sum(p.numel() for p in model.lm.parameters() if p.requires_grad)
    of_them = f", {learning:,} of them learn" if learning < size else ""
    print(
        f"learner: {config.model.path}, {size:,} parameters{of_them} on {ranks.device}, at update {origin.update}",
        flush=True,
    )
