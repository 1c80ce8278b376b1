"""Warm start: a policy, and its value head, learn from demonstrations before any episode is played.

    demonstrations → rows → micro-batches → forward → log-likelihood of what was said, returns → step → repeat

Forward, precision, activation checkpointing, budget of micro-batches, clip, optimizer, schedule and checkpoints are the
learner's. There is no pipeline: no actors, no tickets, no versions. One process learns, on one device.

Invariant: run.seed and the number of an update determine its rows, so a warm start that continues from its last
checkpoint is the same as one that was not interrupted.
"""

import os
import shlex
import shutil
import signal
import sys
import time
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path

import numpy as np
import torch
from safetensors import SafetensorError

from impala_llm.config import ConfigError, to_yaml
from impala_llm.demonstrations import DemonstrationError
from impala_llm.engines.base import ModelRefused
from impala_llm.envs.webshop.learned_catalogues import with_learned
from impala_llm.imitation import Imitation
from impala_llm.learning.cautions import other_value_head, slow_precision
from impala_llm.learning.checkpoints.files import CheckpointError, checkpoints, newest_whole, set_aside
from impala_llm.learning.checkpoints.folder_owner import FILE, FolderOwner, wait_for_owner
from impala_llm.learning.checkpoints.policy_folders import put_policies_back, replace_folder
from impala_llm.learning.checkpoints.reader import CheckpointReader
from impala_llm.learning.checkpoints.writer import Checkpointer, RankState, tensors_of
from impala_llm.learning.packing import LESS, OutOfMemory, memory_for
from impala_llm.learning.policy.attention_choice import choose_attention
from impala_llm.learning.policy.lora import add_adapters, is_adapted
from impala_llm.learning.policy.model import PolicyModel, policy_files
from impala_llm.learning.policy.model_files import base_checksum
from impala_llm.learning.policy.policy_files import resolve_policy
from impala_llm.learning.policy.products import prepare_cpu, prepare_cuda
from impala_llm.learning.policy_export import PolicyExport
from impala_llm.learning.ranks.parallel import Ranks
from impala_llm.observability.metrics import MetricLog
from impala_llm.observability.writers import MetricWriter
from impala_llm.processes.cgroups import thread_limit
from impala_llm.processes.compiled_code import keep_compiled_code
from impala_llm.processes.stop_signals import StopSignals
from impala_llm.processes.supervised import say
from impala_llm.settings import Config, written
from impala_llm.sft_data import Data, load_data
from impala_llm.sft_settings import changed, check_facts, check_folder, facts, keep
from impala_llm.trajectory import Trajectory
from impala_llm.writable_folders import removed_if_refused, try_to_write, writing_to

STATE = "state"
"""Folder of the checkpoints in `sft.dir`. Not those of a run: a run that finds its own there continues from them."""
_SAY_EVERY_S = 10.0


class NotSaved(Exception):
    """The disk refused the policy. The message says what is kept."""


class WarmStart:
    """A warm start with its folder: updates, measurements, checkpoints, result.

    Args:
        data: to learn from.
        policy: directory that it starts from.
        owner: keeps the folder.
        stack: what is to be undone at the end.
        stops: signals of this process; they wait for the end of a change of the weights, however long it takes.
    """

    def __init__(
        self, config: Config, data: Data, policy: Path, owner: FolderOwner, stack: ExitStack, stops: StopSignals
    ) -> None:
        self.config, self.data, self.stops = config, data, stops
        sft = config.sft
        self.folder = Path(sft.dir)
        self.owner = owner
        self.files = with_learned(policy_files(policy), data.catalogues)
        base = base_checksum(policy) if config.model.lora.rank else None
        self.facts = facts(config, data.checksum, base)
        self.log = MetricLog()
        self.ranks = Ranks(config.model.device, environment={})  # in a pod too, whose variables name several
        torch.manual_seed(config.run.seed)
        model = PolicyModel.from_pretrained(policy, config.model.value_hidden_size, config.model.value_trunk_gradient)
        add_adapters(model.lm, config.model.lora)
        with memory_for(f"model.path={config.model.path} on {self.ranks.device}", LESS):
            self.ranks.place(model)
            model.check(config.engine.max_length)
        choose_attention(model, config.learner, config.engine.max_length, self.ranks)
        self.imitation = Imitation(config, model, self.ranks, self.log)
        self.per_epoch = -(-len(data.learned) // sft.batch_size)
        self.total = sft.epochs * self.per_epoch
        if sft.max_updates is not None:
            self.total = min(self.total, sft.max_updates)
        self.update, self.used_s = 0, 0.0
        self.measured = self.told = 0
        """Updates after which the losses were last measured, and written."""
        self.is_changing = False
        """Whether the weights are being changed."""
        self.are_settings_kept = False
        stops.holds_back = stops.waits_on = lambda: self.is_changing
        self.checkpointer = Checkpointer(self.folder / STATE, max(1, config.learner.checkpoints_kept))
        self.checkpointer.begin()
        put_policies_back(self.folder)
        self.go_on()
        self.export = PolicyExport(model, self.ranks)
        self.writer = stack.enter_context(
            MetricWriter(self.folder / "tensorboard", config.run.metric_writers, self.update)
        )
        self.writer.write_text("settings", to_yaml(config))
        self.began_at = self.said_at = self.saved_at = time.monotonic()
        self.tokens_since = 0
        size = sum(p.numel() for p in model.lm.parameters())
        within = "" if sft.max_minutes is None else f" or {sft.max_minutes:g} minutes, whichever are over first"
        say(
            f"sft: {config.model.path}, {size:,} parameters on {self.ranks.device}, learns from {len(data.learned)} "
            f"demonstrations in {self.total} updates{within}; {len(data.held_out)} are held out"
        )

    @property
    def seconds(self) -> float:
        """Time for which the policy has learned, restarts included."""
        return self.used_s + time.monotonic() - self.began_at

    @property
    def progress(self) -> float:
        """Share that is over, by updates or by time, whichever is further."""
        return self.share(self.update, self.seconds)

    def share(self, updates: int, seconds: float) -> float:
        """Return the share that is over after so many updates and so much time."""
        share, minutes = updates / self.total, self.config.sft.max_minutes
        return min(1.0, share if minutes is None else max(share, seconds / 60 / minutes))

    def run(self) -> None:
        """Learn to the end, and save the result."""
        if self.update == 0:
            self.measure()
        while self.progress < 1.0:
            self.step()
        if self.measured < self.update:
            self.measure()
        if self.told < self.update:
            self.tell()
        unsaved = self.save()
        policy = self.folder / "policy"
        say(f"sft: the policy is saved in {policy}: train it with {shlex.quote(f'model.path={policy}')}")
        if unsaved:
            say(f"sft: {unsaved}")

    def step(self) -> None:
        """One update, and what is due after it."""
        self.owner.check()
        rows = self.batch(self.update)
        progress = self.progress
        self.imitation.accumulate(rows)
        self.checkpointer.wait_until_copied()
        self.is_changing = True
        self.imitation.step(self.update, progress)
        self.update += 1
        self.keep_settings()
        self.is_changing = False
        self.tokens_since += sum(row.num_tokens for row in rows)
        self.stops.check()
        if self.update % self.config.sft.held_out_every == 0:
            self.measure()
        minutes, every = self.config.learner.checkpoint_minutes, self.config.learner.checkpoint_every
        is_late = minutes is not None and time.monotonic() - self.saved_at >= 60 * minutes
        is_due = is_late or (every and self.update % every == 0)
        if self.config.learner.checkpoints_kept and self.progress < 1.0 and is_due:
            self.checkpoint()
        if time.monotonic() - self.said_at >= _SAY_EVERY_S:
            self.tell()

    def batch(self, update: int) -> list[Trajectory]:
        """The demonstrations of an update."""
        epoch, index = divmod(update, self.per_epoch)
        order = np.random.default_rng((self.config.run.seed, epoch)).permutation(len(self.data.learned))
        size = self.config.sft.batch_size
        return [self.data.learned[i] for i in order[index * size : (index + 1) * size]]

    def measure(self) -> None:
        """Write and say the losses of what is held out."""
        if self.data.held_out:
            self.imitation.measure(self.data.held_out)
            self.tell()
        self.measured = self.update

    def tell(self) -> None:
        """Write and say what has been logged since the last time."""
        now = time.monotonic()
        if self.update:
            self.log.add("sft/epoch", self.update / self.per_epoch)
            self.log.add("sft/tokens_per_s", self.tokens_since / max(1e-9, now - self.said_at))
        self.log.add("progress/seconds", self.seconds)
        found = self.log.flush()
        self.writer.write(self.update, found)
        names = {"loss": "loss", "held_out_loss": "held out", "value_loss": "value loss"}
        parts = [f"{said} {found[f'sft/{name}']:.4f}" for name, said in names.items() if f"sft/{name}" in found]
        if self.update:
            parts.append(f"{found['sft/tokens_per_s']:,.0f} tokens/s")
        say(f"sft: update {self.update} ({self.progress:.0%}): {', '.join(parts)}")
        self.said_at, self.tokens_since, self.told = now, 0, self.update

    # --- settings, checkpoints and result

    def keep_settings(self) -> None:
        """Write the settings into the folder, the first time that this is called."""
        if not self.are_settings_kept:
            keep(self.config)
            self.are_settings_kept = True

    def go_on(self) -> None:
        """Take over the newest checkpoint of the folder, if there is one."""
        manifest, passed_over = newest_whole(self.folder / STATE)
        if manifest is None and passed_over:
            raise CheckpointError(
                f"no checkpoint in {self.folder / STATE} is whole ({'; '.join(passed_over)}): restore the files of one "
                "from a copy, or set another sft.dir"
            )
        if manifest is None:
            return
        checkpoint = CheckpointReader(manifest)
        plain = checkpoint.plain(0)
        check_facts(self.config, plain["facts"], self.facts)
        if manifest.update > self.total:
            key = "max_updates" if self.total == self.config.sft.max_updates else "epochs"
            raise ConfigError(
                f"sft.{key}={getattr(self.config.sft, key)} ends after {self.total} updates, and sft.dir={self.folder} "
                f"has learned in {manifest.update} updates already: set it to at least as many, or another sft.dir"
            )
        others = changed(self.config)
        if others and self.share(manifest.update, 60 * manifest.minutes_used) >= 1.0:
            raise ConfigError(
                f"sft.dir={self.folder} holds a warm start that has finished, and would learn nothing with "
                f"{'; '.join(others)}: set another sft.dir, or remove the folder"
            )
        # As newest ones they would count among those that are kept, and new ones be removed at once.
        for path, reason in zip(checkpoints(self.folder / STATE), passed_over, strict=False):
            say(f"sft: checkpoint {reason}: it is passed over, {set_aside(path)}")
        self.checkpointer.went_on_from(manifest.update)
        checkpoint.load_model(self.imitation.model)
        checkpoint.load_optimizer(self.imitation.optimizer)
        self.imitation.budget.load_state_dict(plain["budget"])
        self.update, self.used_s = manifest.update, 60 * manifest.minutes_used
        self.measured = self.told = self.update
        say(f"sft: going on from update {self.update}, checkpoint {manifest.path}")
        if others:
            say(f"sft: going on with {'; '.join(others)}")

    def checkpoint(self) -> None:
        """Begin to write a checkpoint of the last update that is over."""
        model = self.imitation.model
        exports = not is_adapted(model.lm)
        state = RankState(
            update=self.update,
            version=self.update,
            run_id=0,
            minutes_used=self.seconds / 60,
            plain={"facts": self.facts, "budget": self.imitation.budget.state_dict()},
            records={},
            tensors=tensors_of(model, self.imitation.optimizer, is_main=True),
            policy=dict(model.policy_weights()) if exports else {},
            files=model.config_files(self.files) if exports else {},
        )
        if self.checkpointer.save(state):
            self.saved_at = time.monotonic()

    def save(self) -> str:
        """Write the last checkpoint, and then the policy, so that whatever is wrong with that loses nothing.

        Returns:
            A sentence where the checkpoint could not be written; empty where it is on the disk.

        Raises:
            NotSaved: the disk refuses the policy.
        """
        self.checkpointer.wait()
        self.checkpoint()
        unsaved = "" if self.checkpointer.wait() else self._unsaved()
        target = self.folder / "policy"
        aside = target.with_name(f"{target.name}.new-{os.getpid()}")
        try:
            self.export.save(aside, self.files)
            replace_folder(aside, target)
        except (OSError, SafetensorError) as error:
            then = unsaved or "when that is mended, the same command saves it from the last checkpoint"
            raise NotSaved(f"sft.dir={self.folder}: the policy cannot be saved: {error}: {then}") from None
        finally:
            shutil.rmtree(aside, ignore_errors=True)
        return unsaved

    def _unsaved(self) -> str:
        """Sentence on a last update that no checkpoint on the disk has; empty where one has it."""
        kept = newest_whole(self.folder / STATE)[0]
        if kept is not None and kept.update == self.update:
            return ""
        then = "begins anew" if kept is None else f"goes on from update {kept.update}"
        return (
            f"update {self.update} could not be saved: the same command {then}; make room in sft.dir={self.folder} "
            "before it"
        )


def warm_start(config: Config, folders: Sequence[Path]) -> Path:
    """Run a warm start, or continue it. Returns the directory of the policy.

    Raises:
        ConfigError, DemonstrationError, CheckpointError: it cannot begin.
        NotSaved: the disk refused the policy.
        KeyboardInterrupt, SystemExit: it was told to stop, and what was learned is saved, or what is not was said.
    """
    policy = resolve_policy(config)
    folder = Path(config.sft.dir)
    check_folder(folder)
    lost = wait_for_owner(folder, say, "end it first, or set another sft.dir")
    with ExitStack() as stack:
        stack.enter_context(removed_if_refused(folder, FILE))
        with writing_to(f"sft.dir={folder}"):
            try_to_write(folder)
        owner = stack.enter_context(FolderOwner(folder, lost=lost))  # before minutes of reading
        try:
            data = load_data(config, policy, folders)
        except DemonstrationError as error:
            key, value = ("sft.data", config.sft.data) if config.sft.data else ("demonstrations.dir", folders[0])
            raise DemonstrationError(f"{key}={written(value)}: {error}") from None
        stops = StopSignals()
        warm = WarmStart(config, data, policy, owner, stack, stops)
        if warm.update == 0:  # else once an update was made with them
            with writing_to(f"sft.dir={folder}"):
                warm.keep_settings()
        model = warm.imitation.model
        for caution in [*slow_precision(config, model.lm.device), *other_value_head(config, model)]:
            say(f"sft: {caution}")
        try:
            warm.run()
        except (KeyboardInterrupt, SystemExit):
            warm.imitation.model.zero_grad(set_to_none=True)
            saved = f"update {warm.update} is saved in {folder}, the same command goes on from there"
            say(f"sft: interrupted; {warm.save() or saved}")
            raise
    return folder / "policy"


def main(config: Config, folders: Sequence[Path]) -> int:
    """`impala-llm sft`. Returns the exit code: 2 for what will fail again, 4 where the disk refused the policy, 130
    after Ctrl-C."""
    prepare_cpu(thread_limit())
    prepare_cuda(config.model.cuda_products)
    keep_compiled_code(Path(config.sft.dir) / "compiled")
    try:
        warm_start(config, folders)
    except KeyboardInterrupt:
        return 128 + signal.SIGINT
    except (CheckpointError, ModelRefused, OutOfMemory) as error:
        print(f"impala-llm: {error}", file=sys.stderr)
        return 2
    except NotSaved as error:
        print(f"impala-llm: {error}", file=sys.stderr)
        return 4
    except (OSError, SafetensorError) as error:
        print(
            f"impala-llm: sft.dir={config.sft.dir}: {error}: when that is mended, the same command goes on from the "
            "last checkpoint",
            file=sys.stderr,
        )
        return 4
    return 0
