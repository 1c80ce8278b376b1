"""Random examples of a test by Hypothesis: few in each run, and IMPALA_LLM_EXAMPLES times as many where it is set."""

import os


def examples(number: int) -> int:
    return number * int(os.environ.get("IMPALA_LLM_EXAMPLES", "1"))
