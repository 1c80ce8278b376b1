"""Demonstrations of a warm start: what it learns from, and what it is measured on."""

import hashlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from transformers import AutoConfig, AutoTokenizer

from impala_llm.demonstrations import Demonstration, DemonstrationError, fingerprint, read, read_header
from impala_llm.envs.webshop.learned_catalogues import learned_of
from impala_llm.settings import Config
from impala_llm.trajectory import Trajectory, TrajectoryError


@dataclass(frozen=True)
class Data:
    """Demonstrations to learn from, and to measure on."""

    learned: list[Trajectory]
    held_out: list[Trajectory]
    checksum: str
    """Checksum of both: with another one, a checkpoint is of other data."""
    catalogues: dict[str, set[int]]
    """Made catalogues that they are of, see `learned_catalogues`."""


def load_data(config: Config, policy: Path, folders: Sequence[Path]) -> Data:
    """Read demonstrations, and hold those of some tasks out.

    Raises:
        DemonstrationError: there are none, they are damaged, or the policy cannot learn from them.
    """
    tokenizer = fingerprint(AutoTokenizer.from_pretrained(policy))
    vocab_size = AutoConfig.from_pretrained(policy).get_text_config().vocab_size
    found: list[Demonstration] = []
    catalogues: dict[str, set[int]] = {}
    for folder in folders:
        header = read_header(folder)
        if header.tokenizer != tokenizer:
            raise DemonstrationError(
                f"{folder} has tokens of model.path={header.model}, whose tokenizer or chat template is another than "
                f"that of model.path={config.model.path}: record the demonstrations again with this one"
            )
        for d in read(folder):
            try:
                d.trajectory.validate_vocabulary(vocab_size)
            except TrajectoryError as error:
                raise DemonstrationError(
                    f"{folder}, episode {d.trajectory.episode_id}, cannot be learned by model.path="
                    f"{config.model.path}: {error}: copy the folder again, or record the demonstrations again with "
                    "this model"
                ) from None
            found.append(d)
            if d.trajectory.score >= config.sft.min_score:
                for kind, seeds in learned_of(header.settings, [d.source]).items():
                    catalogues.setdefault(kind, set()).update(seeds)
    there = len(found)
    found = [d for d in found if d.trajectory.score >= config.sft.min_score]
    if there == 0:
        fix = "record some with `impala-llm demonstrate`, or name another folder"
        if not config.sft.data:
            fix = "none was recorded; play an episode to its end, or name a folder that has some: sft.data=[FOLDER]"
        raise DemonstrationError(f"there are no demonstrations: {fix}")
    if not found:
        raise DemonstrationError(
            f"none of {there} demonstrations has sft.min_score={config.sft.min_score:g}: lower it, or record others"
        )
    longest = max(d.trajectory.num_tokens for d in found)
    if longest > config.engine.max_length:
        number = sum(d.trajectory.num_tokens > config.engine.max_length for d in found)
        raise DemonstrationError(
            f"{number} demonstrations have more than engine.max_length={config.engine.max_length} tokens, the "
            f"longest {longest}: raise it to that, or record them again with this one"
        )
    tasks = sorted({d.task for d in found})
    order = np.random.default_rng(config.run.seed).permutation(len(tasks))
    held_out = {tasks[i] for i in order[: min(config.sft.held_out_tasks, len(tasks) // 10)]}
    return Data(
        [d.trajectory for d in found if d.task not in held_out],
        [d.trajectory for d in found if d.task in held_out],
        _digest(d.trajectory for d in found),
        catalogues,
    )


def _digest(trajectories: Iterable[Trajectory]) -> str:
    """Hash of what is learned from, in order."""
    digest = hashlib.sha256()
    for t in trajectories:
        digest.update(t.tokens.tobytes() + t.turns.tobytes() + t.rewards.tobytes())
    return digest.hexdigest()
