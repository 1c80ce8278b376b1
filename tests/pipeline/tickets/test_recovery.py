"""A ledger that goes on from the journal of one that was killed: no ticket is lost, none that had ended comes back."""

import random
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from statistics import fmean

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from impala_llm.pipeline.shm.journal import Journal
from impala_llm.pipeline.shm.run_directory import RunDirectoryError
from impala_llm.pipeline.tickets.ledger import Ticket, TicketLedger, Verdict
from impala_llm.pipeline.tickets.task_order import TaskOrder
from impala_llm.trajectory import unroll_id
from tests.examples import examples

Key = tuple[int, str, int]
ACTORS = ["a", "b", "c"]


class Run:
    """A learner rank and its actors, whose ledger can be killed; and what must be true of it, kept apart from it.

    Real in here are the ledger and the journal; the weights' board and the trajectory store are `version` and `stored`.
    """

    def __init__(
        self,
        path: Path,
        rng: random.Random,
        group_size: int = 1,
        max_staleness: int | None = 1,
        rank: int = 0,
        world_size: int = 1,
        min_rows: int = 1 << 14,
    ) -> None:
        self.path, self.rng, self.min_rows = path, rng, min_rows
        self.group_size, self.max_staleness, self.rank, self.world_size = group_size, max_staleness, rank, world_size
        self.batch_size = 2 * group_size
        self.version = 0
        """The newest that is kept: where the next process begins."""
        self.under_way = False
        """Whether a step has been trained on and its version is yet to be made."""
        self.stored: list[Key] = []
        self.ended: set[int] = set()
        self.refused: set[int] = set()
        self.in_step: list[int] = []
        """Trained on by the step under way, and by those before it whose versions were not kept, by `unroll_id`."""
        self.settled: dict[int, set[int]] = {}
        """Unrolls that were evicted, or trained on by a step that counts, by ticket."""
        self.known: dict[int, Ticket] = {}
        self.open_at: dict[int, str] = {}
        self.lengths: set[tuple[float, ...]] = {()}
        """Unrolls of episodes that the forecast may rest on, from the first one that had several: one of these."""
        self.noted = set(self.lengths)
        """Those of the last step that was noted in the journal."""
        self.attempts: Counter[int] = Counter()
        """Failures of a ticket."""
        self.losses: Counter[int] = Counter()
        """Actors that were lost with a ticket."""
        self.crashes: Counter[int] = Counter()
        """Deaths in steps that trained on an unroll, by `unroll_id`."""
        self.newest = 0
        self.num_over = 0
        """How many of `in_step` steps before the one under way have trained on."""
        self.ledger = self.new_ledger()

    def new_ledger(self) -> TicketLedger:
        order = TaskOrder(range(100, 107), self.group_size, 3, self.rank, self.world_size)
        max_open = 4 * self.batch_size if self.max_staleness is None else None
        return TicketLedger(
            order,
            self.batch_size,
            self.max_staleness,
            max_open,
            version=self.version,
            journal=Journal(self.path, self.min_rows),
        )

    # --- what actors and learner do

    def grant(self) -> int:
        count = 0
        for actor, tickets in self.ledger.grantable():
            for ticket in tickets:
                assert ticket.ticket_id not in self.ended
                assert self.known.setdefault(ticket.ticket_id, ticket) == ticket
                assert ticket.min_version <= self.newest
                assert ticket.ticket_id not in self.open_at
                self.open_at[ticket.ticket_id] = actor
                count += 1
        return count

    def request(self) -> None:
        self.ledger.request(self.rng.choice(ACTORS), self.rng.randint(0, 8))

    def unrolls_of(self, ticket_id: int) -> set[int]:
        """All that were received."""
        return {key[2] for key in self.stored if key[0] == ticket_id} | self.settled.get(ticket_id, set())

    def receive(self, more: bool = False) -> None:
        """more: another unroll will follow."""
        if self.open_at:
            ticket_id = self.rng.choice(sorted(self.open_at))
            unroll = len(self.unrolls_of(ticket_id))
            key = (ticket_id, f"episode of {ticket_id} at {self.open_at[ticket_id]}", unroll)
            if unroll:
                assert self.ledger.received(ticket_id, "another episode", 0) is Verdict.SUPERSEDED
            assert self.ledger.received(*key, more) is Verdict.ACCEPTED
            self.stored.append(key)
            if not more:
                del self.open_at[ticket_id]
                self.lengths = {(*seen, unroll + 1) if unroll or seen else seen for seen in self.lengths}

    def receive_unroll(self) -> None:
        if self.group_size == 1:  # others are of whole episodes
            self.receive(more=True)

    def receive_late_unroll(self) -> None:
        """Receive an unroll of an episode that counts as whole, or was cut."""
        if self.group_size > 1:
            return
        waiting = [key for key in self.stored if unroll_id(key[0], key[2]) not in self.in_step]
        if closed := [key for key in waiting if key[0] not in self.open_at]:
            ticket_id, episode_id, _ = self.rng.choice(closed)
            unroll = self.rng.randint(0, 3)
            known = unroll in self.unrolls_of(ticket_id)
            verdict = self.ledger.received(ticket_id, episode_id, unroll)
            assert verdict is (Verdict.DUPLICATE if known else Verdict.ACCEPTED)
            if not known:
                self.stored.append((ticket_id, episode_id, unroll))

    def fail(self) -> None:
        self._give_up(self.ledger.failed, most=3)

    def refuse(self) -> None:
        self._give_up(self.ledger.refused, most=1)

    def _give_up(self, say: Callable[[int, str], None], most: int) -> None:
        """most: attempts at a ticket, of which those in earlier processes count too."""
        if self.open_at:
            ticket_id = self.rng.choice(sorted(self.open_at))
            say(ticket_id, self.open_at.pop(ticket_id))
            if self.unrolls_of(ticket_id):
                self.end_what_is_done()
                return
            self.attempts[ticket_id] += 1
            assert (self.ledger.lookup(ticket_id) is None) == (self.attempts[ticket_id] >= most)
            if self.attempts[ticket_id] >= most:
                self.ended.add(ticket_id)
                self.refused.add(ticket_id)

    def end_what_is_done(self) -> None:
        """Tickets that brought something, will bring no more, and have nothing left."""
        left = {key[0] for key in self.stored} | self.open_at.keys()
        self.ended |= self.settled.keys() - left

    def settle(self, unroll_ids: list[int]) -> None:
        for ticket_id, episode_id, unroll in list(self.stored):
            if unroll_id(ticket_id, unroll) in unroll_ids:
                self.stored.remove((ticket_id, episode_id, unroll))
                self.settled.setdefault(ticket_id, set()).add(unroll)
        self.end_what_is_done()

    def received_ids(self) -> list[int]:
        return [i for i in (unroll_id(key[0], key[2]) for key in self.stored) if i not in self.in_step]

    def train(self) -> None:
        ids = self.received_ids()[: self.rng.randint(1, self.batch_size)]
        if ids and not self.under_way:  # one step at a time
            self.ledger.trained(ids)
            self.num_over = len(self.in_step)
            self.in_step += ids
            self.under_way = True

    def evict(self) -> None:
        if ids := self.received_ids():
            number = self.rng.choice(ids)
            self.ledger.evicted([number])
            self.settle([number])

    def publish(self) -> None:
        """The step's version is on the board: whatever happens now, it counts, as do those before it."""
        self.version = self.ledger.version + 1
        self.newest = max(self.newest, self.version)
        self.settle(self.in_step)
        self.in_step = []

    def step(self) -> None:
        if self.under_way:
            self.publish()
            self.ledger.advance(self.version)
            self.noted = set(self.lengths)
            self.under_way = False

    def step_without_keeping(self) -> None:
        is_free = self.max_staleness is None or self.ledger.version - self.version < self.max_staleness
        if self.under_way and is_free:
            self.ledger.advance(self.ledger.version + 1, kept=False)
            self.noted = set(self.lengths)
            self.newest = max(self.newest, self.ledger.version)
            self.under_way = False

    def lose_actor(self) -> None:
        actor = self.rng.choice(ACTORS)
        given_up = {ticket.ticket_id for ticket in self.ledger.actor_lost(actor)}
        mine = [ticket_id for ticket_id, other in self.open_at.items() if other == actor]
        self.losses.update(mine)
        assert given_up == {i for i in mine if self.losses[i] >= 5 and not self.unrolls_of(i)}
        self.ended |= given_up
        self.refused |= given_up
        self.open_at = {ticket_id: other for ticket_id, other in self.open_at.items() if other != actor}
        self.end_what_is_done()

    # --- death

    def kill(self) -> None:
        """Now, or after the publication of a version and before its announcement."""
        before = self.live()
        leftover = [key for key in self.stored if unroll_id(key[0], key[2]) in self.in_step]
        if self.under_way and self.rng.random() < 0.5:
            self.publish()
        else:
            leftover = []
            self.crashes.update(self.in_step[self.num_over :] if self.under_way else [])
            self.in_step = []
        self.under_way = False
        # Records of tickets that have ended, where the process died before it said so to the trajectory store.
        found = self.stored + self.rng.sample(leftover, self.rng.randint(0, len(leftover)))
        held = self.open_at
        self.open_at = {ticket_id: actor for ticket_id, actor in held.items() if not self.unrolls_of(ticket_id)}
        self.end_what_is_done()
        if self.ended and self.rng.random() < 0.3:
            found.append((self.rng.choice(sorted(self.ended)), "an old episode", 0))
        self.rng.shuffle(found)
        self.ledger = self.new_ledger()
        # The forecast is noted with each step, and with whatever makes the journal anew.
        self.lengths = {now[:end] for now in self.lengths for end in range(len(now) + 1)}
        self.lengths = {seen for seen in self.lengths if any(seen[: len(noted)] == noted for noted in self.noted)}
        self.lengths = {(fmean(seen),) * min(len(seen), 8) if seen else seen for seen in self.lengths}
        wanted = self.ledger.recover(found)
        self.noted = set(self.lengths)
        quarantined = [number for number in self.received_ids() if self.crashes[number] >= 2]
        assert sorted(self.ledger.quarantined) == sorted(quarantined)
        self.settle(quarantined)
        assert wanted == [key in self.stored for key in found]
        self.check(before)
        whole, self.open_at = self.open_at, {}
        for actor in ACTORS:  # some of them come back
            mine = [ticket_id for ticket_id, other in whole.items() if other == actor]
            if self.rng.random() < 0.5:
                self.ledger.resumed(actor, [ticket_id for ticket_id, other in held.items() if other == actor])
                self.open_at |= dict.fromkeys(mine, actor)
                assert [t.ticket_id for t in self.ledger.open_tickets(actor)] == sorted(mine)

    def live(self) -> set[int]:
        """Tickets that the ledger has, all of them: it has no more than some of those that it never granted."""
        most = max(self.known, default=0) + 64 * self.world_size
        return {ticket_id for ticket_id in range(most) if self.ledger.lookup(ticket_id) is not None}

    def check(self, before: set[int]) -> None:
        """The new ledger against what was known of the old one.

        Args:
            before: tickets that the old one had.
        """
        arrived = {key[0]: key[1] for key in self.stored}
        live = (before | arrived.keys()) - self.ended
        assert self.live() == live and self.ledger.version == self.version
        taken = {ticket_id // self.group_size for ticket_id in live | self.ended}
        assert taken == {index * self.world_size + self.rank for index in range(len(taken))}, "the order has no gap"
        for ticket_id in live:
            assert self.ledger.lookup(ticket_id) == self.known.get(ticket_id, self.ledger.lookup(ticket_id))
            of_another = self.ledger.check(ticket_id, "another episode")
            assert of_another is (Verdict.SUPERSEDED if ticket_id in arrived else Verdict.ACCEPTED)
            for unroll in self.unrolls_of(ticket_id):
                assert self.ledger.check(ticket_id, arrived[ticket_id], unroll) is Verdict.DUPLICATE
        counters = self.ledger.counters()
        assert [counters[name] for name in ("ready", "open", "in_buffer")] == [
            *(len(live) - len(arrived), 0, len(arrived)),
        ]
        # A refused member of a group that lives is charged too.
        of_live_groups = Counter(ticket_id // self.group_size for ticket_id in live)
        lost = Counter(i // self.group_size for i in self.refused if i // self.group_size in of_live_groups)
        assert counters["charged"] == len(live) + lost.total()
        ended = Counter(ticket_id // self.group_size for ticket_id in self.ended)
        assert {group: self.ledger.lost_members(group) for group in of_live_groups} == {
            group: ended[group] for group in of_live_groups
        }

    def check_load(self) -> None:
        """Check what admission counts: the unrolls that wait to be trained on, and those that are forecast for the
        tickets that are not whole, one each at least."""
        if self.group_size == 1:  # no slots of lost members
            counters = self.ledger.counters()
            num_playing = counters["ready"] + counters["open"]
            brought = sum(len(self.unrolls_of(ticket_id)) for ticket_id in self.open_at)

            def fits(seen: tuple[float, ...]) -> bool:
                more = num_playing * (fmean(seen or [1]) - 1)
                # The mean is another sum in the ledger: where it ends on a half it may be rounded either way.
                to_come = [max(num_playing, num_playing + round(more + e) - brought) for e in (-1e-3, 1e-3)]
                return counters["waiting"] - len(self.received_ids()) in to_come

            self.lengths = set(filter(fits, self.lengths))
            assert self.lengths

    def finish(self, num_steps: int) -> None:
        """The run goes on: it is never stuck."""
        for actor in ACTORS:
            self.ledger.request(actor, 8)
        for _ in range(num_steps):
            self.grant()
            while self.open_at:
                self.receive()
            assert self.stored or self.under_way
            if not self.under_way:
                ids = self.received_ids()[: self.batch_size]
                self.ledger.trained(ids)
                self.in_step += ids
                self.under_way = True
            self.step()


@settings(deadline=None, max_examples=examples(25))
@given(
    st.integers(0, 2**32),
    st.sampled_from([(1, 1), (1, 0), (1, 3), (1, None), (2, 0), (2, 1), (4, 2), (2, None)]),
    st.sampled_from([(0, 1), (1, 3)]),
    st.sampled_from([4, 40, 1 << 10]),
)
def test_no_ticket_is_lost_or_comes_back_whenever_the_ledger_dies(
    tmp_path_factory: pytest.TempPathFactory,
    seed: int,
    group_and_staleness: tuple[int, int | None],
    rank_and_world: tuple[int, int],
    min_rows: int,
) -> None:
    rng = random.Random(seed)
    run = Run(
        tmp_path_factory.mktemp("recovery") / "a.journal", rng, *group_and_staleness, *rank_and_world, min_rows=min_rows
    )
    run.ledger.recover([])
    actions = {
        **{run.request: 2, run.grant: 4, run.receive: 8, run.receive_unroll: 4, run.receive_late_unroll: 1},
        **{run.fail: 2, run.refuse: 1, run.train: 2, run.evict: 1, run.step: 2, run.lose_actor: 1, run.kill: 1},
        run.step_without_keeping: 1,
    }
    for action in rng.choices(list(actions), list(actions.values()), k=150):
        action()
        run.check_load()
    run.kill()
    run.kill()  # twice in a row: nothing happened in between
    run.finish(10)
    run.kill()
    run.finish(3)


def started(tmp_path: Path, **arguments: int) -> Run:
    run = Run(tmp_path / "a.journal", random.Random(1), **arguments)
    run.ledger.request("a", 8)
    run.grant()
    return run


def test_a_step_that_was_not_published_is_undone(tmp_path: Path) -> None:
    run = started(tmp_path)
    for _ in range(2):
        run.receive()
    ids = run.received_ids()
    run.ledger.trained(ids)
    run.ledger = run.new_ledger()
    assert run.ledger.recover(run.stored) == [True, True]
    run.ledger.trained(ids)  # KeyError if they were not received
    run.ledger.advance(1)


@pytest.mark.parametrize("min_rows", [4, 1 << 10])
def test_steps_whose_versions_were_made_and_not_kept_are_undone(tmp_path: Path, min_rows: int) -> None:
    """Also where the journal has been written anew in between."""
    run = Run(tmp_path / "a.journal", random.Random(1), max_staleness=None, min_rows=min_rows)
    run.ledger.recover([])
    for version in range(1, 6):
        run.ledger.request("a", 2)
        run.grant()
        while run.open_at:
            run.receive()
        run.train()
        run.ledger.advance(version, kept=False)
        run.under_way = False
    trained = len(run.in_step)
    assert trained >= 5
    run.in_step = []
    run.ledger = run.new_ledger()
    assert run.ledger.recover(run.stored) == [True] * len(run.stored)
    assert run.ledger.version == 0
    run.ledger.trained(run.received_ids())  # KeyError if they were not received


def test_a_step_that_was_published_counts_although_nobody_was_told(tmp_path: Path) -> None:
    run = started(tmp_path)
    for _ in range(2):
        run.receive()
    ids = run.received_ids()
    run.ledger.trained(ids)
    run.version = 1
    run.ledger = run.new_ledger()
    assert run.ledger.recover(run.stored) == [False, False]
    assert [run.ledger.lookup(i) for i in ids] == [None, None]
    assert run.ledger.counters()["charged"] == 2  # the two of four that were open


@pytest.mark.parametrize("end", ["evicted", "refused"])
def test_what_ends_after_a_lost_step_has_ended_in_the_next_process_too(tmp_path: Path, end: str) -> None:
    run = started(tmp_path)
    run.receive()
    (ticket_id,) = run.received_ids()
    run.ledger.trained([ticket_id])
    run.ledger = run.new_ledger()
    if end == "evicted":
        run.ledger.recover(run.stored)
        run.ledger.evicted([ticket_id])
    else:
        run.ledger.recover([])  # its record was damaged: it is played again
        run.ledger.request("a", 8)
        assert ticket_id in [t.ticket_id for _, tickets in run.ledger.grantable() for t in tickets]
        run.ledger.refused(ticket_id, "a")
    run.ledger = run.new_ledger()
    run.ledger.recover([])
    assert run.ledger.lookup(ticket_id) is None


def test_the_journal_of_another_task_order_is_refused(tmp_path: Path) -> None:
    run = started(tmp_path)
    run.ledger.recover([])
    order = TaskOrder(range(100, 107), 1, seed=4)
    with pytest.raises(RunDirectoryError, match="another run.name"):
        TicketLedger(order, 2, 1, journal=Journal(run.path)).recover([])


def test_a_run_whose_tasks_have_become_more_says_what_to_do(tmp_path: Path) -> None:
    """As a RunDirectoryError, which the learner says in a sentence, and after which it is not started again."""
    run = started(tmp_path)
    run.ledger.recover([])
    order = TaskOrder(range(100, 108), 1, seed=3)
    with pytest.raises(RunDirectoryError, match="8 training tasks, and 7 before: .* another run.name and run.dir"):
        TicketLedger(order, 2, 1, journal=Journal(run.path)).recover([])


def test_what_arrives_late_for_a_ticket_of_before_is_judged_as_before(tmp_path: Path) -> None:
    run = started(tmp_path)
    run.receive()
    (key,) = run.stored
    run.ledger = run.new_ledger()
    run.ledger.recover(run.stored)
    assert run.ledger.received(*key) is Verdict.DUPLICATE
    assert run.ledger.received(key[0], "another episode", 0) is Verdict.SUPERSEDED
    assert run.ledger.received(key[0], key[1], 1) is Verdict.ACCEPTED
    run.ledger.evicted([key[0]])
    assert run.ledger.received(key[0], "another episode", 0) is Verdict.SUPERSEDED
    assert run.ledger.received(999, "e", 0) is Verdict.UNKNOWN_TICKET


def test_without_a_journal_nothing_is_recovered() -> None:
    ledger = TicketLedger(TaskOrder(range(7)), 2, 1)
    assert ledger.recover([(3, "e", 0)]) == [False]
    assert ledger.counters()["charged"] == 0


def test_a_long_run_keeps_its_journal_short(tmp_path: Path) -> None:
    run = started(tmp_path, min_rows=64)
    run.finish(500)
    assert run.path.stat().st_size <= 4096 + 48 * 64
    run.kill()


@pytest.mark.parametrize("kind", ["taken", "live", "trained"])
@pytest.mark.parametrize("number", [-1, -(2**63), 2**62, 2**63 - 1])
def test_a_journal_with_impossible_numbers_is_refused_at_once(tmp_path: Path, kind: str, number: int) -> None:
    """And does not break the learner later, when it is too late to say why."""
    row = {"taken": (1, number, 0, 0, 0, 0), "live": (2, number, 0, 0, 0, 0), "trained": (3, number, 0, 0, 0, 1)}[kind]
    run = started(tmp_path)
    Journal(run.path).append([row])
    with pytest.raises(RunDirectoryError):
        run.new_ledger().recover([])


def test_a_ticket_of_a_lost_step_that_was_evicted_then_stays_evicted(tmp_path: Path) -> None:
    def make_ledger() -> TicketLedger:
        order = TaskOrder(range(9), seed=1)
        return TicketLedger(order, batch_size=2, max_staleness=2, journal=Journal(tmp_path / "journal"))

    first = make_ledger()
    first.request("actor", 1)
    [(_, [ticket])] = first.grantable()
    first.received(ticket.ticket_id, "episode")
    first.trained([ticket.ticket_id])  # and killed before version 1 was published
    second = make_ledger()
    assert second.recover([(ticket.ticket_id, "episode", 0)]) == [True]
    second.evicted([ticket.ticket_id])  # and killed again, before version 1 was published
    third = make_ledger()
    third.recover([])
    assert third.lookup(ticket.ticket_id) is None  # it has ended: not to be granted again
