"""Small policies and trajectories for the tests of this folder."""

import dataclasses
import tempfile
from collections.abc import Sequence
from functools import cache
from pathlib import Path

import numpy as np
import torch
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
    PreTrainedModel,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

from impala_llm.algorithms.interface import Credit, Loss
from impala_llm.algorithms.losses import TruncatedIS
from impala_llm.algorithms.vtrace import VTrace
from impala_llm.config import load
from impala_llm.learning.batch_source import Batch
from impala_llm.learning.policy.model import PolicyModel
from impala_llm.learning.ranks.parallel import Ranks
from impala_llm.settings import AlgorithmConfig, Config
from impala_llm.trainer import Trainer
from impala_llm.trajectory import Trajectory
from tests.families import SIZES

VOCABULARY = 50
SHAPE = {
    **SIZES,
    "vocab_size": VOCABULARY,
    # large for a language model, so that a token seen by the wrong row shows
    "initializer_range": 0.2,
}
ARCHITECTURES = ("qwen2", "qwen3", "llama")
WITH_EXPERTS = ("mixtral", "qwen3_moe")


def save_lm(directory: Path, architecture: str = "qwen3", tied: bool = True, seed: int = 0) -> Path:
    """Write a random float32 causal LM and return its directory. What is drawn next follows from the seed too."""
    files, random_state = _files_of_lm(architecture, tied, seed)
    torch.manual_seed(seed)  # of GPUs as well
    torch.set_rng_state(random_state)
    directory.mkdir(parents=True, exist_ok=True)
    for name, content in files.items():
        (directory / name).write_bytes(content)
    return directory


@cache
def _files_of_lm(architecture: str, tied: bool, seed: int) -> tuple[dict[str, bytes], torch.Tensor]:
    """Files of a random causal LM by their names, and the state of the random numbers after it was drawn."""
    torch.manual_seed(seed)
    lm: PreTrainedModel
    if architecture == "qwen2":
        lm = Qwen2ForCausalLM(Qwen2Config(**SHAPE, tie_word_embeddings=tied))
    elif architecture == "llama":
        lm = LlamaForCausalLM(LlamaConfig(**SHAPE, tie_word_embeddings=tied))
    elif architecture == "mixtral":
        lm = MixtralForCausalLM(MixtralConfig(**SHAPE, num_local_experts=4, tie_word_embeddings=tied))
    elif architecture == "qwen3_moe":
        shape = {"head_dim": 8, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
        lm = Qwen3MoeForCausalLM(Qwen3MoeConfig(**SHAPE, **shape, tie_word_embeddings=tied))
    else:
        lm = Qwen3ForCausalLM(Qwen3Config(**SHAPE, head_dim=8, tie_word_embeddings=tied))
    with tempfile.TemporaryDirectory() as folder:
        lm.save_pretrained(folder)
        files = {path.name: path.read_bytes() for path in Path(folder).iterdir()}
    return files, torch.get_rng_state()


def make_trajectory(
    length: int, turns: Sequence[tuple[int, int]], seed: int = 0, bootstrap: bool = False, group_id: int = 0
) -> Trajectory:
    """Random tokens; each turn [start, end) is sampled by version 3 and rewarded by its number from 1 at its end."""
    generator = np.random.default_rng(seed)
    mask = np.zeros(length, bool)
    rewards = np.zeros(length, np.float32)
    for number, (start, end) in enumerate(turns, start=1):
        mask[start:end] = True
        rewards[end - 1] = number
    return Trajectory(
        tokens=generator.integers(0, VOCABULARY, length).astype(np.int32),
        action_mask=mask,
        behaviour_log_probs=np.where(mask, -generator.uniform(0.5, 4.0, length), 0.0).astype(np.float32),
        versions=np.where(mask, 3, -1).astype(np.int32),
        rewards=rewards,
        turns=np.array(turns, np.int32).reshape(-1, 2),
        bootstrap=bootstrap,
        episode_id=f"episode-{seed}",
        group_id=group_id,
        task_id=0,
        env="toy",
        actor_id="actor",
        ticket_id=seed,
        score=0.5,
        success=False,
    )


def make_batch() -> list[Trajectory]:
    """Six uneven trajectories, 119 tokens, of one to three turns; two are cut."""
    spans: list[tuple[int, list[tuple[int, int]]]] = [
        (9, [(4, 9)]),
        (33, [(5, 9), (14, 20), (30, 33)]),
        (12, [(1, 3), (8, 11)]),
        (40, [(10, 12), (20, 29)]),
        (5, [(3, 5)]),
        (20, [(6, 7), (12, 20)]),
    ]
    return [make_trajectory(n, turns, seed, bootstrap=seed in (1, 3)) for seed, (n, turns) in enumerate(spans)]


def make_config(credit: Credit | None = None, loss: Loss | None = None, **algorithm: object) -> Config:
    """Settings that are not checked; V-trace and truncated importance weights where nothing else is given."""
    config = Config()
    config.algorithm = AlgorithmConfig(credit or VTrace(), loss or TruncatedIS(), **algorithm)  # type: ignore[arg-type]
    return config


def trainer_with(directory: Path, *overrides: str) -> Trainer:
    config = load(["model=scratch", "algorithm.group_size=2", *overrides])
    model = PolicyModel.from_pretrained(save_lm(directory))
    return Trainer(config, Ranks("cpu"), model)


def batch_of(weights: tuple[float, ...]) -> Batch:
    return Batch(tuple(make_batch()), weights, tuple(range(6)), 1.0)


def varied() -> Batch:
    rows = [dataclasses.replace(t, ticket_id=i, group_id=0) for i, t in enumerate(make_batch())]
    return dataclasses.replace(batch_of((1.0,) * 6), trajectories=tuple(rows))


def with_infinite_return(t: Trajectory) -> Trajectory:
    """The trajectory with rewards whose sum is infinite in float32."""
    return dataclasses.replace(t, rewards=np.where(t.action_mask, np.float32(3e38), np.float32(0)))


def group_advantages(batch: Batch) -> np.ndarray:
    """The return of each trajectory less the mean return of all, which are one group."""
    returns = np.array([float(t.rewards.sum()) for t in batch.trajectories])
    return returns - returns.mean()
