"""Processes killed, stopped and cut off at random: nothing is lost or done twice, and the checker would see if it were.

Ten minutes of it: `python tools/chaos.py --minutes 10 --seed 0`.
"""

import itertools
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import pytest

from tests.system.chaos.checker import Logs, Verdict, check
from tests.system.chaos.events import Event, EventLog, read_events
from tests.system.chaos.settings import NUM_ACTORS, NUM_ENGINES, NUM_RANKS

ROOT = Path(__file__).parents[2]


def run_chaos(*arguments: str) -> tuple[int, dict[str, Any]]:
    command = [sys.executable, str(ROOT / "tools" / "chaos.py"), "--json", *arguments]
    done = subprocess.run(command, stdout=subprocess.PIPE, check=False)
    return done.returncode, json.loads(done.stdout)


@pytest.mark.system
def test_nothing_is_lost_or_trained_on_twice_whatever_is_killed_when() -> None:
    # In its twenty seconds this seed kills ranks, one of them as it starts, and all other kinds, and fills the memory.
    code, found = run_chaos("--minutes", "0.35", "--seed", "53")
    assert found["violations"] == []
    assert code == 0
    assert found["restarts_of_ranks"] > 0 and found["restarts"] > found["restarts_of_ranks"]
    assert found["acknowledged"] > 100 and found["weight_reads"] > 10 and found["steps"] > 2


@pytest.mark.system
def test_an_actor_that_takes_a_record_for_acknowledged_too_early_is_found_out() -> None:
    with tempfile.TemporaryDirectory() as logs:  # not tmp_path: socket paths must be short
        code, found = run_chaos("--minutes", "0.05", "--seed", "1", "--sabotage", "claim_early", "--logs", logs)
    assert code == 1
    assert any("was acknowledged and never arrived" in violation for violation in found["violations"])


# --- the checker alone: a short history that is right, and what makes it wrong

RANK, LATER_RANK, ACTOR, ENGINE = 1, 2, 3, 4
"""Process ids."""


class History:
    """Two ranks, one of them with four tickets: 0 and 1 (of group 0), 4 and 5 (of group 2), one step and two ends."""

    def __init__(self) -> None:
        self._clock = itertools.count()
        self.actor = [self.event(ACTOR, "start")]
        for ticket in (0, 1, 4):
            self.actor.append(self.event(ACTOR, "created", f"e{ticket}", 0, ticket, f"digest {ticket}", ""))
        self.actor.append(self.event(ACTOR, "created", "e5", 0, 5, "digest 5", "future"))
        self.rank = [self.event(RANK, "start", 0), self.event(RANK, "committed", 0)]
        self.rank += [self.event(RANK, "arrived", ticket, f"e{ticket}", 0, f"digest {ticket}") for ticket in (0, 1, 4)]
        self.rank += [self.event(RANK, "trained", 1, [0, 1]), self.event(RANK, "committed", 1)]
        self.rank += [self.event(RANK, "refusing", 5), self.event(RANK, "refused", 5)]
        self.rank += [self.event(RANK, "evicting", [4]), self.event(RANK, "evicted", [4])]
        self.actor += [self.event(ACTOR, "acknowledged", f"e{ticket}", 0, "") for ticket in (0, 1, 4)]
        self.engine = [self.event(ENGINE, "read", 0, True), self.event(ENGINE, "read", 1, True)]
        self.left = {"open": 0.0}
        self.num_groups = 2

    def event(self, pid: int, kind: str, *values: object) -> Event:
        return Event(float(next(self._clock)), pid, kind, list(values))

    def verdict(self, last_version: int = 1) -> Verdict:
        last = self.event(self.rank[-1].pid, "final", last_version, self.num_groups, self.left)
        idle = [self.event(9, "start", 0), self.event(9, "final", last_version, 0, {})]
        return check(
            Logs(
                [self.actor, *[[] for _ in range(NUM_ACTORS - 1)]],
                [[*self.rank, last], *[idle for _ in range(NUM_RANKS - 1)]],
                [self.engine, *[[] for _ in range(NUM_ENGINES - 1)]],
                [],
                [],
            ),
            last_version,
        )


def drop(events: list[Event], kind: str) -> None:
    events.remove(next(event for event in events if event.kind == kind))


def test_a_right_history_has_no_violations() -> None:
    verdict = History().verdict()
    assert verdict.violations == []
    assert [verdict.figures[name] for name in ("trained", "evicted", "refused", "acknowledged")] == [2, 1, 1, 3]


def test_a_lost_step_is_made_again_with_other_tickets() -> None:
    history = History()
    at = next(i for i, event in enumerate(history.rank) if event.kind == "trained")
    history.rank.insert(at, Event(history.rank[at].time - 0.5, RANK, "trained", [1, [1, 4]]))
    assert history.verdict().violations == []


def test_an_end_that_a_kill_left_open_may_have_been_one() -> None:
    history = History()
    drop(history.rank, "evicted")
    verdict = history.verdict()
    assert verdict.violations == []
    assert verdict.figures["uncertain_ends"] == 1


def lose(history: History) -> None:
    drop(history.rank, "arrived")


def change_bytes(history: History) -> None:
    history.rank[2].values[3] = "another"


def make_up(history: History) -> None:
    history.rank.insert(5, history.event(RANK, "arrived", 4, "nobody's", 0, "digest"))


def keep_malformed(history: History) -> None:
    history.rank.insert(5, history.event(RANK, "arrived", 5, "e5", 0, "digest 5"))


def deliver_twice(history: History) -> None:
    history.rank.insert(5, history.event(RANK, "arrived", 4, "e4", 0, "digest 4"))


def take_two_attempts(history: History) -> None:
    history.actor.append(history.event(ACTOR, "created", "e4b", 0, 4, "digest 4b", ""))
    history.rank.insert(5, history.event(LATER_RANK, "arrived", 4, "e4b", 0, "digest 4b"))
    history.rank.insert(5, history.event(LATER_RANK, "start", 0))


def train_twice(history: History) -> None:
    history.rank += [history.event(RANK, "trained", 2, [0]), history.event(RANK, "committed", 2)]


def train_and_evict(history: History) -> None:
    history.rank += [history.event(RANK, "evicting", [0]), history.event(RANK, "evicted", [0])]


def bring_back(history: History) -> None:
    history.rank += [
        history.event(LATER_RANK, "start", 1),
        history.event(LATER_RANK, "arrived", 0, "e0", 0, "digest 0"),
    ]


def step_again(history: History) -> None:
    history.rank += [history.event(LATER_RANK, "start", 1), history.event(LATER_RANK, "trained", 1, [0, 1])]


def forget_a_ticket(history: History) -> None:
    history.num_groups = 3


def leave_open(history: History) -> None:
    history.left["open"] = 1.0


def go_back(history: History) -> None:
    history.engine.append(history.event(ENGINE, "read", 0, True))


def tear(history: History) -> None:
    history.engine.append(history.event(ENGINE, "read", 1, False))


@pytest.mark.parametrize(
    ("spoil", "last_version", "said"),
    [
        (lose, 1, "episode e0 was acknowledged and never arrived"),
        (change_bytes, 1, "episode e0 of ticket 0 arrived with other contents than it was made with"),
        (make_up, 1, "episode nobody's of ticket 4 arrived, and no actor made it"),
        (keep_malformed, 1, "episode e5 of ticket 5 arrived, and it was malformed"),
        (deliver_twice, 1, "episode e4 of ticket 4 arrived twice at one process"),
        (take_two_attempts, 1, "ticket 4 brought 2 episodes: e4, e4b"),
        (train_twice, 2, "ticket 0 ended 2 times: trained in step 1, trained in step 2"),
        (train_and_evict, 1, "ticket 0 ended 2 times: evicted, trained in step 1"),
        (bring_back, 1, "episode e0 came back after step 1, which had trained on it"),
        (step_again, 1, "step 1 was made again from version 1"),
        (forget_a_ticket, 1, "ticket 8 ended 0 times: never"),
        (leave_open, 1, "1 open are left in the end"),
        (go_back, 1, "engine 0 read version 0 after 1"),
        (tear, 1, "engine 0 read version 1, and not all of its bytes were right"),
    ],
    ids=lambda value: value.__name__ if callable(value) else "",
)
def test_the_judge_finds(spoil, last_version: int, said: str) -> None:
    history = History()
    spoil(history)
    violations = history.verdict(last_version).violations
    assert any(said in violation for violation in violations), violations


def test_a_line_that_was_cut_short_spoils_no_other(tmp_path: Path) -> None:
    log = EventLog(tmp_path / "log")
    log.say("first", 1)
    with (tmp_path / "log").open("a") as file:
        file.write('\n[1.0, 7, "half')
    log.say("last", [2, 3])
    assert [(event.kind, event.values) for event in read_events(tmp_path / "log")] == [
        ("first", [1]),
        ("last", [[2, 3]]),
    ]
