#!/usr/bin/env python
"""Share of long episodes that a run learns from: tickets as the ledger grants them, in simulated time.

    python tools/long_episodes.py --staleness 2                           # keep whatever has a token that teaches
    python tools/long_episodes.py --staleness 2 --keep 0.5                # drop what is more than half too old
    python tools/long_episodes.py --staleness 2 --wait inf                # no step before stragglers have arrived
    python tools/long_episodes.py --staleness 2 --unroll-tokens 256

Prints one JSON object. Action tokens of an episode are log-normal (median 200). An episode samples a token in each unit
of time, always by the latest version, and goes straight into the buffer. A unit of time is thus the decoder's step,
which takes as long for few episodes as for many; a learner that is never idle needs --learner times what --playing
episodes take to bring a batch of mean length.
"""

import argparse
import bisect
import heapq
import json
import math
import random
import sys
from collections import defaultdict
from dataclasses import dataclass, field
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from impala_llm.pipeline.tickets.ledger import Ticket, TicketLedger  # noqa: E402
from impala_llm.pipeline.tickets.task_order import TaskOrder  # noqa: E402
from impala_llm.trajectory import unroll_id  # noqa: E402

MEDIAN = 200.0
CLASSES = ((256, "below_256"), (1024, "below_1k"), (4096, "below_4k"), (math.inf, "from_4k"))
WARM_UP = 25
"""Versions before anything is counted."""


@dataclass
class Part:
    """An episode or an unroll of one: sampled from start to end."""

    start: float
    end: float
    unroll_id: int
    length: float
    """Tokens of the whole episode."""

    def fresh(self, limit: float) -> float:
        """Tokens sampled after `limit`."""
        return max(0.0, self.end - max(self.start, limit))


@dataclass
class Tally:
    """Counts of a class of lengths."""

    parts: int = 0
    dropped: int = 0
    tokens: float = 0.0
    taught: float = 0.0


@dataclass(order=True)
class Event:
    time: float
    ticket_id: int
    group_id: int = field(compare=False)
    start: float = field(compare=False)
    length: float = field(compare=False)
    index: int = field(compare=False, default=0)


class Run:
    def __init__(self, args: argparse.Namespace) -> None:
        self.args = args
        self.rng = random.Random(args.seed)
        self.mean = MEDIAN * math.exp(args.sigma**2 / 2)
        self.batch_time = args.batch * self.mean / args.playing
        self.ledger = TicketLedger(TaskOrder(range(1 << 16), args.group), args.batch, args.staleness)
        self.ledger.request("actor", args.playing)
        self.published = [0.0]
        self.playing: list[Event] = []
        """Heap by the time at which the next unroll, or the episode, is complete."""
        self.ready: list[Ticket] = []
        self.starts: dict[int, float] = {}
        """Start of each episode under way, by ticket."""
        self.groups: dict[int, list[Part]] = defaultdict(list)
        self.buffer: list[list[Part]] = []
        self.tallies = {name: Tally() for _, name in CLASSES}
        self.now = self.idle = 0.0

    def limit(self, ahead: int = 0) -> float:
        """Tokens sampled before this are too old for the step from the current version, or so many steps later."""
        version = self.ledger.version + ahead - self.args.staleness
        return 0.0 if version <= 0 else self.published[version] if version < len(self.published) else self.now

    def play(self) -> None:
        for _, tickets in self.ledger.grantable():
            self.ready += tickets
        waiting = []
        for ticket in self.ready:
            if ticket.min_version > self.ledger.version:
                waiting.append(ticket)
                continue
            length = max(1.0, self.rng.lognormvariate(math.log(MEDIAN), self.args.sigma))
            self.starts[ticket.ticket_id] = self.now
            self.schedule(Event(self.now, ticket.ticket_id, ticket.group_id, self.now, length))
        self.ready = waiting

    def schedule(self, event: Event) -> None:
        part = min(self.args.unroll_tokens or math.inf, event.start + event.length - event.time)
        event.time += part
        heapq.heappush(self.playing, event)

    def arrive(self) -> None:
        """Deliver the unrolls and episodes that are complete by now."""
        while self.playing and self.playing[0].time <= self.now:
            event = heapq.heappop(self.playing)
            continues = event.time < event.start + event.length
            self.ledger.received(event.ticket_id, str(event.ticket_id), event.index, continues)
            name = unroll_id(event.ticket_id, event.index)
            part = Part(self.starts.pop(event.ticket_id), event.time, name, event.length)
            members = self.groups[event.group_id]
            members.append(part)
            if len(members) == self.args.group:
                self.buffer.append(self.groups.pop(event.group_id))
            if continues:
                self.starts[event.ticket_id] = event.time
                event.index += 1
                self.schedule(event)

    def settle(self, items: list[list[Part]], dropped: bool) -> None:
        limit = self.limit()
        parts = [part for item in items for part in item]
        (self.ledger.evicted if dropped else self.ledger.trained)([part.unroll_id for part in parts])
        if self.ledger.version < WARM_UP:
            return
        for part in parts:
            tally = self.tallies[next(name for most, name in CLASSES if part.length < most)]
            tally.parts += 1
            tally.dropped += dropped
            tally.tokens += part.end - part.start
            tally.taught += 0.0 if dropped else part.fresh(limit)

    def evict(self) -> bool:
        limit = self.limit()
        gone = []
        for item in self.buffer:
            fresh = sum(part.fresh(limit) for part in item)
            if fresh <= 0 or fresh < self.args.keep * sum(part.end - part.start for part in item):
                gone.append(item)
        self.buffer = [item for item in self.buffer if item not in gone]
        self.settle(gone, dropped=True)
        return bool(gone)

    def must_wait(self) -> bool:
        """Something that is still to come, or waits for others of its group, would lose a token by the next step."""
        limit = self.limit(1)
        parts = [part.start for members in self.groups.values() for part in members]
        return any(start < limit for start in (*self.starts.values(), *parts))

    def age(self, item: list[Part]) -> tuple[int, float]:
        """Version of its token in the middle, as the buffer orders them, then the order of arrival."""
        middles = sorted((part.start + part.end) / 2 for part in item)
        return bisect.bisect_right(self.published, middles[len(item) // 2]), max(part.end for part in item)

    def next_batch(self) -> list[list[Part]]:
        held = self.now
        while True:
            self.play()
            if self.evict():
                continue
            wait_until = held + self.args.wait * self.batch_time
            if len(self.buffer) * self.args.group >= self.args.batch:
                if not (self.now < wait_until and self.must_wait()):
                    self.buffer.sort(key=self.age)
                    size = self.args.batch // self.args.group
                    batch, self.buffer = self.buffer[:size], self.buffer[size:]
                    return batch
            else:
                held = self.now
                wait_until = math.inf
            self.now = min(self.playing[0].time, max(self.now, wait_until))
            self.arrive()

    def step(self) -> None:
        started = self.now
        batch = self.next_batch()
        self.idle += self.now - started
        self.settle(batch, dropped=False)
        tokens = sum(part.end - part.start for item in batch for part in item)
        end = self.now + self.args.learner * self.batch_time * tokens / (self.args.batch * self.mean)
        while True:
            self.play()
            if not self.playing or self.playing[0].time > end:
                break
            self.now = self.playing[0].time
            self.arrive()
        self.now = end
        self.published.append(end)
        self.ledger.advance(len(self.published) - 1)

    def figures(self) -> dict[str, float]:
        while self.ledger.version < WARM_UP:
            self.step()
        started, self.idle = self.now, 0.0
        while self.ledger.version < WARM_UP + self.args.versions:
            self.step()
        seconds = self.now - started
        total = Tally(*(sum(getattr(t, key) for t in self.tallies.values()) for key in vars(Tally())))
        found = {
            "idle_share": self.idle / seconds,
            "versions_per_batch_time": self.args.versions / seconds * self.batch_time,
            "taught_per_time": total.taught / seconds,
        }
        for name, tally in (("all", total), *self.tallies.items()):
            found[f"{name}_dropped_share"] = tally.dropped / max(1, tally.parts)
            found[f"{name}_lost_tokens_share"] = 1 - tally.taught / tally.tokens if tally.tokens else 0.0
            found[f"{name}_share_of_taught"] = tally.taught / total.taught
        return {name: round(value, 3) for name, value in found.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--staleness", type=int, default=2, help="η")
    parser.add_argument("--batch", type=int, default=64, help="trajectories of a batch")
    parser.add_argument("--playing", type=int, default=64, help="episodes that actors play at once")
    parser.add_argument("--group", type=int, default=1, help="episodes of a group")
    parser.add_argument("--learner", type=float, default=0.25, help="a step's time, see above")
    parser.add_argument("--sigma", type=float, default=1.0, help="of the logarithm of lengths")
    parser.add_argument("--keep", type=float, default=0.0, help="least share of tokens not too old, below: dropped")
    parser.add_argument("--wait", type=float, default=0.0, help="a step waits for stragglers so long, as --learner")
    parser.add_argument("--unroll-tokens", type=int, default=0, help="0: whole episodes")
    parser.add_argument("--versions", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0)
    print(json.dumps(Run(parser.parse_args()).figures()))


if __name__ == "__main__":
    main()
