"""One training run in one process, in which what the learner trains on is exactly `lag` versions old.

In the whole system staleness depends on timing. Here the embedded engine plays, the learner's own `BatchSource` and
`Trainer` train, and between them stands a `DelayLine` in place of the receiver. With B trajectories a batch and S
samples per insert, N(v) = B + v B / S episodes have arrived before update v, and those that come with it were played by
version max(0, v - lag).

Weights are published after every update, or as `learner.sync_interval` says: what is scored is always the newest.

Invariant: the settings and the seed decide everything; two runs that differ in `lag` or in the algorithm play equally
many episodes of the same tasks in the same order and make equally many updates.
"""

import asyncio
import math
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import AutoTokenizer
from transformers.utils.logging import disable_progress_bar

from impala_llm.config import load
from impala_llm.engines import make_engine
from impala_llm.engines.base import TokenGenerator
from impala_llm.envs import make_suite
from impala_llm.envs.base import Split, Suite
from impala_llm.envs.toy import CorridorSuite
from impala_llm.learning.batch_source import BatchSource
from impala_llm.learning.policy.model import PolicyModel, policy_files
from impala_llm.learning.policy.policy_files import resolve_policy
from impala_llm.learning.ranks.parallel import Ranks
from impala_llm.observability.metrics import MetricLog
from impala_llm.rollout import ChatFormat, EpisodeLimits, EpisodeSpec, play_episode
from impala_llm.settings import Config
from impala_llm.trainer import Trainer
from impala_llm.trajectory import Trajectory

CURVES = (
    "loss/entropy", "loss/policy", "loss/value", "optimizer/gradient_norm", "optimizer/clipped_share",
    "ratio/mean", "ratio/max", "ratio/ess", "ratio/k3", "loss/clip_share", "ratio/rho_clip_share",
    "value/explained_variance", "advantage/std", "staleness/mean", "buffer/reuse",
    "loss/good_above_share", "loss/good_below_share", "loss/bad_above_share", "loss/bad_below_share",
)  # fmt: skip
"""Metrics of the updates whose means between two evaluations are kept."""


@dataclass(frozen=True)
class RunSettings:
    """Settings that determine a run, to the last bit."""

    part: str
    """Part of the study, or start."""
    task: str
    """Label of the task and the learning rate."""
    method: str
    """Label of the algorithm."""
    lag: int
    """Versions between playing and training."""
    seed: int
    overrides: tuple[str, ...]
    """Settings of impala_llm/config.py, as Hydra's overrides."""
    num_updates: int = 400
    num_words: int = 4
    """Number of words of the corridor."""
    num_turns: int = 3
    warm_updates: int = 0
    """On-policy updates that made the policy at the start, the same for all methods; see `_study_grid.start_of`."""
    rare_share: float = 1.0
    """Weight of a training task for each step of its `rarity`: below 1, tasks with many of them are rare."""
    evaluate_every: int = 20
    """Updates between two evaluations; one more comes at the end."""
    evaluation_tasks: int = 128
    evaluate_on: Split = "test"
    """Split whose first tasks are played: validation where something is chosen by the score."""

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)

    def words(self) -> list[str]:
        """The overrides on the presets that the runs were made on, which need not be today's defaults."""
        names_preset = any(word.startswith("algorithm=") for word in self.overrides)
        return [*([] if names_preset else ["algorithm=topr_gae"]), *self.overrides]


class DelayLine:
    """Stands where the source expects a receiver: gives out trajectories at the version at which they are due."""

    def __init__(self) -> None:
        self._due: list[Trajectory] = []
        self.num_evicted = 0

    def put(self, trajectories: Sequence[Trajectory]) -> None:
        self._due.extend(trajectories)

    def drain(self, timeout_s: float) -> list[Trajectory]:
        due, self._due = self._due, []
        return due

    def evicted(self, ticket_ids: Sequence[int]) -> None:
        self.num_evicted += len(ticket_ids)

    def lost_members(self, group_id: int) -> int:
        return 0

    def counters(self) -> dict[str, float]:
        return {"actors": 1.0, "open": 0.0, "failed": 0.0}


def rarity(suite: Suite, tasks: Sequence[int]) -> np.ndarray:
    """Steps by which each task is rarer than others where `RunSettings.rare_share` is below 1: int[len(tasks)].

    On the corridor the number of its doors `-`; elsewhere 1 for every second kind (signature) of training task.
    """
    signatures = [suite.signature(task) for task in tasks]
    if isinstance(suite, CorridorSuite):
        return np.array([signature.count("-") for signature in signatures])
    rare = set(sorted({suite.signature(task) for task in suite.tasks("train")})[1::2])
    return np.array([int(signature in rare) for signature in signatures])


class TaskStream:
    """Training tasks, one group after the other: the same for all runs of a seed.

    Args:
        rare_share: see `RunSettings`.
    """

    def __init__(self, suite: Suite, group_size: int, rare_share: float, seed: int) -> None:
        self._tasks = np.array(suite.tasks("train"))
        weights = rare_share ** rarity(suite, self._tasks.tolist()).astype(float)
        self._probabilities = weights / weights.sum()
        self._rng = np.random.default_rng(seed)
        self._group_size = group_size
        self._current = 0
        self.dealt = 0

    def next(self) -> tuple[int, int, int]:
        """(task, group, number of the episode)."""
        number = self.dealt
        self.dealt += 1
        if number % self._group_size == 0:
            self._current = int(self._rng.choice(self._tasks, p=self._probabilities))
        return self._current, number // self._group_size, number


class Player:
    """The embedded engine on the tasks of a suite.

    It plays with the weights that were published, and is scored with the newest. Where these can differ, it is two.
    """

    def __init__(self, config: Config, settings: RunSettings, suite: Suite) -> None:
        policy = resolve_policy(config)
        self.suite = suite
        self.tasks = TaskStream(suite, config.algorithm.group_size, settings.rare_share, settings.seed)
        self.engine = make_engine(config, policy, version=0)
        is_one = config.learner.sync_interval == 1
        self.scored_engine = self.engine if is_one else make_engine(config, policy, version=0)
        self._chat = ChatFormat(AutoTokenizer.from_pretrained(policy), suite.system_prompt)
        self._config = config
        self._seed = settings.seed << 32
        self._held_out = list(suite.tasks(settings.evaluate_on))[: settings.evaluation_tasks]
        self._is_rare = rarity(suite, self._held_out) > 0 if settings.rare_share < 1 else None

    async def play(self, num_episodes: int) -> list[Trajectory]:
        """The next episodes of the training tasks, sampled at the training temperature."""
        jobs = [self.tasks.next() for _ in range(num_episodes)]
        return await self._play(self.engine, jobs, greedy=False, seed=self._seed, training=True)

    async def score(self, name: str) -> dict[str, float]:
        """Mean score on the held-out tasks, `greedy` or `sampled`, where some are rare also on those; sampled ones
        always with the same random numbers."""
        jobs = [(task, number, number) for number, task in enumerate(self._held_out)]
        episodes = await self._play(
            self.scored_engine, jobs, greedy=name == "greedy", seed=self._seed + (1 << 31), training=False
        )
        scores = np.array([episode.score for episode in episodes])
        of_rare = {} if self._is_rare is None else {f"{name}_rare": float(scores[self._is_rare].mean())}
        return {name: float(scores.mean())} | of_rare

    async def close(self) -> None:
        for engine in {self.engine, self.scored_engine}:
            await engine.close()

    async def _play(
        self, engine: TokenGenerator, jobs: Sequence[tuple[int, int, int]], greedy: bool, seed: int, training: bool
    ) -> list[Trajectory]:
        settings = self._config.engine
        limits = EpisodeLimits(settings.temperature, settings.max_new_tokens, settings.max_length, greedy)
        specs = [
            EpisodeSpec(
                f"episode-{n}", task, group, n, seed + n, self._config.env.name, "lab", self.suite.signature(task)
            )
            for task, group, n in jobs
        ]
        return await asyncio.gather(
            *(play_episode(spec, self.suite.session(training), engine, self._chat, limits) for spec in specs)
        )


def num_due(update: int, batch_size: int, samples_per_insert: float) -> int:
    """N(v): episodes that have arrived before update v."""
    return batch_size + math.floor(update * batch_size / samples_per_insert)


def run(settings: RunSettings, start: Path | None = None, save: Path | None = None) -> dict[str, Any]:
    """Train; the result as plain data: the settings, `curve` (one entry an evaluation), `clock` (update, seconds of
    the processor for playing and for learning, at each evaluation), totals.

    Args:
        start: Hugging Face directory to start from, value head included; None: what the settings say.
        save: where the trained policy goes, as such a directory.
    """
    disable_progress_bar()
    # Not `prepare_cpu`: with oneDNN's products the attention of such short rows takes ten times as long.
    torch.set_num_threads(1)
    torch.manual_seed(settings.seed)
    with tempfile.TemporaryDirectory(prefix="study-") as folder:
        words = [*settings.words(), f"run.seed={settings.seed}", f"run.dir={folder}", "model.device=cpu"]
        config = load([*words, f"model.path={start}"] if start else words)
        return asyncio.run(_train(config, settings, save))


def _suite(config: Config, settings: RunSettings) -> Suite:
    """The environment: a corridor of the study's own length, or that of the settings."""
    if config.env.name != "corridor":
        return make_suite(config.env)
    return CorridorSuite(CorridorSuite.Options(settings.num_words, settings.num_turns))


async def _train(config: Config, settings: RunSettings, save: Path | None) -> dict[str, Any]:
    started = time.perf_counter()
    player = Player(config, settings, _suite(config, settings))
    model = PolicyModel.from_pretrained(
        resolve_policy(config), config.model.value_hidden_size, config.model.value_trunk_gradient
    )
    line = DelayLine()
    source = BatchSource(config, line, config.learner.batch_size, config.run.seed)  # type: ignore[arg-type]
    log = MetricLog()
    trainer = Trainer(config, Ranks("cpu"), model)
    batch_size, reuse = config.learner.batch_size, config.replay.samples_per_insert
    under_way: list[Trajectory] = []
    num_arrived = num_tokens = 0
    curve: list[dict[str, float]] = []
    clock: list[tuple[int, float, float]] = []
    seconds = {"playing": 0.0, "learning": 0.0}

    async def evaluate(version: int) -> None:
        summary = log.flush()
        if player.scored_engine is not player.engine:
            player.scored_engine.load_state(model.lm.state_dict(), version)
        point = {"update": version, "episodes": num_arrived}
        point |= await player.score("greedy") | await player.score("sampled")
        clock.append((version, round(seconds["playing"], 2), round(seconds["learning"], 2)))
        curve.append(point | {name: summary[name] for name in CURVES if name in summary})

    await evaluate(0)
    for version in range(settings.num_updates):
        # Version v plays what update v + lag is the first to see; at the start, all that comes before that as well.
        last = min(version + settings.lag, settings.num_updates - 1)
        began = time.process_time()  # one thread, and other runs beside it
        under_way += await player.play(num_due(last, batch_size, reuse) - player.tasks.dealt)
        played = time.process_time()
        num_new = num_due(version, batch_size, reuse) - num_arrived
        arriving, under_way = under_way[:num_new], under_way[num_new:]
        num_arrived += num_new
        num_tokens += sum(t.num_action_tokens for t in arriving)
        line.put(arriving)
        batch = source.next_batch(version)
        result = trainer.update(batch, version, progress=version / settings.num_updates)
        source.learned(result.abs_advantages, result.effective_share)
        source.end_step()
        log.merge(result.metrics.state())
        log.add("buffer/reuse", batch.mean_reuse)
        interval = config.learner.sync_interval
        if interval is not None and (version + 1) % interval == 0:
            player.engine.load_state(model.lm.state_dict(), version + 1)
        seconds["playing"] += played - began
        seconds["learning"] += time.process_time() - played
        if (version + 1) % settings.evaluate_every == 0 or version + 1 == settings.num_updates:
            await evaluate(version + 1)
    await player.close()
    if save is not None:
        model.save(save, policy_files(resolve_policy(config)))
    of_run = {"curve": curve, "clock": clock, "episodes": num_arrived, "action_tokens": num_tokens}
    took = {"evicted": line.num_evicted, "seconds": round(time.perf_counter() - started, 2)}
    return {"settings": settings.as_dict(), **of_run, **took}
