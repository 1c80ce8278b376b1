"""Credits and losses by name: see plugs.py for what a name may be."""

from collections.abc import Mapping, Sequence
from typing import Any

# Imported so that they register themselves.
from impala_llm.algorithms import advantages, distillation, losses, preference, vtrace
from impala_llm.algorithms.interface import CREDITS, LOSSES, Credit, Loss
from impala_llm.plugs import Kind, choose, load, make_options

__all__ = ["CREDITS", "LOSSES", "PARTS", "compose_part"]
_REGISTERING = (advantages, distillation, losses, preference, vtrace)

PARTS = {
    "credit": Kind("algorithm.credit", "algorithm.credit", "impala_llm.credits", CREDITS, Credit),
    "loss": Kind("algorithm.loss", "algorithm.loss", "impala_llm.losses", LOSSES, Loss),
}
"""By the setting of `AlgorithmConfig` that names one."""


def compose_part(kind: Kind, in_files: Mapping[str, Any], words: Sequence[str]) -> Credit | Loss:
    """Make the part that settings name, with its options. For what is given and raised see `plugs.choose` and
    `plugs.make_options`."""
    name, values = choose(kind, in_files, words)
    made = make_options(kind, name, load(kind, name), values)
    assert isinstance(made, Credit | Loss)
    return made
