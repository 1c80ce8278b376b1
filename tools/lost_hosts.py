#!/usr/bin/env python
"""Lose the host of a run at random moments: SIGKILL for all of its processes, and its shared memory deleted.

    python tools/lost_hosts.py --losses 10 --minutes 5 --seed 0

The run continues from its checkpoints each time, and must make the updates of an undisturbed one, bit by bit; what is
checked: tests/system/lost_hosts.py. Exit status 1 where a promise was not kept.
"""

import argparse
import random
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from tests.system.lost_hosts import violations  # noqa: E402
from tests.system.runs import Run  # noqa: E402

POLL_S = 0.02


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--losses", type=int, default=10, help="number of losses")
    parser.add_argument("--minutes", type=float, default=5.0, help="in which they happen, on average")
    parser.add_argument("--updates", type=int, default=6000, help="of the run: more than are made by the last loss")
    parser.add_argument("--seed", type=int, default=0, help="of the moments")
    arguments = parser.parse_args()
    if min(arguments.losses, arguments.minutes, arguments.updates) <= 0:
        parser.error("--losses, --minutes and --updates must be above 0")
    rng = random.Random(arguments.seed)
    mean_s = 60 * arguments.minutes / arguments.losses

    def at_random(run: Run) -> None:
        # Without a checkpoint a run that has lost its host is refused, as it should be.
        run.wait_for(lambda: list((run.directory / "checkpoints").glob("update-*/manifest.json")), "a checkpoint")
        moment = time.monotonic() + rng.uniform(0.0, 2 * mean_s)
        run.wait_for(lambda: time.monotonic() >= moment, "the moment", 4 * mean_s)
        print(f"loss at update {len(run.rows())}", flush=True)

    with tempfile.TemporaryDirectory(prefix="lost-hosts-") as directory:
        found = violations(Path(directory), arguments.updates, [at_random] * arguments.losses)
    for violation in found:
        print(violation)
    print(f"{arguments.losses} losses, {len(found)} promises not kept")
    return int(bool(found))


if __name__ == "__main__":
    sys.exit(main())
