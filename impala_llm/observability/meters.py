"""Metrics of a rank's step beyond those of the update: episodes, buffer, tickets, actors."""

from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any

import psutil

from impala_llm.learning.batch_source import Batch, Intake
from impala_llm.learning.control import FailureAlarm
from impala_llm.learning.ranks.parallel import Ranks
from impala_llm.observability.metrics import METRICS, MetricLog
from impala_llm.pipeline.transport.receiver import Receiver
from impala_llm.processes.limited_warnings import RateLimitedWarnings
from impala_llm.processes.supervised import say
from impala_llm.trajectory import Trajectory

_MAX_BEGUN = 1 << 14
_OF_ACTORS = ("actor/", "weights/", "pipeline/queue_fill")
"""Prefixes of the metrics that actors measure; the others are the learner's own."""
_OVER_THE_STEP = frozenset(
    ("actor/generated_tokens_per_s", "actor/prefill_tokens_per_s", "actor/idle_share", "actor/engine_up",
     "actor/running_episodes", "pipeline/queue_fill")
)  # fmt: skip
"""Those of which a step's value is the mean of its heartbeats: when a step ends, actors may long have played as far
ahead as tickets allow, and the last heartbeat alone would call an engine idle that computed for most of the step."""
WINDOW = 500
"""Episodes that a windowed score covers at least, once there are so many."""


def _length_class(num_tokens: int) -> str:
    """Class of a length in tokens, as the metrics of drops and losses name it."""
    for limit, name in ((256, "below_256"), (1024, "below_1k"), (4096, "below_4k"), (16384, "below_16k")):
        if num_tokens < limit:
            return name
    return "from_16k"


class EpisodeWindow:
    """Score and success rate over the last `size` finished episodes, or somewhat more: whole steps are kept."""

    def __init__(self, size: int = WINDOW) -> None:
        self._size = size
        self._steps: deque[tuple[float, float, float]] = deque()  # episodes, and sums of score and success

    def add(self, step: Mapping[str, float]) -> dict[str, float]:
        """Add the metrics of a step. Returns the windowed ones; none before the first episode."""
        count = step.get("rollout/episodes", 0.0)
        if count:
            self._steps.append((count, count * step["rollout/score"], count * step["rollout/success_rate"]))
        while self._steps and sum(count for count, _, _ in self._steps) - self._steps[0][0] >= self._size:
            self._steps.popleft()
        if not self._steps:
            return {}
        count, score, success = map(sum, zip(*self._steps, strict=True))
        return {
            "rollout/window_score": score / count,
            "rollout/window_success_rate": success / count,
            "rollout/window_episodes": count,
        }

    def state_dict(self) -> list[list[float]]:
        """Episodes of each step, and their sums of score and success."""
        return [list(step) for step in self._steps]

    def load_state_dict(self, state: Sequence[Sequence[float]]) -> None:
        """Restore `state_dict`."""
        self._steps = deque((count, score, success) for count, score, success in state)


class Meters:
    """Metrics of one rank's step, and their sum over ranks.

    Args:
        max_staleness: in versions, of tokens that teach; None: they do at any age.
    """

    TOTALS = {
        "received": "pipeline/received",
        "trajectories_refused": "pipeline/refused",
        "duplicates": "pipeline/duplicates",
        "regranted": "pipeline/regranted",
        "failed": "actor/failed_episodes",
        "tickets_expired": "pipeline/expired",
        "given_up": "pipeline/given_up",
        "recovered": "pipeline/recovered",
        "quarantined": "pipeline/quarantined",
        "messages_malformed": "pipeline/malformed",
        "sessions_broken": "pipeline/sessions_broken",
        "peers_refused": "pipeline/peers_refused",
        "evaluation_unwanted": "evaluation/unwanted",
    }

    def __init__(self, receiver: Receiver, ranks: Ranks, max_staleness: int | None = None) -> None:
        self.log = MetricLog()
        self._receiver, self._ranks, self._max_staleness = receiver, ranks, max_staleness
        # Reward, action tokens and turns of the unrolls of episodes that had not ended, by ticket. Some never do.
        self._begun: dict[int, tuple[float, int, int]] = {}
        self._window = EpisodeWindow()
        self._progress = {"progress/tokens": 0.0, "progress/episodes": 0.0}
        self._warnings, self._failure_alarm = RateLimitedWarnings(), FailureAlarm()
        # Not those of now: actors that were there before the learner have brought episodes by then.
        self._totals = receiver.counters_at_start

    def observe(self, intake: Intake, batch: Batch, version: int) -> None:
        """Log a step's episodes, and the buffer, tickets and actors as of now.

        Args:
            version: policy version that was made of the batch.
        """
        log = self.log
        for t in intake.received:
            if t.unroll_id not in self._receiver.counted:
                self._observe_arrival(t)
        self._receiver.note_counted([t.unroll_id for t in intake.received])
        # The step was made from the version before.
        oldest = 0 if self._max_staleness is None else version - 1 - self._max_staleness
        for t in batch.trajectories:
            self._observe_lost(t, float((t.versions[t.action_mask] < oldest).mean()))
        for t in intake.evicted:
            self._observe_lost(t, 1.0)
            log.add("buffer/evicted", 1)
            log.add(f"buffer/evicted_{_length_class(t.num_tokens)}", 1)
            log.add("buffer/evicted_length_tokens", t.num_tokens)
            log.add("buffer/evicted_reward", float(t.rewards.sum()))
        log.add("buffer/refilled_groups", intake.num_refilled)
        log.add("buffer/yielded_groups", intake.num_yielded)
        if intake.replayed_share is not None:
            log.add("buffer/replayed_share", intake.replayed_share)
        stats = intake.buffer
        log.add("buffer/fill", stats.fill)
        log.add("buffer/trajectories", stats.num_trajectories)
        log.add("buffer/size_gb", stats.num_bytes / 1e9)
        log.add("buffer/reuse", batch.mean_reuse)
        if stats.oldest_version is not None:
            log.add("staleness/in_buffer", version - stats.oldest_version)
        totals = self._receiver.counters()
        for key, name in self.TOTALS.items():
            log.add(name, totals[key] - self._totals[key])
        self._totals = totals
        log.add("actor/connected", totals["actors"])
        log.add("pipeline/outstanding_tickets", totals["open"])
        log.add("pipeline/replay_arena_fill", totals["arena_fill"])
        log.add("staleness/in_flight", totals["staleness_in_flight"])
        log.add("learner/version", version)
        log.add("learner/resident_memory_gb", psutil.Process().memory_info().rss / 1e9)
        means = self._receiver.mean_actor_stats()
        for actor_id, metrics in self._receiver.actor_stats().items():
            of_step = means.get(actor_id, {})
            for name, value in metrics.items():
                if name in METRICS and name.startswith(_OF_ACTORS):
                    log.add(name, of_step.get(name, value) if name in _OVER_THE_STEP else value)
                else:  # of an actor of another release: no reason to end the learner
                    self._warnings.log("an actor reports a metric that this release does not know", repr(name[:80]))

    def _observe_lost(self, t: Trajectory, share: float) -> None:
        """Note a dropped trajectory.

        share: fraction of its action tokens that are not trained on, for their age or since all of it is dropped.
        """
        for name in ("share", _length_class(t.num_tokens)):
            self.log.add(f"buffer/lost_tokens_{name}", share, t.num_action_tokens)

    def _observe_arrival(self, t: Trajectory) -> None:
        """Note an unroll. An episode counts, with all of its unrolls, when the last one has arrived."""
        so_far = (float(t.rewards.sum()), t.num_action_tokens, len(t.turns))
        if t.unroll_index:
            before = self._begun.pop(t.ticket_id, (0.0, 0, 0))
            so_far = (before[0] + so_far[0], before[1] + so_far[1], before[2] + so_far[2])
        if t.continues:
            self._begun[t.ticket_id] = so_far
            if len(self._begun) > _MAX_BEGUN:
                del self._begun[next(iter(self._begun))]
            return
        reward, num_action_tokens, num_turns = so_far
        self.log.update(
            {
                "rollout/reward": reward,
                "rollout/score": t.score,
                "rollout/success_rate": float(t.success),
                "rollout/length_tokens": t.num_tokens,
                "rollout/action_tokens": num_action_tokens,
                "rollout/turns": num_turns,
                "rollout/episodes": 1,
            }
        )
        for key, value in t.stats.items():
            self.log.add(f"env/{key}", value)

    def state_dict(self) -> dict[str, Any]:
        """State from which metrics of later steps are made: the episodes of the window, those that have begun, and the
        counts over the whole run."""
        begun = [[ticket, *so_far] for ticket, so_far in self._begun.items()]
        return {"window": self._window.state_dict(), "begun": begun, "progress": dict(self._progress)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore `state_dict`. Counts that `go_on_from` has found stay where they are higher: of a later update."""
        for name, value in state.get("progress", {}).items():  # a checkpoint of an earlier release has none
            self._progress[name] = max(self._progress[name], value)
        self._window.load_state_dict(state["window"])
        self._begun = {ticket: (reward, tokens, turns) for ticket, reward, tokens, turns in state["begun"]}

    def finish_step(self, times: dict[str, float], num_tokens: int) -> None:
        self.log.update(times)
        self.log.add("learner/trained_tokens", num_tokens)
        self.log.add("learner/trained_tokens_per_s", num_tokens / times["time/step_s"])

    def gather(self) -> dict[str, float]:
        """Sum of the metrics of all ranks; the same on every rank."""
        merged = MetricLog()
        for state in self._ranks.gather(self.log.state()):
            merged.merge(state)
        self.log.flush()
        summary = merged.flush()
        self._progress["progress/tokens"] += summary.get("learner/trained_tokens", 0.0)
        self._progress["progress/episodes"] += summary.get("rollout/episodes", 0.0)
        if self._ranks.is_main:
            self._failure_alarm.observe(summary.get("actor/failed_episodes", 0.0), summary.get("rollout/episodes", 0.0))
        return summary | self._window.add(summary) | self._progress

    def go_on_from(self, metrics: Mapping[str, float], update: int = 0) -> None:
        """Go on counting over the whole run from the metrics of an earlier step.

        Args:
            update: that the run goes on from; where the metrics are of an earlier one, rank 0 says so.
        """
        self._progress |= {name: metrics[name] for name in self._progress if name in metrics}
        if self._ranks.is_main and (last := int(metrics.get("step", update))) < update:
            say(
                f"learner: the updates after {last}, up to {update}, were not logged (their learner died, or its disk "
                "was full): curves leave them out"
            )
