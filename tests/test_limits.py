"""Ends of episodes, and the return that is still to come: nothing where the end is of the task, else the value of the
state that was reached, read where the critic learns it."""

import asyncio
import dataclasses
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoTokenizer

from impala_llm.config import load
from impala_llm.engines.base import Generation, SamplingParams
from impala_llm.envs.base import Session
from impala_llm.envs.webshop.suite import WebShopSuite
from impala_llm.envs.webshop.synthetic import synthetic_catalogue
from impala_llm.learning.batch_source import Batch
from impala_llm.learning.packing import pack
from impala_llm.learning.policy.model import PolicyModel
from impala_llm.learning.policy.scratch import make_scratch_policy
from impala_llm.learning.ranks.parallel import Ranks
from impala_llm.learning.scoring import action_log_probs
from impala_llm.rollout import ChatFormat, EpisodeLimits, EpisodeSpec, play_episode
from impala_llm.settings import WebShopConfig
from impala_llm.trainer import Trainer
from impala_llm.trajectory import Trajectory

HOPE = 0.7
"""The value that the critic gives every state."""
SPEC = EpisodeSpec("e", task_id=0, group_id=0, ticket_id=0, seed=0, env="webshop", actor_id="a", signature="")


class Nonsense:
    """Engine that says the same nonsense in every turn."""

    version = 0

    def __init__(self, completion: list[int]) -> None:
        self._completion = np.array(completion, np.int32)

    async def generate(self, session_id: str, prompt: list[int], params: SamplingParams) -> Generation:
        completion = self._completion[: params.max_new_tokens]
        return Generation(
            completion, np.zeros(len(completion), np.float32), np.zeros(len(completion), np.int32), "stop"
        )

    def release(self, session_id: str) -> None:
        pass


class Interrupted:
    """Ends after two turns for a reason that is not its own."""

    def __init__(self) -> None:
        self._turn = 0

    def reset(self, task_id: int) -> tuple[str, dict]:
        self._turn = 0
        return "begin", {}

    def step(self, action: str) -> tuple[str, float, bool, bool, dict]:
        self._turn += 1
        over = self._turn == 2
        return f"room {self._turn}", 0.0, False, over, {"score": 0.0, "success": False} if over else {}


@pytest.fixture(scope="module")
def policy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_scratch_policy(tmp_path_factory.mktemp("policy"), 32, 1, 0)


@pytest.fixture(scope="module")
def shop() -> WebShopSuite:
    return WebShopSuite(
        synthetic_catalogue(20, 0),
        WebShopConfig(observation_mode="compact", strict_compat=False, max_steps=5, max_invalid_actions=3),
    )


def hopeful(policy: Path) -> PolicyModel:
    model = PolicyModel.from_pretrained(policy)
    torch.nn.init.constant_(model.value_head[-1].bias, HOPE)
    return model


def play(policy: Path, session: Session, max_length: int) -> Trajectory:
    """An episode of nonsense, with the log-probabilities that the policy has."""
    tokenizer = AutoTokenizer.from_pretrained(policy)
    completion = [*tokenizer.encode("nonsense", add_special_tokens=False), tokenizer.eos_token_id]
    limits = EpisodeLimits(1.0, 16, max_length)
    episode = asyncio.run(play_episode(SPEC, session, Nonsense(completion), ChatFormat(tokenizer), limits))  # type: ignore[arg-type]
    [micro] = pack([episode], max_length)
    log_probs = np.zeros(episode.num_tokens, np.float32)
    log_probs[episode.action_mask] = action_log_probs(hopeful(policy), micro, 1.0).numpy()
    return dataclasses.replace(episode, behaviour_log_probs=log_probs)


def learn(policy: Path, episode: Trajectory) -> tuple[float, dict[str, float]]:
    """By how much one update raises the mean log-probability of what was said, and the update's metrics."""
    config = load(["model=scratch", "algorithm=ppo", "learner.warmup_updates=0"])
    model = hopeful(policy)
    trainer = Trainer(config, Ranks("cpu"), model)
    trainer.update(Batch((episode,), (1.0,), (0,), 1.0), version=0, progress=0.0)
    [micro] = pack([episode], 2048)
    after = action_log_probs(model, micro, 1.0)
    return float((after - micro.behaviour_log_probs).mean()), trainer.log.flush()


@pytest.mark.parametrize(
    ("training", "max_length", "num_turns"),
    [(True, 2048, 3), (False, 2048, 5), (True, 300, None)],
    ids=["invalid actions", "steps", "full context"],
)
def test_nonsense_to_the_limit_does_not_pay(
    policy: Path, shop: WebShopSuite, training: bool, max_length: int, num_turns: int | None
) -> None:
    """A critic that hopes for 0.7 everywhere, and an episode that scores 0: it falls short of the hope."""
    episode = play(policy, shop.session(training), max_length)
    assert num_turns is None or len(episode.turns) == num_turns
    assert episode.num_tokens <= max_length and episode.score == 0.0
    change, metrics = learn(policy, episode)
    assert metrics["advantage/mean"] == pytest.approx(-HOPE), "the return is 0"
    assert change < 0


def test_an_outside_limit_leaves_the_value_of_the_state_that_was_reached(policy: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(policy)
    episode = play(policy, Interrupted(), 2048)  # type: ignore[arg-type]
    said = episode.tokens[episode.turns[-1, 0] : episode.turns[-1, 1]].tolist()
    after = episode.tokens[episode.turns[-1, 1] :].tolist()
    assert episode.bootstrap and after == ChatFormat(tokenizer).following("room 2", said[-1])
    # As in an episode that goes on there: the state in which its third turn begins.
    [micro] = pack([episode], 2048)
    assert micro.last_positions.tolist() == [episode.num_tokens - 1]
    _, metrics = learn(policy, episode)
    assert metrics["advantage/mean"] == pytest.approx(0.0, abs=1e-6), "as much is still to come as was hoped for"


def test_without_room_for_the_state_that_was_reached_nothing_is_to_come(policy: Path) -> None:
    """The interrupted episode's last observation does not fit: there the policy could not act either."""
    whole = play(policy, Interrupted(), 2048)  # type: ignore[arg-type]
    episode = play(policy, Interrupted(), whole.num_tokens - 1)  # type: ignore[arg-type]
    assert not episode.bootstrap and episode.num_tokens == episode.turns[-1, 1] < whole.num_tokens
