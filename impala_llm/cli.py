"""`impala-llm`: train (one host: learner and actors, supervised), evaluate, bench, keys (for actors on other hosts).

impala-llm train [--dry-run] key=value ...
impala-llm evaluate [--json] key=value ...
impala-llm bench NAME [--json] [--option value ...]
impala-llm keys --dir DIR [--actors NAME,NAME,...]
"""

import sys
from collections.abc import Sequence

from impala_llm.config import ConfigError, load
from impala_llm.settings import Config

USAGE = (
    __doc__.strip()
    + "\n\nKeys and groups: configs/ and impala_llm/config.py. Start with: impala-llm train experiment=quickstart"
)


def train(config: Config, overrides: Sequence[str]) -> int:
    """Train, then show before and after if `evaluation.before_and_after`."""
    from impala_llm.launch import supervise

    code = supervise(config, overrides)
    if code == 0 and config.evaluation.before_and_after:
        from impala_llm.evaluate import compare

        compare(config)
    return code


def main(argv: Sequence[str] | None = None) -> int:
    """Entry of the console script. Returns the exit code; 2 for bad input."""
    words = list(sys.argv[1:] if argv is None else argv)
    command, rest = (words[0], words[1:]) if words else ("", [])
    if command not in ("train", "evaluate", "bench", "keys"):
        print(USAGE, file=sys.stdout if command in ("-h", "--help") else sys.stderr)
        return 0 if command in ("-h", "--help") else 2
    if command == "bench":
        from impala_llm.bench.frame import main as bench

        return bench(rest)
    if command == "keys":
        from impala_llm.pipeline.keys import main as keys

        return keys(rest)
    if "-h" in rest or "--help" in rest:
        print(USAGE)
        return 0
    flag = "--dry-run" if command == "train" else "--json"
    flagged, overrides = flag in rest, [word for word in rest if word != flag]
    try:
        config = load(overrides)
    except ConfigError as error:
        print(f"impala-llm: {error}", file=sys.stderr)
        return 2
    if command == "evaluate":
        from impala_llm.evaluate import main as evaluate

        return evaluate(config, as_json=flagged)
    if flagged:
        from impala_llm.launch import dry_run

        print(dry_run(config, overrides))
        return 0
    return train(config, overrides)


if __name__ == "__main__":
    sys.exit(main())
