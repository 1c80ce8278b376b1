"""Credits and losses by name: see plugs.py for what a name may be."""

# Imported so that they register themselves.
from impala_llm.algorithms import advantages, distillation, losses, preference, stale_losses, vtrace
from impala_llm.algorithms.interface import CREDITS, LOSSES, Credit, Loss
from impala_llm.plugs import PartKind

__all__ = ["CREDITS", "LOSSES", "PARTS"]
_REGISTERING = (advantages, distillation, losses, preference, stale_losses, vtrace)

PARTS = {
    "credit": PartKind("algorithm.credit", "algorithm.credit", "impala_llm.credits", CREDITS, Credit),
    "loss": PartKind("algorithm.loss", "algorithm.loss", "impala_llm.losses", LOSSES, Loss),
}
"""Setting of `AlgorithmConfig` -> kind of part that it names."""
