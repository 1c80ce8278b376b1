"""An update of two ranks: trained as one, asked for the same sums, left out together where a number is not finite."""

import dataclasses
import logging
import math
import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

from impala_llm.algorithms.advantages import GroupRelative
from impala_llm.algorithms.interface import Credit, Loss
from impala_llm.algorithms.losses import PPOClip
from impala_llm.algorithms.stale_losses import M2PO
from impala_llm.algorithms.vtrace import GAE
from impala_llm.config import load
from impala_llm.learning.batch_source import Batch
from impala_llm.learning.policy.model import PolicyModel
from impala_llm.learning.ranks.parallel import Ranks
from impala_llm.settings import LearnerConfig
from impala_llm.trainer import Trainer
from impala_llm.trajectory import Trajectory
from tests.learning.builders import (
    make_batch,
    make_config,
    save_lm,
    trainer_with,
    varied,
    with_infinite_return,
)
from tests.two_ranks import Meeting, TrainingRanks


@pytest.mark.parametrize(("credit", "loss"), [(GAE(), PPOClip()), (GroupRelative(), M2PO(threshold=0.5))], ids=str)
def test_two_ranks_train_as_one_does_on_the_whole_batch(tmp_path: Path, credit: Credit, loss: Loss) -> None:
    """With whitened advantages and two passes: what is summed over ranks, before the first step and in each."""
    save_lm(tmp_path)
    whole = [dataclasses.replace(t, ticket_id=i, group_id=i % 2) for i, t in enumerate(make_batch())]

    def trained(ranks: Ranks, rows: list[Trajectory]) -> list[torch.Tensor]:
        config = make_config(credit, loss, whiten_advantages=True, max_staleness=None)
        config.learner = LearnerConfig(warmup_updates=0, decay="constant", epochs=2)
        with lock:
            model = PolicyModel.from_pretrained(tmp_path)
            trainer = Trainer(config, ranks, model)
        batch = Batch(tuple(rows), (1.0,) * len(rows), (0,) * len(rows), 1.0)
        trainer.update(batch, version=3, progress=0.0)
        return [p.detach() for p in trainer.model.parameters()]

    lock = threading.Lock()
    meeting = Meeting()

    def work(rank: int) -> list[torch.Tensor]:
        return trained(TrainingRanks(rank, meeting), whole[rank::2])

    with ThreadPoolExecutor(2) as pool:
        results = list(pool.map(work, (0, 1)))
    alone = trained(Ranks("cpu"), whole)
    for mine, other, together in zip(alone, *results, strict=True):
        assert torch.equal(other, together)
        torch.testing.assert_close(mine, other, atol=2e-5, rtol=1e-3)


class RecordedRanks(TrainingRanks):
    """Remembers the sums that it was asked for, by their lengths."""

    def __init__(self, rank: int, meeting: Meeting) -> None:
        super().__init__(rank, meeting)
        self.asked: list[int] = []

    def sum(self, numbers: Sequence[float]) -> list[float]:
        self.asked.append(len(numbers))
        return super().sum(numbers)

    def sum_gradients(self, model: torch.nn.Module) -> None:
        self.asked.append(-1)
        super().sum_gradients(model)


# --- what is not finite


@pytest.mark.parametrize("algorithm", ["ppo", "group_relative"])
def test_all_ranks_leave_a_step_out_together_when_one_has_a_number_that_is_not_finite(
    tmp_path: Path, algorithm: str, caplog: pytest.LogCaptureFixture
) -> None:
    policy = save_lm(tmp_path)
    meeting = Meeting()
    good = make_batch()
    bad = [*good[:3], with_infinite_return(good[3]), *good[4:]]
    summaries: dict[int, list[dict[str, float]]] = {0: [], 1: []}
    moved: dict[int, list[bool]] = {0: [], 1: []}

    config = load(["model=scratch", f"algorithm={algorithm}", "algorithm.group_size=6", "learner.batch_size=12"])
    models = [PolicyModel.from_pretrained(policy) for _ in range(2)]

    def work(rank: int) -> None:
        model = models[rank]
        trainer = Trainer(config, TrainingRanks(rank, meeting), model)
        for version, episodes in enumerate([bad if rank else good, good], start=3):
            before = [p.detach().clone() for p in model.parameters()]
            varied = [dataclasses.replace(t, ticket_id=i) for i, t in enumerate(episodes)]
            result = trainer.update(Batch(tuple(varied), (1.0,) * 6, tuple(range(6)), 1.0), version, 0.0)
            assert all(map(math.isfinite, result.abs_advantages.values())), "the buffer takes no others"
            moved[rank].append(any(not torch.equal(p, q) for p, q in zip(model.parameters(), before, strict=True)))
            assert all(bool(p.isfinite().all()) for p in model.parameters())
            summaries[rank].append(result.metrics.flush())

    with caplog.at_level(logging.WARNING), ThreadPoolExecutor(2) as pool:
        list(pool.map(work, (0, 1)))
    assert moved == {0: [False, True], 1: [False, True]}
    for rank in (0, 1):
        assert [summary["optimizer/skipped"] for summary in summaries[rank]] == [1.0, 0.0]
    assert [summaries[rank][0]["optimizer/not_finite"] for rank in (0, 1)] == [0.0, 1.0]
    [text] = [record.getMessage() for record in caplog.records if "NOT FINITE" in record.getMessage()]
    assert "episode-3" in text and "episode-4" not in text


def test_only_the_steps_that_have_a_bad_row_are_left_out_of_an_update(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """In each of two epochs one minibatch of three has the bad row."""
    steps = ("learner.epochs=2", "learner.minibatches=3", "learner.warmup_updates=0")
    trainer = trainer_with(tmp_path, "algorithm=ppo", *steps)
    good = make_batch()
    bad = (*good[:3], with_infinite_return(good[3]), *good[4:])
    with caplog.at_level(logging.WARNING):
        trainer.update(Batch(bad, (1.0,) * 6, tuple(range(6)), 1.0), 3, 0.0)
    state = trainer.optimizer.state_dict()
    assert {tensor.item() for name, tensor in state.items() if name.endswith(".step")} == {4.0}
    assert trainer.log.flush()["optimizer/not_finite"] == 1.0
    [text] = [record.getMessage() for record in caplog.records if "NOT FINITE" in record.getMessage()]
    assert "episode-3" in text and "more of the batch" not in text
    assert all(bool(p.isfinite().all()) for p in trainer.model.parameters())


class SteepAt(PolicyModel):
    """Has an infinite gradient in micro-batches with a token."""

    token = 49

    def hidden(self, tokens: torch.Tensor, position_ids: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
        hidden = super().hidden(tokens, position_ids, lengths)
        if hidden.requires_grad and bool((tokens == self.token).any()):
            hidden.register_hook(lambda gradient: gradient + math.inf)
        return hidden


def test_the_episode_whose_gradient_alone_is_not_finite_is_named(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Its losses are finite, and it shares a micro-batch with others that are as they should be."""
    model = SteepAt.from_pretrained(save_lm(tmp_path))
    episodes = [dataclasses.replace(t, tokens=t.tokens % model.token) for t in make_batch()]
    episodes[3].tokens[0] = model.token
    trainer = Trainer(load(["model=scratch", "algorithm=ppo"]), Ranks("cpu"), model)
    before = [p.detach().clone() for p in model.parameters()]
    with caplog.at_level(logging.WARNING):
        trainer.update(Batch(tuple(episodes), (1.0,) * 6, tuple(range(6)), 1.0), 3, 0.0)
    summary = trainer.log.flush()
    assert (summary["optimizer/skipped"], summary["optimizer/not_finite"]) == (1.0, 1.0)
    [text] = [record.getMessage() for record in caplog.records if "NOT FINITE" in record.getMessage()]
    assert "episode-3" in text
    assert all(torch.equal(p, q) and p.grad is None for p, q in zip(model.parameters(), before, strict=True))


@pytest.mark.parametrize("whitens", ["true", "false"])
@pytest.mark.parametrize("algorithm", ["ppo", "group_relative"])
def test_ranks_are_asked_for_the_same_sums_in_the_same_order_whatever_their_batches_are(
    tmp_path: Path, algorithm: str, whitens: str
) -> None:
    """Rank 0 has six episodes that differ; rank 1 six that are equal, then six of which one is not finite."""
    policy = save_lm(tmp_path)
    words = [f"algorithm={algorithm}", "algorithm.group_size=6", f"algorithm.whiten_advantages={whitens}"]
    config = load(["model=scratch", *words, "learner.batch_size=12", "learner.epochs=2", "learner.minibatches=2"])
    models = [PolicyModel.from_pretrained(policy) for _ in range(2)]
    meeting = Meeting()
    ranks = [RecordedRanks(rank, meeting) for rank in (0, 1)]
    differing = varied().trajectories
    equal = (differing[0],) * 6
    batches = [[differing, differing], [equal, (with_infinite_return(differing[0]), *differing[1:])]]

    def work(rank: int) -> None:
        trainer = Trainer(config, ranks[rank], models[rank])
        for version, trajectories in enumerate(batches[rank], start=3):
            result = trainer.update(dataclasses.replace(varied(), trajectories=trajectories), version, 0.0)
            assert all(map(math.isfinite, result.abs_advantages.values()))

    with ThreadPoolExecutor(2) as pool:
        list(pool.map(work, (0, 1)))
    assert ranks[0].asked == ranks[1].asked
    assert ranks[0].asked.count(-1) == 2 * 4, "a gradient for each minibatch of each pass"
