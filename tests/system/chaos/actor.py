"""An actor of the chaos test: a real channel, made-up episodes.

python -m tests.system.chaos.actor DIRECTORY INDEX
"""

import os
import random
import signal
import sys
import time
from dataclasses import dataclass
from pathlib import Path

from impala_llm.pipeline.shm.run_directory import RunDirectory
from impala_llm.pipeline.tickets.ledger import Ticket
from impala_llm.pipeline.transport.actor_channel import ActorChannel
from impala_llm.pipeline.transport.learner_connection import ChannelTimes
from impala_llm.pipeline.transport.messages import Ack, Grant, Refused, Revoked, Shutdown, WeightsAnnounced
from impala_llm.pipeline.weights.board import WeightReader
from tests.system.chaos.content import digest, make_episode, scribble
from tests.system.chaos.events import EventLog
from tests.system.chaos.settings import ARENA_BYTES, Settings, die_with_parent, is_remote

WANT = 8
EPISODE_S = (0.01, 0.15)
"""Least and most seconds of an episode, or of an unroll where it has several."""
MAX_UNROLLS = 4
FAIL_SHARE = 0.03
FLAWED_SHARE = 0.015
FLAW_WEIGHTS = {"vocabulary": 10, "group": 10, "scribbled": 10, "future": 1}
"""How often each flaw is made. A trajectory of a version to come is waited for, and so is all that its actor sends
after it: that one is seldom made."""


@dataclass
class Playing:
    """ends: when its next unroll, or all of it, is finished."""

    ticket: Ticket
    version: int
    name: str
    num_unrolls: int
    ends: float
    num_sent: int = 0


class Actor:
    def __init__(self, settings: Settings, index: int) -> None:
        self.settings = settings
        self.log = EventLog(settings.log_path(f"actor-{index}"))
        self.run_dir = RunDirectory.attach(settings.run_name, timeout_s=30.0)
        self.board = WeightReader(self.run_dir.weights_path)
        self.is_remote = is_remote(index)
        self.actor_id = f"actor-{index}"
        self.channel = ActorChannel(
            settings.endpoint(index, self.run_dir),
            self.actor_id,
            None if self.is_remote else self.run_dir,
            ARENA_BYTES,
            times=ChannelTimes(heartbeat_s=0.2, resend_s=1.0, learner_timeout_s=20.0),
        )
        self.random = random.Random()  # chance is welcome here: what a ticket brings depends on it and the attempt
        self.waiting: list[Ticket] = []
        self.playing: dict[int, Playing] = {}
        """By ticket."""
        self.sent: list[tuple[str, int]] = []
        """(episode, unroll) by sequence."""
        self.answered: set[int] = set()
        self.announced = -1
        self.running = True

    def run(self) -> None:
        self.log.say("start")
        self.channel.hello()
        self.channel.request(WANT)
        while self.running:
            for event in self.channel.poll(0.01):
                self.handle(event)
            self.start()
            now = time.monotonic()
            for episode in list(self.playing.values()):
                if episode.ends <= now and not self.is_full:
                    del self.playing[episode.ticket.ticket_id]
                    self.finish(episode)
        self.channel.close()

    @property
    def is_full(self) -> bool:
        """Whether episodes must wait for acknowledgements."""
        return self.channel.arena_fill > 0.9

    def handle(self, event: object) -> None:
        match event:
            case Grant(tickets):
                self.waiting += tickets
            case WeightsAnnounced(version):
                self.announced = version
            case Revoked(ticket_ids):
                self.waiting = [ticket for ticket in self.waiting if ticket.ticket_id not in ticket_ids]
                for ticket_id in ticket_ids:
                    self.playing.pop(ticket_id, None)
            case Ack(sequences):
                for sequence in sequences:
                    self.answer("acknowledged", sequence)
            case Refused(sequence, reason):
                self.answer("refused", sequence, reason)
            case Shutdown():
                self.running = False

    def answer(self, what: str, sequence: int, reason: str = "") -> None:
        is_known = sequence < len(self.sent)
        is_new = is_known and sequence not in self.answered
        self.answered.add(sequence)
        episode, unroll = self.sent[sequence] if is_known else ("?", 0)
        self.log.say(what if is_new else f"{what} again", episode, unroll, reason)

    def start(self) -> None:
        # As a real actor it may have newer weights than the learner has announced to it.
        version = self.board.latest() if self.random.random() < 0.3 else None
        version = self.announced if version is None else max(version, self.announced)
        for ticket in list(self.waiting):
            if ticket.min_version <= version:
                self.waiting.remove(ticket)
                name = f"{self.actor_id}:{ticket.ticket_id}:{self.random.getrandbits(40):010x}"
                num_unrolls = self.random.randint(1, MAX_UNROLLS) if self.settings.has_unrolls else 1
                self.playing[ticket.ticket_id] = Playing(ticket, version, name, num_unrolls, self.next_end())

    def next_end(self) -> float:
        return time.monotonic() + self.random.uniform(*EPISODE_S)

    def finish(self, episode: Playing) -> None:
        """The whole of it, or its next unroll."""
        ticket, unroll = episode.ticket, episode.num_sent
        if all(held.ticket_id != ticket.ticket_id for held in self.channel.held):
            return  # an acknowledgement of another attempt has ended it
        chance = 1.0 if self.settings.calm.exists() else self.random.random()
        if chance < FAIL_SHARE:
            self.channel.fail(ticket.ticket_id, "it failed")
            self.log.say("failed", ticket.ticket_id)
            return
        is_flawed = chance < FAIL_SHARE + FLAWED_SHARE
        flaw = self.random.choices(list(FLAW_WEIGHTS), list(FLAW_WEIGHTS.values()))[0] if is_flawed else ""
        # In the arena a later unroll would be taken for the first.
        flaw = "" if flaw == "scribbled" and (self.is_remote or unroll) else flaw
        attempt = self.random.getrandbits(40)
        goes_on = unroll + 1 < episode.num_unrolls
        trajectory = make_episode(
            ticket, attempt, episode.version, episode.name, self.actor_id, flaw, unroll, continues=goes_on
        )
        self.log.say("created", episode.name, unroll, ticket.ticket_id, digest(trajectory), flaw)
        self.sent.append((episode.name, unroll))
        # What somebody spoils, or claims, before the learner has heard of it.
        self.channel.send(trajectory, may_offer=flaw != "scribbled" and self.settings.sabotage != "claim_early")
        if goes_on:
            episode.num_sent += 1
            episode.version = max(episode.version, self.announced)
            episode.ends = self.next_end()
            self.playing[ticket.ticket_id] = episode
        if flaw == "scribbled" and not scribble(self.run_dir, trajectory):
            self.log.say("unscribbled", episode.name)
        if self.settings.sabotage == "claim_early" and attempt % 40 == 0:
            self.answer("acknowledged", len(self.sent) - 1)
            os.kill(os.getpid(), signal.SIGKILL)  # before the next `poll` offers it


def main(arguments: list[str]) -> None:
    die_with_parent()
    Actor(Settings.load(Path(arguments[0])), int(arguments[1])).run()


if __name__ == "__main__":
    main(sys.argv[1:])
