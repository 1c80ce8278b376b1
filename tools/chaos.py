#!/usr/bin/env python
"""Learner ranks, actors and engines as processes, killed, stopped and cut off at random; then: was anything lost?

    python tools/chaos.py --minutes 10 --seed 0
    python tools/chaos.py --minutes 0.5 --seed 3 --json --logs /tmp/c3

Exit status 1 where an invariant was broken. What is started and what is checked: tests/system/chaos/.
"""

import argparse
import json
import os
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from tests.system.chaos.run import Outcome, command_with_own_shared_memory, has_own_shared_memory, run_chaos  # noqa: E402
from tests.system.chaos.settings import SABOTAGES  # noqa: E402

MOST_SHOWN = 20


def as_json(outcome: Outcome) -> str:
    return json.dumps(
        {
            "minutes": round(outcome.seconds / 60, 3),
            "seed": outcome.seed,
            "counts": outcome.counts,
            **outcome.verdict.figures,
            "violations": outcome.verdict.violations,
        }
    )


def as_table(outcome: Outcome) -> str:
    rows = [("minutes", outcome.seconds / 60), ("seed", outcome.seed)]
    rows += [*outcome.counts.items(), *outcome.verdict.figures.items()]
    lines = [f"{name:24}{value:>12g}" for name, value in rows]
    violations = outcome.verdict.violations
    lines.append(f"{'violations':24}{len(violations):>12}")
    lines += [f"  {text}" for text in violations[:MOST_SHOWN]]
    if len(violations) > MOST_SHOWN:
        lines.append(f"  and {len(violations) - MOST_SHOWN} more")
    return "\n".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--minutes", type=float, default=10.0, help="minutes of fault injection, start and end not included"
    )
    parser.add_argument("--seed", type=int, default=0, help="seed of the faults, of the proxy and of the task order")
    parser.add_argument("--json", action="store_true", help="one object instead of a table")
    parser.add_argument("--logs", type=Path, help="where to keep the logs; a short path")
    parser.add_argument("--sabotage", choices=SABOTAGES, default="", help="build a fault in, which must be found")
    arguments = parser.parse_args()
    if not has_own_shared_memory():
        command, environment = command_with_own_shared_memory([sys.executable, *sys.argv])
        if environment != dict(os.environ):
            os.execvpe(command[0], command, environment)
        print("chaos: no /dev/shm of our own here (unshare --mount): it will not be filled", file=sys.stderr)
    outcome = run_chaos(60 * arguments.minutes, arguments.seed, arguments.logs, arguments.sabotage)
    print(as_json(outcome) if arguments.json else as_table(outcome))
    return 1 if outcome.verdict.violations else 0


if __name__ == "__main__":
    sys.exit(main())
