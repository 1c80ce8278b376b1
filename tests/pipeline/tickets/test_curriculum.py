"""Tasks drawn by the success rate of their kind."""

import json
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

from impala_llm.pipeline.shm.journal import Journal
from impala_llm.pipeline.tickets.curriculum import Curriculum, merged
from impala_llm.pipeline.tickets.ledger import TicketLedger
from impala_llm.pipeline.tickets.task_order import TaskOrder

KINDS = {task: ("easy", "hard", "new")[task % 3] for task in range(300)}


def measured(least: float = 0.1, seed: int = 0) -> Curriculum:
    """A curriculum that has seen all episodes of `easy` succeed, all of `hard` fail, and none of `new`."""
    curriculum = Curriculum(KINDS, least, seed)
    for _ in range(500):
        curriculum.observe("easy", True)
        curriculum.observe("hard", False)
    return curriculum


def test_rates_follow_the_last_episodes_of_a_kind() -> None:
    curriculum = Curriculum(KINDS, 0.1, 0)
    assert curriculum.rate("easy") == 0.5
    curriculum.observe("easy", True)
    assert curriculum.rate("easy") == 0.75
    for _ in range(400):
        curriculum.observe("easy", True)
    assert 0.99 < curriculum.rate("easy") <= 1.0 and curriculum.rate("new") == 0.5
    for _ in range(400):
        curriculum.observe("easy", False)
    assert curriculum.rate("easy") < 0.01


def test_a_curriculum_with_the_state_of_another_knows_what_it_knew() -> None:
    state = json.loads(json.dumps(measured().state_dict()))
    other = Curriculum(KINDS, 0.1, 0, state)
    assert other.state_dict() == state and other.rate("new") == 0.5
    other.observe("easy", False)
    before = measured()
    before.observe("easy", False)
    assert other.rate("easy") == before.rate("easy"), "the next episode weighs as much"


def test_rates_of_several_ranks_are_weighed_by_their_episodes() -> None:
    states = [
        {"kinds": ["easy", "hard"], "rates": [1.0, 0.5], "counts": [30, 2]},
        {"kinds": ["easy"], "rates": [0.5], "counts": [10]},
    ]
    assert merged(states) == {"kinds": ["easy", "hard"], "rates": [35 / 40, 0.5], "counts": [40, 2]}
    assert merged([]) == {"kinds": [], "rates": [], "counts": []}


def test_kinds_that_always_succeed_or_fail_are_seldom_played() -> None:
    order = TaskOrder(list(KINDS), seed=1, curriculum=measured())
    played = [order.next() for _ in range(1200)]
    counts = Counter(KINDS[task] for task, _ in played)
    assert counts["new"] > 900 and 60 < counts["easy"] < 140 and 60 < counts["hard"] < 140
    plain = TaskOrder(list(KINDS), seed=1)
    assert all(plain.task_of(group) == task for task, group in played), "a group's task is that of the order without it"
    groups = [group for _, group in played]
    assert groups == sorted(set(groups))
    for epoch in range(max(groups) // 300):
        of_epoch = [task for task, group in played if group // 300 == epoch]
        assert len(of_epoch) == len(set(of_epoch)) and set(of_epoch) >= {task for task in KINDS if task % 3 == 2}


def test_the_same_rates_and_seed_give_the_same_order() -> None:
    def first(seed: int) -> list[tuple[int, int]]:
        order = TaskOrder(list(KINDS), seed=1, curriculum=measured(seed=seed))
        return [order.next() for _ in range(50)]

    assert first(0) == first(0) != first(1)


def test_ranks_share_the_groups() -> None:
    taken = []
    for rank in range(3):
        order = TaskOrder(list(KINDS), seed=1, rank=rank, world_size=3, curriculum=measured())
        taken += [order.next()[1] for _ in range(100)]
    assert len(set(taken)) == 300


def test_what_is_passed_over_for_ever_is_played_all_the_same() -> None:
    curriculum = Curriculum(dict.fromkeys(range(5), "all"), 0.001, 0)
    for _ in range(5000):
        curriculum.observe("all", True)
    order = TaskOrder(range(5), curriculum=curriculum)
    assert len([order.next() for _ in range(3)]) == 3


def test_tickets_are_those_of_before_after_a_kill(tmp_path: Path) -> None:
    def ledger() -> TicketLedger:
        order = TaskOrder(list(KINDS), 2, seed=1, curriculum=measured())
        return TicketLedger(order, 8, None, max_open=40, journal=Journal(tmp_path / "journal"))

    before = ledger()
    before.request("actor-0", want=24)
    granted = [ticket for _, tickets in before.grantable() for ticket in tickets]
    for ticket in granted[:10]:
        before.received(ticket.ticket_id, f"episode-{ticket.ticket_id}")
    after = ledger()
    after.recover([])
    after.request("actor-1", want=24)
    again = {ticket.ticket_id: ticket for _, tickets in after.grantable() for ticket in tickets}
    same = [ticket for ticket in granted if ticket.ticket_id in again]
    assert len(same) >= 14 and all(again[t.ticket_id].task_id == t.task_id for t in same)


ENVIRONMENT = """
class Suite:
    name, system_prompt = "halves", ""

    def tasks(self, split):
        return {"train": range(200), "validation": range(200, 220), "test": range(220, 240)}[split]

    def session(self, training):
        return Episode()

    def signature(self, task_id):
        return "hopeless" if task_id % 2 else "even"

class Episode:
    def reset(self, task_id):
        self.hopeless = task_id % 2
        return "say something", {}

    def step(self, action):
        score = 0.0 if self.hopeless else float(action[:1] < "a")
        return "", score, True, False, {"score": score, "success": score == 1, "stats": {"hopeless": self.hopeless}}
"""


@pytest.mark.system
def test_a_run_turns_to_the_tasks_that_teach(user_folder: Path) -> None:
    """All tasks of the first update were given out before anything was known. Synchronous: else it is a matter of pace
    how many updates these are for, and whether an episode ends in each."""
    (user_folder / "halves.py").write_text(ENVIRONMENT)
    words = [
        *("model=scratch", "env=halves:Suite", "algorithm.curriculum=0.05", "algorithm.max_staleness=0"),
        *(f"run.name=halves-{user_folder.name}", "run.dir=run", "run.terminal=false"),
        *("learner.total_updates=16", "learner.batch_size=32"),
        *("engine.max_new_tokens=1", "engine.max_length=64", "learner.learning_rate=0"),
    ]
    command = [sys.executable, "-m", "impala_llm.cli", "train", *words]
    done = subprocess.run(command, cwd=user_folder, capture_output=True, text=True, timeout=250)
    assert done.returncode == 0, done.stderr
    rows = [json.loads(line) for line in (user_folder / "run/tensorboard/metrics.jsonl").read_text().splitlines()]
    shares = [row["env/hopeless"] for row in rows]
    assert sum(shares[-5:]) / 5 < 0.25 < shares[0]
