"""Asks a credit or a loss, which may be the user's own code, what keeps it from going with the other settings."""

from typing import Any

from impala_llm.plugs import raised_at
from impala_llm.processes.stop_signals import ToldToStop
from impala_llm.settings import AlgorithmConfig, CreditSettings, LossSettings


def problems_of(part: CreditSettings | LossSettings, algorithm: AlgorithmConfig) -> list[str]:
    """Return the problems that a part has with other settings; if it cannot say them, return what is wrong with it.

    Args:
        part: the credit or the loss.
        algorithm: settings that it is asked about.
    """
    key = "algorithm.credit" if isinstance(part, CreditSettings) else "algorithm.loss"
    unusable = f"{key}={part.name} cannot be used: its problems()"
    try:
        found: Any = part.problems(algorithm)
        if isinstance(found, list | tuple) and all(isinstance(each, str) for each in found):
            return list(found)
    except (KeyboardInterrupt, ToldToStop):
        raise
    except BaseException as error:  # it may be other people's code, which may exit too
        reason = " ".join(str(error).split())
        return [f"{unusable} raised {type(error).__name__}: {reason}{raised_at(error)}: correct it"]
    return [f"{unusable} returned {found!r}: a list of sentences is expected, an empty one where there are none"]
