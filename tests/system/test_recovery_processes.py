"""A learner rank that is killed again and again: trajectory store and journal tell the next one the truth."""

import os
import random
import signal
from collections import Counter
from pathlib import Path

import pytest

from impala_llm.pipeline.shm.journal import Journal
from impala_llm.pipeline.shm.trajectory_store import TrajectoryStore
from impala_llm.pipeline.tickets.ledger import TicketLedger, Verdict
from impala_llm.pipeline.tickets.task_order import TaskOrder
from tests.pipeline.keeping import commit, make
from tests.pipeline.support import contents

NUM_LIVES = 10
BATCH_SIZE = 8
CAPACITY = 1 << 16


def open_rank(folder: Path, version: int) -> tuple[TrajectoryStore, TicketLedger, list[int], list[int]]:
    """Arena and ledger of a rank at its start; tickets that it found: wanted ones, and others."""
    arena = TrajectoryStore(folder / "rank.replay", CAPACITY, 256)
    ledger = TicketLedger(
        TaskOrder(range(50), 2, 1), BATCH_SIZE, 2, version=version, journal=Journal(folder / "rank.journal")
    )
    found = arena.recovered()
    for trajectory in found:
        assert contents(trajectory) == contents(make(trajectory.ticket_id))
    wanted = ledger.recover([(t.ticket_id, t.episode_id, t.unroll_index) for t in found])
    ids = [t.ticket_id for t in found]
    unwanted = [i for i, is_wanted in zip(ids, wanted, strict=True) if not is_wanted]
    arena.end(unwanted)
    return arena, ledger, [i for i in ids if i not in unwanted], unwanted


def live(folder: Path, version: int, say: int) -> None:
    """Receive and train for ever. Says `found`, `kept` (acknowledged), `trained` and `published`, a line at a time."""
    arena, ledger, received, _ = open_rank(folder, version)
    os.write(say, f"found {' '.join(map(str, received))}\n".encode())
    while True:
        ledger.request("actor", 2 * BATCH_SIZE)
        for _, tickets in ledger.grantable():
            for ticket in tickets:
                trajectory = make(ticket.ticket_id)
                assert ledger.received(ticket.ticket_id, trajectory.episode_id) is Verdict.ACCEPTED
                assert len(commit(arena, [trajectory])) == 1
                os.write(say, f"kept {ticket.ticket_id}\n".encode())
                received.append(ticket.ticket_id)
        step, received = received[:BATCH_SIZE], received[BATCH_SIZE:]
        ledger.trained(step)
        os.write(say, f"trained {' '.join(map(str, step))}\n".encode())
        version += 1
        os.write(say, f"published {version}\n".encode())
        ledger.advance(version)
        arena.end(step)


def one_life(folder: Path, version: int, num_bytes: int) -> list[list[str]]:
    """The lines that it said until it was killed, after as many bytes."""
    hear, say = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            os.close(hear)
            live(folder, version, say)
        finally:
            os._exit(1)
    os.close(say)
    said = b""
    while len(said) < num_bytes and (part := os.read(hear, 64)):
        said += part
    os.kill(child, signal.SIGKILL)
    while part := os.read(hear, 1 << 16):
        said += part
    os.close(hear)
    _, status = os.waitpid(child, 0)
    assert os.WIFSIGNALED(status), said[-500:]
    return [line.split() for line in said.decode().splitlines()]


@pytest.mark.system
@pytest.mark.parametrize("seed", range(2))
def test_a_rank_that_is_killed_loses_nothing_and_trains_on_nothing_twice(tmp_path: Path, seed: int) -> None:
    rng = random.Random(seed)
    version = 0
    kept: Counter[int] = Counter()
    trained: Counter[int] = Counter()  # in steps that were published
    for _ in range(NUM_LIVES):
        lines = one_life(tmp_path, version, rng.randint(1, 8_000))
        under_way: list[int] = []
        for word, *rest in lines:
            numbers = [int(number) for number in rest]
            match word:
                case "found":
                    # All that was acknowledged and not trained on, and perhaps the last one, that was not yet said.
                    assert {*kept} - {*trained} <= {*numbers} and not {*numbers} & {*trained}
                    kept |= Counter(numbers)
                case "kept":
                    kept[numbers[0]] += 1
                case "trained":
                    under_way = numbers
                case "published":
                    trained.update(under_way)
                    (version,) = numbers
    arena, ledger, received, _ = open_rank(tmp_path, version)
    assert version > NUM_LIVES
    assert {*kept.values()} == {1} == {*trained.values()}
    assert {*trained} <= {*kept}
    assert {*received} >= {*kept} - {*trained} and not {*received} & {*trained}
    # No ticket is missing: all that were ever taken from the order have been trained on, or are at hand, or ready.
    at_hand = {i for i in range(max(trained, default=0) + 1000) if ledger.lookup(i) is not None}
    assert {*range(max(at_hand | {*trained}) + 1)} == {*trained} | at_hand and {*received} <= at_hand
    assert ledger.counters()["ready"] == len(at_hand) - len(received)
    assert arena.used > 0 or not received
