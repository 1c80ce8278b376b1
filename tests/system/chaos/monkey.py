"""The monkey: which process is killed or stopped next, and when the shared memory is filled.

Invariant: what it does is a function of its seed alone; when it finds nothing to do it to, that is the world's affair.
"""

import math
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

STOP_S = (0.1, 8.0)
FILL_S = (0.5, 4.0)
PAUSE_S = 1.1
"""Between two actions, on average."""
RECOVERY_S = (0.05, 2.5)
"""After the kill of a rank, when another one may follow: ranks are up again in about so long."""
SECOND_KILL = 0.3
WEIGHTS = {"kill rank": 8, "kill": 30, "stop": 50, "fill": 4}


@dataclass(frozen=True)
class Action:
    """after_s: seconds after the one before. duration_s: of a stop or a filling."""

    after_s: float
    kind: Literal["kill", "stop", "fill"]
    name: str
    duration_s: float = 0.0


class Monkey:
    """ranks, others: names of the processes."""

    def __init__(self, seed: int, ranks: Sequence[str], others: Sequence[str]) -> None:
        self._random = random.Random(f"{seed} monkey")
        self._ranks, self._others = list(ranks), list(others)

    def actions(self) -> Iterator[Action]:
        """Without end."""
        rng = self._random
        while True:
            after = rng.expovariate(1 / PAUSE_S)
            what = rng.choices(list(WEIGHTS), list(WEIGHTS.values()))[0]
            if what == "kill rank":
                yield Action(after, "kill", rng.choice(self._ranks))
                while rng.random() < SECOND_KILL:
                    yield Action(rng.uniform(*RECOVERY_S), "kill", rng.choice(self._ranks))
            elif what == "kill":
                yield Action(after, "kill", rng.choice(self._others))
            elif what == "stop":
                duration = math.exp(rng.uniform(*map(math.log, STOP_S)))
                yield Action(after, "stop", rng.choice(self._ranks + self._others), duration)
            else:
                yield Action(after, "fill", "", rng.uniform(*FILL_S))
