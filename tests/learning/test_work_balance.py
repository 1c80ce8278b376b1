"""Items of a batch are exchanged between ranks so that each computes about as much, and training stays as it was."""

import dataclasses
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
import torch

from impala_llm.algorithms.advantages import GroupRelative
from impala_llm.algorithms.losses import PPOClip
from impala_llm.learning.batch_source import Batch
from impala_llm.learning.policy.model import PolicyModel
from impala_llm.learning.ranks.parallel import Ranks
from impala_llm.learning.ranks.work_balance import TOLERANCE, WorkBalance, assign
from impala_llm.settings import LearnerConfig
from impala_llm.trainer import Trainer
from impala_llm.trajectory import CONTEXT_START, Trajectory
from tests.learning.builders import make_config, make_trajectory, save_lm
from tests.learning.test_mismatch import log_probs_of
from tests.two_ranks import Meeting, ThreadRanks, TrainingRanks


@pytest.mark.parametrize(
    ("works", "expected"),
    [
        ([[5.0, 5.0], [4.0, 4.0]], [9.0, 9.0]),  # one for one
        ([[3.0, 3.0, 2.0], [4.0]], [6.0, 6.0]),  # one given away
        ([[10.0], [1.0]], [10.0, 1.0]),  # nothing makes it better
        ([[5.0, 5.1], [5.0, 5.0]], [10.1, 10.0]),  # within the tolerance
        ([[7.0]], [7.0]),
        ([], []),
    ],
)
def test_loads_are_made_equal_by_whole_items(works: list[list[float]], expected: list[float]) -> None:
    loads = [sum(works[rank][index] for rank, index in items) for items in assign(works)]
    assert loads == pytest.approx(expected)


@pytest.mark.parametrize("num_ranks", [2, 4, 8])
def test_items_with_a_long_tail_are_balanced_and_each_is_computed_once(num_ranks: int) -> None:
    rng = np.random.default_rng(num_ranks)
    works = [rng.lognormal(rank % 3, 0.8, 16).tolist() for rank in range(num_ranks)]
    found = assign(works)
    assert sorted(item for items in found for item in items) == [(r, i) for r in range(num_ranks) for i in range(16)]
    before = np.array([sum(mine) for mine in works])
    after = np.array([sum(works[rank][index] for rank, index in items) for items in found])
    assert np.ptp(after) <= TOLERANCE * after.mean() < np.ptp(before)


@pytest.mark.parametrize(("num_ranks", "drawn"), [(2, 1.13), (4, 1.27), (8, 1.42)])
def test_the_work_of_episodes_of_log_normal_lengths_as_docs_sharding_has_it(num_ranks: int, drawn: float) -> None:
    """Eight groups of eight a rank, of a model of 135 M parameters: the most loaded rank over the mean, mean of 100."""
    before, after = [], []
    for seed in range(100):
        rng = np.random.default_rng(seed)
        works = [[work_of_a_group(rng) for _ in range(8)] for _ in range(num_ranks)]
        loads = np.array([sum(mine) for mine in works])
        balanced = [sum(works[rank][index] for rank, index in items) for items in assign(works)]
        before.append(loads.max() / loads.mean())
        after.append(max(balanced) / loads.mean())
    assert np.mean(before) == pytest.approx(drawn, abs=0.006)
    assert np.mean(after) < 1.015


def work_of_a_group(rng: np.random.Generator) -> float:
    lengths = np.minimum(8192, rng.lognormal(6.5 + rng.normal(0, 0.5), 0.7, 8))
    return float((lengths * (lengths + 7784)).sum())


LENGTHS = ((60, 41), (52, 33), (9, 12), (20, 17))
"""Tokens of the two trajectories of each of four groups: the first two groups are rank 0's."""


def with_rewards(t: Trajectory, factor: float) -> Trajectory:
    return dataclasses.replace(t, rewards=t.rewards * np.float32(factor))


def drawn(groups: Sequence[int]) -> Batch:
    """The batch of a rank: each group is an item, numbered from 0."""
    rows = [
        with_rewards(make_trajectory(length, [(2, 5), (6, length)], seed=10 * group + i, group_id=group), 1 + i)
        for group in groups
        for i, length in enumerate(LENGTHS[group])
    ]
    items = [item for item in range(len(groups)) for _ in range(2)]
    return Batch(tuple(rows), tuple(1.0 + row.group_id / 10 for row in rows), tuple(items), 1.0)


def of_both(work: object, *arguments: Sequence[object]) -> list[object]:
    """Results of a function on rank 0 and on rank 1, which meet."""
    with ThreadPoolExecutor(2) as pool:
        return list(pool.map(work, *arguments))  # type: ignore[call-overload]


def test_groups_move_whole_with_their_weights_and_numbers_come_home(tmp_path: Path) -> None:
    meeting, model = Meeting(), PolicyModel.from_pretrained(save_lm(tmp_path))
    batches = [drawn([0, 1]), drawn([2, 3])]

    def work(rank: int) -> tuple[Batch, dict[str, float], dict[int, float]]:
        balance = WorkBalance(ThreadRanks(rank, meeting), model)
        batch, metrics = balance.exchange(batches[rank], [True] * 4, stays=False)
        sizes = {item: float(batch.trajectories[batch.item_ids.index(item)].group_id) for item in batch.item_ids}
        return batch, {name: value for name, value, _ in metrics}, balance.send_back(batch, sizes)

    found = of_both(work, (0, 1))
    rows = [(t.group_id, t.ticket_id, rank) for rank, (batch, *_) in enumerate(found) for t in batch.trajectories]
    assert sorted(row[:2] for row in rows) == sorted((t.group_id, t.ticket_id) for b in batches for t in b.trajectories)
    ranks_of = [{rank for group, _, rank in rows if group == number} for number in range(4)]
    assert all(len(ranks) == 1 for ranks in ranks_of) and ranks_of[0] != ranks_of[1]
    for batch, metrics, _ in found:
        assert batch.weights == pytest.approx([1.0 + t.group_id / 10 for t in batch.trajectories])
        assert 1.0 <= metrics["learner/imbalance"] < metrics["learner/imbalance_drawn"]
    assert [home for *_, home in found] == [{0: 0.0, 1: 1.0}, {0: 2.0, 1: 3.0}]


def test_a_rank_that_stays_out_computes_what_it_has_drawn(tmp_path: Path) -> None:
    meeting, model = Meeting(), PolicyModel.from_pretrained(save_lm(tmp_path))
    batches = [drawn([0, 1]), drawn([2, 3])]

    def work(rank: int) -> Batch:
        return WorkBalance(ThreadRanks(rank, meeting), model).exchange(batches[rank], [True] * 4, stays=rank == 1)[0]

    assert of_both(work, (0, 1)) == batches


def test_two_ranks_with_unlike_batches_train_as_one_and_each_learns_its_own_priorities(tmp_path: Path) -> None:
    save_lm(tmp_path)
    meeting = Meeting()
    models = [PolicyModel.from_pretrained(tmp_path) for _ in range(3)]

    def trained(ranks: Ranks, batch: Batch, model: PolicyModel) -> tuple[dict[int, float], dict[str, float]]:
        config = make_config(GroupRelative(), PPOClip(), max_staleness=None)
        config.learner = LearnerConfig(warmup_updates=0, decay="constant")
        result = Trainer(config, ranks, model).update(batch, version=3, progress=0.0)
        return dict(result.abs_advantages), result.metrics.flush()

    def work(rank: int) -> tuple[dict[int, float], dict[str, float]]:
        return trained(TrainingRanks(rank, meeting), drawn([0, 1] if rank == 0 else [2, 3]), models[rank])

    (mine, metrics), (other, _) = of_both(work, (0, 1))
    together, _ = trained(Ranks("cpu"), drawn([0, 1, 2, 3]), models[2])
    assert metrics["learner/imbalance"] < metrics["learner/imbalance_drawn"]
    assert [mine[0], mine[1], other[0], other[1]] == pytest.approx([together[item] for item in range(4)], rel=1e-4)
    assert all(mine.values()) and all(other.values())
    for p, q, alone in zip(*(model.parameters() for model in models), strict=True):
        assert torch.equal(p, q)
        torch.testing.assert_close(p, alone, atol=2e-5, rtol=1e-3)


def test_work_is_counted_by_contexts_and_not_where_nothing_is_computed(tmp_path: Path) -> None:
    """A row of four contexts of 25 tokens is four times a row of 25, and less than one of 100."""
    balance = WorkBalance(Ranks("cpu"), PolicyModel.from_pretrained(save_lm(tmp_path)))
    short, long = (make_trajectory(length, [(2, 5)]) for length in (25, 100))
    cut = make_trajectory(100, [(2, 5), (27, 30), (52, 55), (77, 80)])
    versions = cut.versions.copy()
    versions[[25, 50, 75]] = CONTEXT_START
    assert balance.work(dataclasses.replace(cut, versions=versions)) == pytest.approx(4 * balance.work(short))
    assert balance.work(long) - 4 * balance.work(short) == pytest.approx(100**2 - 4 * 25**2)


def test_groups_of_equal_returns_which_are_not_computed_are_no_work(tmp_path: Path) -> None:
    """Rank 0 has two groups that teach, rank 1 one that does and a long one that does not."""
    save_lm(tmp_path)
    meeting = Meeting()
    models = [PolicyModel.from_pretrained(tmp_path) for _ in range(2)]
    rows = drawn([0, 1]).trajectories
    equal = tuple(with_rewards(t, 0.0) for t in drawn([1]).trajectories)
    equal = tuple(dataclasses.replace(t, group_id=7, ticket_id=90 + i) for i, t in enumerate(equal))
    batches = [
        Batch(rows, (1.0,) * 4, (0, 0, 1, 1), 1.0),
        Batch((*equal, *drawn([3]).trajectories), (1.0,) * 4, (0, 0, 1, 1), 1.0),
    ]

    def work(rank: int) -> dict[str, float]:
        config = make_config(GroupRelative(), PPOClip(), max_staleness=None)
        ranks = TrainingRanks(rank, meeting)
        trainer = Trainer(config, ranks, models[rank])
        trainer.update(batches[rank], version=3, progress=0.0)
        return trainer.log.flush()

    balance = WorkBalance(Ranks("cpu"), models[0])
    loads = [sum(map(balance.work, rows)), sum(map(balance.work, drawn([3]).trajectories))]
    found = of_both(work, (0, 1))
    assert found[0]["learner/imbalance_drawn"] == pytest.approx(max(loads) / np.mean(loads))
    assert found[0]["advantage/zero_share"] + found[1]["advantage/zero_share"] > 0


def test_each_rank_judges_its_own_engines_alone(tmp_path: Path) -> None:
    """The engine of rank 0 reports log-probabilities that are wrong, that of rank 1 right ones."""
    save_lm(tmp_path)
    meeting = Meeting()
    models = [PolicyModel.from_pretrained(tmp_path) for _ in range(3)]

    def reported(t: Trajectory, error: float) -> Trajectory:
        right = log_probs_of(models[2], t)
        return dataclasses.replace(t, behaviour_log_probs=np.where(t.action_mask, right - error, 0).astype(np.float32))

    batches = [
        dataclasses.replace(batch, trajectories=tuple(reported(t, error) for t in batch.trajectories))
        for batch, error in ((drawn([0, 1]), 0.1), (drawn([2, 3]), 0.0))
    ]

    def work(rank: int) -> tuple[bool, float]:
        config = make_config(GroupRelative(), PPOClip(), max_staleness=None, mismatch_alarm=0.05)
        ranks = TrainingRanks(rank, meeting)
        trainer = Trainer(config, ranks, models[rank])
        trainer.update(batches[rank], version=3, progress=0.0)
        found = trainer.log.flush()
        assert found["learner/imbalance"] < found["learner/imbalance_drawn"]
        return trainer.monitor.alarm, found["mismatch/logprob_mean"]

    (alarm, wrong), (other_alarm, right) = of_both(work, (0, 1))
    assert (alarm, other_alarm) == (True, False)
    assert wrong == pytest.approx(0.1, abs=1e-3) and right == pytest.approx(0.0, abs=1e-3)


def test_a_batch_is_that_of_the_only_rank(tmp_path: Path) -> None:
    batch = drawn([0, 1])
    balance = WorkBalance(Ranks("cpu"), PolicyModel.from_pretrained(save_lm(tmp_path)))
    assert balance.exchange(batch, [True] * 4, stays=False) == (batch, [])
    assert balance.send_back(batch, {0: 1.0, 1: 2.0}) == {0: 1.0, 1: 2.0}
