"""Checker of the chaos test: reads the logs of all processes and reports violations.

Definitions:
- A step of a rank is committed when its version is on the board. Of several attempts at a step, the last one counts.
- A ticket's end is written down after it has happened, and the intent before: an intent alone, of a process that was
  killed between the two, may have been an end.
- What arrives, is trained on and is evicted has the number `Trajectory.unroll_id`. A ticket ends by being refused, or
  each unroll that it brought ends.
"""

from collections import Counter, defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

from impala_llm.trajectory import MAX_TICKETS, unroll_id
from tests.system.chaos.events import Event, read_events
from tests.system.chaos.settings import GROUP_SIZE, NUM_ACTORS, NUM_ENGINES, NUM_RANKS

MAX_GAP_S = 30.0
"""Most seconds without a step while the ranks are up, not stopped, and have memory. Their actors may be stopped."""
MAX_QUIET_GAP_S = 10.0
"""The same while all processes are up and not stopped: lost messages are made good in a few seconds."""
AFTER_S = 3.0
"""So long after a disturbance its consequences may last: an actor is given up, a grant is sent again."""
MAX_GROWTH_BYTES = 32 << 20
MAX_DESCRIPTORS = 64


@dataclass
class Verdict:
    """figures: by name. violations: in words; none where all is well."""

    figures: dict[str, float] = field(default_factory=dict)
    violations: list[str] = field(default_factory=list)


@dataclass
class Created:
    """A trajectory as its actor made it."""

    ticket_id: int
    digest: str
    is_flawed: bool


@dataclass
class Logs:
    """By process."""

    actors: list[list[Event]]
    ranks: list[list[Event]]
    engines: list[list[Event]]
    proxy: list[Event]
    world: list[Event]

    @classmethod
    def read(cls, directory: Path) -> "Logs":
        def of(name: str) -> list[Event]:
            return read_events(directory / f"{name}.events")

        return cls(
            [of(f"actor-{i}") for i in range(NUM_ACTORS)],
            [of(f"rank-{i}") for i in range(NUM_RANKS)],
            [of(f"engine-{i}") for i in range(NUM_ENGINES)],
            of("proxy"),
            of("world"),
        )


def check(logs: Logs, last_version: int, group_size: int = GROUP_SIZE) -> Verdict:
    """last_version: on the board when all had come to rest."""
    verdict = Verdict()
    created = _created(logs, verdict)
    arrived: dict[tuple[str, int], list[Event]] = defaultdict(list)
    ends: dict[int, list[str]] = {}
    for rank, events in enumerate(logs.ranks):
        _check_rank(rank, events, last_version, group_size, created, arrived, ends, verdict)
    _check_acknowledged(logs, created, arrived, ends, verdict)
    _check_versions(logs, last_version, verdict)
    _check_memory(logs, verdict)
    _check_pace(logs, verdict)
    figures = verdict.figures
    figures["trajectories"] = len(created)
    figures["arrived"] = len(arrived)
    figures["trained"] = sum(end[0].startswith("trained") for end in ends.values())
    figures["evicted"] = sum(end[0] == "evicted" for end in ends.values())
    figures["refused"] = sum(end[0] == "refused" for end in ends.values())
    figures["uncertain_ends"] = sum(end[0].startswith("perhaps") for end in ends.values())
    figures["steps"] = last_version
    kinds = Counter(event.kind for events in logs.actors for event in events)
    figures["acknowledged"] = kinds["acknowledged"]
    figures["duplicates"] = kinds["acknowledged again"]
    figures["refused_again"] = kinds["refused again"]
    figures["failed_episodes"] = kinds["failed"]
    return verdict


def _created(logs: Logs, verdict: Verdict) -> dict[tuple[str, int], Created]:
    created = {}
    unscribbled = {e.values[0] for events in logs.actors for e in events if e.kind == "unscribbled"}
    for event in (event for events in logs.actors for event in events if event.kind == "created"):
        episode, unroll, ticket_id, digest, flaw = event.values
        if (episode, unroll) in created:
            verdict.violations.append(f"the test itself made episode {episode} twice")
        created[episode, unroll] = Created(ticket_id, digest, bool(flaw) and episode not in unscribbled)
    return created


def _check_rank(
    rank: int,
    events: list[Event],
    last_version: int,
    group_size: int,
    created: dict[tuple[str, int], Created],
    arrived: dict[tuple[str, int], list[Event]],
    ends: dict[int, list[str]],
    verdict: Verdict,
) -> None:
    bad = verdict.violations
    steps: dict[int, Event] = {}
    dropped: dict[int, list[str]] = defaultdict(list)
    intents: dict[int, str] = {}
    began: dict[int, int] = {}
    seen_by: set[tuple[int, int, str, int]] = set()
    brought: dict[int, set[int]] = defaultdict(set)
    final: Event | None = None
    for event in events:
        values = event.values
        match event.kind:
            case "start":
                began[event.pid] = values[0]
            case "arrived":
                ticket_id, episode, unroll, digest = values
                arrived[episode, unroll].append(event)
                original = created.get((episode, unroll))
                name = f"rank {rank}: episode {episode} of ticket {ticket_id}"
                if original is None:
                    bad.append(f"{name} arrived, and no actor made it")
                elif original.is_flawed:
                    bad.append(f"{name} arrived, and it was malformed")
                elif (original.ticket_id, original.digest) != (ticket_id, digest):
                    bad.append(f"{name} arrived with other contents than it was made with")
                if (event.pid, ticket_id, episode, unroll) in seen_by:
                    bad.append(f"{name} arrived twice at one process")
                seen_by.add((event.pid, ticket_id, episode, unroll))
                number = unroll_id(ticket_id, unroll)
                brought[ticket_id].add(number)
                if number in dropped:
                    bad.append(f"{name} arrived after it was {dropped[number][-1]}")
            case "trained":
                step, numbers = values
                if step <= began[event.pid]:
                    bad.append(f"rank {rank}: step {step} was made again from version {began[event.pid]}")
                steps[step] = event
                if len(set(numbers)) != len(numbers):
                    bad.append(f"rank {rank}: step {step} has a ticket twice")
            case "changed":
                bad.append(f"rank {rank}: the trajectory of ticket {values[0]} changed while it was buffered")
            case "evicting":
                intents |= dict.fromkeys(values[0], "perhaps evicted")
            case "refusing":
                intents[values[0]] = "perhaps refused"
            case "kept":
                intents.pop(values[0], None)
            case "evicted":
                for number in values[0]:
                    intents.pop(number, None)
                    dropped[number].append("evicted")
            case "refused":
                intents.pop(values[0], None)
                dropped[values[0]].append("refused")
            case "final":
                final = event
    mine: dict[int, list[str]] = defaultdict(list, {number: list(what) for number, what in dropped.items()})
    trained_in: dict[int, int] = {}
    for step, event in steps.items():
        if step > last_version:
            bad.append(f"rank {rank}: step {step} was left unpublished, the board ends at {last_version}")
        for number in event.values[1]:
            mine[number].append(f"trained in step {step}")
            trained_in[number] = step
    own = {id(event) for event in events}  # a run of ten minutes has 30,000 and more
    for (episode, unroll), arrivals in arrived.items():
        for event in arrivals:
            step = trained_in.get(unroll_id(event.values[0], unroll), last_version + 1)
            if id(event) in own and began[event.pid] >= step:
                bad.append(f"rank {rank}: episode {episode} came back after step {step}, which had trained on it")
    if final is None:
        bad.append(f"rank {rank} did not come to its end")
        return
    _, num_groups, left = final.values
    for name, value in left.items():
        if value:
            bad.append(f"rank {rank}: {value:g} {name} are left in the end")
    groups = (index * NUM_RANKS + rank for index in range(num_groups))
    granted = {group * group_size + member for group in groups for member in range(group_size)}
    for number in sorted(number for number in mine if number % MAX_TICKETS not in granted):
        bad.append(f"rank {rank}: ticket {number % MAX_TICKETS} ended and was never granted")
    for number in mine:
        brought[number % MAX_TICKETS].add(number)
    for ticket_id in sorted(granted):
        for number in sorted(brought[ticket_id] or {ticket_id}):
            found = mine.get(number, [])
            if not found and number in intents:
                found = [intents[number]]
            if len(found) != 1:
                bad.append(f"rank {rank}: ticket {ticket_id} ended {len(found)} times: {', '.join(found) or 'never'}")
            ends[number] = found or ["never"]


def _check_acknowledged(
    logs: Logs,
    created: dict[tuple[str, int], Created],
    arrived: dict[tuple[str, int], list[Event]],
    ends: dict[int, list[str]],
    verdict: Verdict,
) -> None:
    bad = verdict.violations
    episodes: dict[int, set[str]] = defaultdict(set)
    for (episode, _), arrivals in arrived.items():
        for event in arrivals:
            episodes[event.values[0]].add(episode)
    for ticket_id, names in episodes.items():
        if len(names) > 1:
            bad.append(f"ticket {ticket_id} brought {len(names)} episodes: {', '.join(sorted(names))}")
        if ends.get(ticket_id, [""])[0] == "refused":
            bad.append(f"ticket {ticket_id} was refused, and its episode {', '.join(names)} arrived")
    for event in (event for events in logs.actors for event in events if event.kind == "acknowledged"):
        episode, unroll = event.values[:2]
        if (episode, unroll) not in created:
            bad.append(f"episode {episode} was acknowledged and not made")
        elif (episode, unroll) not in arrived:
            ticket_id = created[episode, unroll].ticket_id
            bad.append(f"episode {episode} was acknowledged and never arrived; its ticket: {ends.get(ticket_id)}")


def _check_versions(logs: Logs, last_version: int, verdict: Verdict) -> None:
    bad = verdict.violations
    latest = 0
    for event in (e for events in logs.ranks for e in events if e.kind in ("start", "committed")):
        if event.values[0] > last_version:
            bad.append(f"version {event.values[0]} was there, and the board ends at {last_version}")
    for event in sorted(_of_kinds(logs.ranks[0], "start", "committed"), key=lambda e: e.time):
        if event.values[0] < latest or event.values[0] > latest + 1:
            bad.append(f"the board went from version {latest} to {event.values[0]}")
        latest = max(latest, event.values[0])
    num_reads = 0
    for index, events in enumerate(logs.engines):
        newest = 0
        for event in events:
            if event.kind == "read":
                num_reads += 1
                version, is_whole = event.values
                if not is_whole:
                    bad.append(f"engine {index} read version {version}, and not all of its bytes were right")
                if version < newest:
                    bad.append(f"engine {index} read version {version} after {newest}")
                newest = max(newest, version)
            elif event.kind == "unreadable":
                verdict.figures["unreadable"] = verdict.figures.get("unreadable", 0) + 1
                if "differs" in event.values[0]:
                    bad.append(f"engine {index}: {event.values[0]}")
    verdict.figures["weight_reads"] = num_reads


def _check_memory(logs: Logs, verdict: Verdict) -> None:
    growth = 0
    most = 0
    for rank, events in enumerate(logs.ranks):
        first_arrival: dict[int, float] = {}
        for event in _of_kinds(events, "arrived"):
            first_arrival.setdefault(event.pid, event.time)
        settled: dict[int, int] = {}
        for event in _of_kinds(events, "memory"):
            num_bytes, descriptors, _ = event.values
            most = max(most, descriptors)
            # The first trajectories load what is compiled, 20 to 80 MB, and on a busy machine they come late.
            if event.pid in first_arrival and event.time > first_arrival[event.pid] + AFTER_S:
                growth = max(growth, num_bytes - settled.setdefault(event.pid, num_bytes))
        if growth > MAX_GROWTH_BYTES:
            verdict.violations.append(f"rank {rank} grew by {growth / 1e6:.0f} MB")
        if most > MAX_DESCRIPTORS:
            verdict.violations.append(f"rank {rank} had {most} open descriptors")
    verdict.figures["memory_growth_mb"] = round(growth / 1e6, 1)
    verdict.figures["most_descriptors"] = most


def _check_pace(logs: Logs, verdict: Verdict) -> None:
    times = sorted(event.time for event in _of_kinds(logs.ranks[0], "committed"))
    begin = [event.time for event in logs.world if event.kind == "mischief"]
    end = [event.time for event in logs.world if event.kind == "calm"]
    if not times or not begin or not end:
        return
    marks = [begin[0], *(t for t in times if begin[0] < t < end[0]), end[0]]
    pairs = list(zip(marks, marks[1:], strict=False))
    ranks_up, all_well = _troubles(logs, only_ranks=True), _troubles(logs, only_ranks=False)
    gap = max(_longest_free(left, right, ranks_up) for left, right in pairs)
    quiet = max(_longest_free(left, right, all_well) for left, right in pairs)
    verdict.figures["largest_gap_s"] = round(gap, 2)
    verdict.figures["largest_quiet_gap_s"] = round(quiet, 2)
    verdict.figures["largest_gap_with_restarts_s"] = round(max(right - left for left, right in pairs), 2)
    for seconds, limit, when in (
        (gap, MAX_GAP_S, "the ranks were up and well"),
        (quiet, MAX_QUIET_GAP_S, "all processes were up and well"),
    ):
        if seconds > limit:
            verdict.violations.append(f"no step for {seconds:.1f} s, though {when}")
    restarts = [
        ready.time - down.time
        for down, ready in _pairs(logs.world, logs.ranks[0], "rank-0")
        if begin[0] < down.time < end[0]
    ]
    verdict.figures["restarts_of_ranks"] = len(restarts)
    verdict.figures["longest_restart_s"] = round(max(restarts, default=0.0), 2)
    verdict.figures["restarts"] = sum(e.kind == "down" for e in logs.world)


def _pairs(world: Iterable[Event], rank: list[Event], name: str) -> list[tuple[Event, Event]]:
    """Each death of a rank, and when it was ready again (possibly only after more deaths)."""
    ready = _of_kinds(rank, "ready")
    pairs = []
    for down in (e for e in world if e.kind == "down" and e.values[0] == name):
        later = [e for e in ready if e.time > down.time]
        if later:
            pairs.append((down, later[0]))
    return pairs


def _troubles(logs: Logs, only_ranks: bool) -> list[tuple[float, float]]:
    """Intervals in which some process, or some rank, was down, starting or stopped, or memory was full, and
    a while after; in order."""
    troubles = []
    opened: dict[str, float] = {}
    started = {
        f"{what}-{i}": [e.time for e in events if e.kind in ("start", "ready")]
        for what, group in (("rank", logs.ranks), ("actor", logs.actors), ("engine", logs.engines))
        for i, events in enumerate(group)
    }
    for event in logs.world:
        name = "memory" if event.kind in ("fill", "free") else str(event.values[0] if event.values else "")
        if only_ranks and name != "memory" and not name.startswith("rank"):
            continue
        match event.kind:
            case "stop" | "kill" | "fill" | "down":
                opened.setdefault(name, event.time)
            case "go on" | "free" | "up":
                begin = opened.pop(name, event.time)
                until = event.time
                if event.kind == "up":
                    later = [t for t in started.get(name, []) if t > event.time]
                    until = later[0] if later and not name.startswith("rank") else event.time + AFTER_S
                    if name.startswith("rank") and len(later) > 1:
                        until = later[1]
                troubles.append((begin, until + AFTER_S))
    return sorted(troubles)


def _longest_free(left: float, right: float, troubles: list[tuple[float, float]]) -> float:
    """Longest stretch of [left, right] without trouble."""
    longest = 0.0
    at = left
    for begin, end in troubles:
        if begin >= right:
            break
        longest = max(longest, min(begin, right) - at)
        at = max(at, end)
    return max(longest, right - at)


def _of_kinds(events: Iterable[Event], *kinds: str) -> list[Event]:
    return [event for event in events if event.kind in kinds]
