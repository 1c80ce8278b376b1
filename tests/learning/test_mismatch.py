"""The monitor sees an injected noise with the right metrics, and what it puts in place of μ undoes it."""

import dataclasses
import gc
import logging
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
import torch

from impala_llm.algorithms.advantages import GroupRelative, group_relative
from impala_llm.algorithms.losses import TruncatedIS
from impala_llm.algorithms.vtrace import VTrace
from impala_llm.learning.batch_source import Batch
from impala_llm.learning.mismatch import AGES, ENOUGH_TOKENS, MismatchMonitor, compare
from impala_llm.learning.objective import Denominators, Rows, Rules, objective
from impala_llm.learning.optim import Optimizer
from impala_llm.learning.packing import TokenBudget, pack
from impala_llm.learning.policy.model import PolicyModel
from impala_llm.learning.ranks.parallel import Ranks
from impala_llm.observability.metrics import METRICS, MetricLog
from impala_llm.settings import Config
from impala_llm.trainer import Trainer
from impala_llm.trajectory import Trajectory
from tests.learning.builders import make_batch, make_config, save_lm

VERSION = 3  # of the builders' trajectories
CPU = torch.device("cpu")


@pytest.fixture
def model(tmp_path: Path) -> PolicyModel:
    return PolicyModel.from_pretrained(save_lm(tmp_path))


def settings(mode: str = "never", alarm: float = 0.05) -> Config:
    return make_config(GroupRelative(), recompute_behaviour=mode, mismatch_alarm=alarm)


def log_probs_of(model: PolicyModel, t: Trajectory) -> np.ndarray:
    """float32[T]: the definition, for a row alone; 0 where no token was sampled."""
    row = torch.tensor(t.tokens.astype(np.int64))
    with torch.no_grad():
        hidden = model.hidden(row, torch.arange(len(row)), torch.tensor([len(row)]))
        log_probs = model.logits(hidden).double().log_softmax(-1)
    exact = np.zeros(len(row), np.float32)
    exact[1:] = log_probs[:-1].gather(1, row[1:, None])[:, 0].numpy()
    return np.where(t.action_mask, exact, 0).astype(np.float32)


def sampled_by(model: PolicyModel, noise: float = 0.0, versions: Sequence[int] = (VERSION,)) -> list[Trajectory]:
    """Twelve rows, 90 action tokens. μ is π times e^-c with a c of its own, in [0, 2 * noise], for each token; rows
    take their version from `versions` in turn."""
    rng = np.random.default_rng(1)
    rows = []
    for number, t in enumerate(make_batch() + make_batch()):
        lowered = log_probs_of(model, t) - 2 * noise * rng.random(t.num_tokens)
        rows.append(
            dataclasses.replace(
                t,
                behaviour_log_probs=np.where(t.action_mask, np.minimum(lowered, 0), 0).astype(np.float32),
                versions=np.where(t.action_mask, versions[number % len(versions)], -1).astype(np.int32),
                ticket_id=number,
                group_id=number // 4,
                score=number / 12,
            )
        )
    return rows


def injected(model: PolicyModel, rows: Sequence[Trajectory]) -> np.ndarray:
    """l of every action token, row after row."""
    return np.concatenate([(log_probs_of(model, t) - t.behaviour_log_probs)[t.action_mask] for t in rows]).astype(float)


def metrics_of(log: MetricLog) -> dict[str, float]:
    return {name: value for name, value in log.flush().items() if name.startswith("mismatch/")}


def measured(model: PolicyModel, rows: Sequence[Trajectory], version: int, budget: int = 1000) -> dict[str, float]:
    """Through `compare` and the metric log, over all micro-batches."""
    log = MetricLog()
    for micro in pack(rows, budget):
        hidden = model.hidden(micro.tokens, micro.position_ids, micro.lengths)[micro.action_positions - 1]
        log_probs, _ = model.action_log_probs(hidden, micro.tokens[micro.action_positions], 1.0)
        comparison = compare(log_probs, micro, version)
        for name, value, weight in comparison.metrics:
            log.add(name, value, weight)
    return log.flush()


def means(l: np.ndarray) -> list[float]:  # noqa: E741
    return [abs(l).mean(), abs(l).max(), (np.exp(l) - 1 - l).mean()]


@pytest.mark.parametrize("budget", [40, 1000])
def test_an_injected_noise_is_seen_with_its_mean_maximum_and_k3(model: PolicyModel, budget: int) -> None:
    rows = sampled_by(model, noise=0.3)
    seen = measured(model, rows, VERSION, budget)
    expected = means(injected(model, rows))
    assert 0.25 < expected[0] < 0.35
    for group in ("logprob", "age_0"):
        assert [seen[f"mismatch/{group}_{what}"] for what in ("mean", "max", "k3")] == pytest.approx(expected, abs=1e-5)
    assert len(seen) == 6


def test_without_noise_there_is_no_mismatch(model: PolicyModel) -> None:
    assert max(measured(model, sampled_by(model), VERSION).values()) < 1e-5


def test_every_staleness_has_its_metrics(model: PolicyModel) -> None:
    versions = [20, 19, 18, 17, 16, 15, 12, 11, 2]
    ages = ["0", "1", "2", "3_4", "3_4", "5_8", "5_8", "9_up", "9_up"]
    rows = sampled_by(model, noise=0.2, versions=versions)
    seen = measured(model, rows, 20)
    for age in AGES:
        members = [t for number, t in enumerate(rows) if ages[number % len(ages)] == age]
        got = [seen[f"mismatch/age_{age}_{what}"] for what in ("mean", "max", "k3")]
        assert got == pytest.approx(means(injected(model, members)), abs=1e-5), age
    assert len(seen) == 3 * (1 + len(AGES))


def test_a_row_that_older_weights_began_is_no_exact_comparison(model: PolicyModel) -> None:
    """Its last tokens are of age 0, but on keys and values of the old weights; it counts by staleness alone."""
    rows = sampled_by(model, noise=0.2)
    switched = rows[1]
    versions = switched.versions.copy()
    first, second, third = switched.turns.tolist()
    versions[first[0] : first[1]] = VERSION - 1
    rows[1] = dataclasses.replace(switched, versions=versions)
    seen = measured(model, rows, VERSION)
    whole = injected(model, [t for t in rows if t is not rows[1]])
    late = injected(model, rows[1:2])[first[1] - first[0] :]
    assert seen["mismatch/logprob_mean"] == pytest.approx(abs(whole).mean(), abs=1e-5)
    assert seen["mismatch/age_0_mean"] == pytest.approx(abs(np.append(whole, late)).mean(), abs=1e-5)
    assert "mismatch/logprob_mean" not in measured(model, rows[1:2], VERSION)


def test_only_action_tokens_enter(model: PolicyModel) -> None:
    rows = sampled_by(model, noise=0.2)
    (micro,) = pack(rows, 1000)
    comparison = compare(torch.zeros(len(micro.versions)), micro, VERSION)
    count = sum(int(t.action_mask.sum()) for t in rows)
    assert comparison.num_tokens == count < sum(t.num_tokens for t in rows)
    assert {weight for _, _, weight in comparison.metrics} == {count}
    assert comparison.total == pytest.approx(sum(-float(t.behaviour_log_probs.sum()) for t in rows), rel=1e-5)


def test_all_that_is_reported_is_declared(model: PolicyModel) -> None:
    names = set(measured(model, sampled_by(model, 0.1, [20, 19, 18, 17, 15, 2]), 20))
    monitor = MismatchMonitor(settings("always"), model, CPU, TokenBudget(8192))
    rows = sampled_by(model)
    monitor.count(monitor.recomputed(pack(rows, 1000)[0], rows), len(rows))
    names |= {name for name, _, _ in monitor.end()}
    assert names == {name for name in METRICS if name.startswith("mismatch/")}


def look(monitor: MismatchMonitor, rows: Sequence[Trajectory]) -> dict[str, float]:
    monitor.look(rows, VERSION)
    return {name: value for name, value, _ in monitor.end()}


def test_the_alarm_names_figure_threshold_and_fix_once_and_ends_with_the_mismatch(
    model: PolicyModel, caplog: pytest.LogCaptureFixture
) -> None:
    config = settings(alarm=0.1)
    config.engine.dtype = "bfloat16"
    monitor = MismatchMonitor(config, model, CPU, TokenBudget(8192))
    with caplog.at_level(logging.WARNING):
        assert look(monitor, sampled_by(model, noise=0.05))["mismatch/alarm"] == 0
        assert not caplog.messages
        noisy = sampled_by(model, noise=0.3)
        seen = look(monitor, noisy)
        assert seen["mismatch/alarm"] == 1 and monitor.alarm
        look(monitor, noisy)
    (message,) = caplog.messages
    for word in (
        f"{seen['mismatch/logprob_mean']:.3g} nats",
        "algorithm.mismatch_alarm=0.1",
        "engine.dtype=float32",
        "algorithm.recompute_behaviour=on_mismatch",
    ):
        assert word in message
    assert look(monitor, sampled_by(model))["mismatch/alarm"] == 0


def test_the_alarm_names_no_setting_that_would_be_refused(model: PolicyModel, caplog: pytest.LogCaptureFixture) -> None:
    config = settings(alarm=0.1)
    config.algorithm.reward_kl_coef = 0.05
    look(MismatchMonitor(config, model, CPU, TokenBudget(8192)), sampled_by(model, noise=0.3))
    (message,) = caplog.messages
    assert "check the engine's weights" in message and "recompute_behaviour" not in message


def test_a_mismatch_that_is_no_number_raises_the_alarm(model: PolicyModel) -> None:
    monitor = MismatchMonitor(settings(), model, CPU, TokenBudget(8192))
    with torch.no_grad():
        next(model.lm.parameters()).fill_(torch.nan)
    assert look(monitor, make_batch() + make_batch())["mismatch/alarm"] == 1


def test_few_tokens_are_compared_together_with_those_of_later_updates(model: PolicyModel) -> None:
    monitor = MismatchMonitor(settings(), model, CPU, TokenBudget(8192))
    rows = sampled_by(model, noise=0.3)[:6]
    assert ENOUGH_TOKENS / 2 < sum(t.num_action_tokens for t in rows) < ENOUGH_TOKENS
    assert [look(monitor, rows)["mismatch/alarm"] for _ in range(4)] == [0, 1, 1, 1]


def test_a_probe_takes_the_newest_rows_of_this_version_until_it_has_enough(model: PolicyModel) -> None:
    rows = sampled_by(model, noise=0.1, versions=[VERSION, VERSION - 1]) * 3
    newest, num_tokens = [], 0
    for t in rows[::-1]:
        if t.oldest_version == VERSION and num_tokens < ENOUGH_TOKENS:
            newest.append(t)
            num_tokens += t.num_action_tokens
    monitor = MismatchMonitor(settings(), model, CPU, TokenBudget(8192))
    seen = look(monitor, rows)
    assert seen["mismatch/tokens"] == num_tokens
    assert seen["mismatch/logprob_mean"] == pytest.approx(abs(injected(model, newest)).mean(), abs=1e-5)


def test_nothing_to_compare_leaves_no_metrics_and_the_alarm_as_it_was(model: PolicyModel) -> None:
    monitor = MismatchMonitor(settings(), model, CPU, TokenBudget(8192))
    look(monitor, sampled_by(model, noise=0.3))
    assert look(monitor, []) == {"mismatch/tokens": 0.0, "mismatch/alarm": 1.0}
    assert look(monitor, sampled_by(model, versions=[VERSION - 1])) == {"mismatch/tokens": 0.0, "mismatch/alarm": 1.0}


# --- in an update


class Run:
    """A learner without its surroundings."""

    def __init__(self, directory: Path, config: Config) -> None:
        self.model = PolicyModel.from_pretrained(directory)
        self.trainer = Trainer(config, Ranks("cpu"), self.model)
        self.arriving: list[Trajectory] = []
        self.version = VERSION

    def update(self, rows: Sequence[Trajectory]) -> dict[str, float]:
        batch = Batch(tuple(rows), (1.0,) * len(rows), tuple(t.group_id for t in rows), 1.0)
        result = self.trainer.update(batch, self.version, 0.1, self.take_arrivals)
        self.version += 1
        return result.metrics.flush()

    def take_arrivals(self) -> list[Trajectory]:
        taken, self.arriving = self.arriving, []
        return taken

    def weights(self) -> torch.Tensor:
        return torch.cat([p.detach().reshape(-1) for p in self.model.parameters()])


def test_never_leaves_the_update_as_it_was_to_the_last_bit(tmp_path: Path) -> None:
    directory = save_lm(tmp_path)
    config = settings("never")
    config.learner.token_budget = 60
    run, model = Run(directory, config), PolicyModel.from_pretrained(directory)
    rows = sampled_by(model, noise=0.3, versions=[VERSION, VERSION - 1])
    run.arriving = sampled_by(model, noise=0.1)
    seen = run.update(rows)
    assert seen["mismatch/recomputed_share"] == 0 and seen["mismatch/alarm"] == 1

    optimizer = Optimizer(model, config.learner)
    returns = torch.tensor([float(t.rewards.sum()) for t in rows])
    advantages = group_relative(returns, torch.tensor([t.group_id for t in rows]), False)
    counts = Denominators(sum(t.num_action_tokens for t in rows), sum(len(t.turns) for t in rows), len(rows))
    for micro in pack(rows, 60):
        members = torch.tensor(micro.members)
        ones = torch.ones(len(members))
        objective(config, model, micro, Rows(ones, advantages[members]), Rules(counts, VERSION)).loss.backward()
    optimizer.step(0, 0.1)
    assert torch.equal(run.weights(), torch.cat([p.detach().reshape(-1) for p in model.parameters()]))


@pytest.mark.parametrize("mode", ["always", "on_mismatch"])
@pytest.mark.parametrize("advantage", ["group_relative", "vtrace"])
def test_recomputed_noisy_data_of_age_zero_train_as_noiseless_data_do(
    tmp_path: Path, mode: str, advantage: str
) -> None:
    directory = save_lm(tmp_path)
    model = PolicyModel.from_pretrained(directory)
    results = {}
    for name, chosen, noise in (("clean", "never", 0.0), ("noisy", "never", 0.5), ("recomputed", mode, 0.5)):
        config = settings(chosen)
        # A cap of 1 would hide ratios above it.
        config.algorithm.loss = TruncatedIS(cap=5.0)
        if advantage == "vtrace":
            config.algorithm.credit = VTrace(rho_bar=5.0)
        run = Run(directory, config)
        seen = run.update(sampled_by(model, noise))
        results[name] = seen["loss/total"]
        if name == "recomputed":
            assert (seen["ratio/mean"], seen["ratio/max"], seen["mismatch/recomputed_share"]) == (1.0, 1.0, 1.0)
            assert seen["mismatch/logprob_mean"] == pytest.approx(0.5, abs=0.1)
    assert results["recomputed"] == pytest.approx(results["clean"], rel=1e-6)
    assert results["noisy"] != pytest.approx(results["clean"], abs=1e-3)


def test_what_arrives_before_the_step_of_its_version_is_scored_by_that_version(tmp_path: Path) -> None:
    """And keeps that through its replays, while the policy moves on."""
    config = settings("always")
    config.learner.learning_rate = 1e-2
    config.learner.warmup_updates = 0
    run = Run(save_lm(tmp_path), config)
    first, later = sampled_by(run.model), sampled_by(run.model, noise=0.4)
    of_sampler = injected(run.model, later) + np.concatenate([t.behaviour_log_probs[t.action_mask] for t in later])
    run.arriving = later
    run.update(first)
    for _ in range(2):
        now = np.concatenate([log_probs_of(run.model, t)[t.action_mask] for t in later])
        seen = run.update(later)
        ratio = np.exp(now - of_sampler)
        assert seen["ratio/mean"] == pytest.approx(ratio.mean(), rel=1e-4)
        assert seen["ratio/max"] == pytest.approx(ratio.max(), rel=1e-4)
        assert abs(ratio - 1).max() > 0.05


def test_on_mismatch_replaces_from_an_alarm_on_until_it_ends(tmp_path: Path) -> None:
    config = settings("on_mismatch")
    config.learner.learning_rate = 0.0
    run = Run(save_lm(tmp_path), config)
    clean, noisy = sampled_by(run.model), sampled_by(run.model, noise=0.3)

    def played(rows: Sequence[Trajectory]) -> list[Trajectory]:
        versions = [np.where(t.action_mask, run.version, -1).astype(np.int32) for t in rows]
        return [dataclasses.replace(t, versions=v) for t, v in zip(rows, versions, strict=True)]

    def train(rows: Sequence[Trajectory]) -> tuple[float, float, bool]:
        seen = run.update(rows)
        return seen["mismatch/alarm"], seen["mismatch/recomputed_share"], seen["ratio/mean"] == pytest.approx(1.0)

    assert train(played(clean)) == (0, 0, True)
    assert train(played(noisy)) == (1, 0, False)  # seen in this update, and so too late for it
    stale = played(noisy)
    assert train(stale) == (1, 1, True)
    assert train(played(clean)) == (0, 1, True)
    assert train(stale) == (0, 1, True)  # what it was given it keeps
    assert train(played(noisy)) == (1, 0, False)


def test_values_go_with_their_trajectories(model: PolicyModel) -> None:
    monitor = MismatchMonitor(settings("always"), model, CPU, TokenBudget(8192))
    rows = sampled_by(model)
    monitor.look(rows, VERSION)
    before = num_tensors()
    del rows[:5]
    assert num_tensors() == before - 5


def num_tensors() -> int:
    """Tensors that this process refers to."""
    gc.collect()
    return sum(issubclass(type(found), torch.Tensor) for found in gc.get_objects())


def test_a_synchronous_batch_needs_no_probe(tmp_path: Path) -> None:
    """The comparison of the batch's own tokens is enough: nothing else is probed, and arrivals are left to the next."""
    run = Run(save_lm(tmp_path), settings())
    run.trainer.monitor.begin([], VERSION)
    run.arriving = sampled_by(run.model)
    seen = run.update(sampled_by(run.model, noise=0.01))
    assert seen["mismatch/tokens"] == 90 and len(run.arriving) == 12
