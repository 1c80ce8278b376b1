"""The token budget of an earlier learner: under which conditions a later one takes it over, and the file in the run's
folder by which a learner whose ranks share the policy leaves a lower one to the next.

Invariant: a budget that was found or lowered under other conditions than today's is not taken over.
"""

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from impala_llm.learning.policy.model import PolicyModel
from impala_llm.learning.ranks.parallel import Ranks
from impala_llm.settings import Config, model_directory, written

NOTE = "token_budget.json"
"""Name of the file in the run's folder."""


def conditions(config: Config, ranks: Ranks, model: PolicyModel) -> dict[str, Any]:
    """Return what the memory and the time of a micro-batch depend on, by name. All ranks call it, and those that share
    the policy get the same.

    Args:
        model: placed, with the attention that was chosen for it.
    """
    learner, algorithm = config.learner, config.algorithm
    found = {
        "the device": _devices(ranks),
        "model.path": _resolved(config.model.path),
        "the model's parameters": sum(p.numel() for p in model.parameters()),
        "model.lora.rank": config.model.lora.rank,
        "engine.max_length": config.engine.max_length,
        "learner.precision": learner.precision,
        "learner.activation_checkpointing": learner.activation_checkpointing,
        "learner.compile_layers": learner.compile_layers,
        "the attention": model.attention,
        "learner.sharding": learner.sharding,
        "learner.cpu_offload": learner.cpu_offload,
        "learner.tensor_parallel": learner.tensor_parallel,
    }
    if learner.sharding == "fsdp2":  # a rank's share
        found["learner.num_ranks"] = learner.num_ranks
    if algorithm.uses_reference:
        found["the reference policy"] = _resolved(algorithm.reference or "the first policy")
    if teacher := getattr(algorithm.credit, "teacher", None):
        found["the teacher"] = _resolved(teacher)
    return found


def _devices(ranks: Ranks) -> str:
    """The kind of the device; of all ranks' devices, where they share the policy and with it the budget."""
    device = ranks.device
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else device.type
    found = ranks.gather({"names": [name]}, of_processes=True) if ranks.is_sharded else [{"names": [name]}]
    return " and ".join(sorted({name for of_rank in found for name in of_rank["names"]}))


def _resolved(path: str) -> str:
    """A model's directory; as it is written where it has none."""
    return str(model_directory(path) or path)


def differences(before: Mapping[str, Any], now: Mapping[str, Any]) -> str:
    """Return a sentence on the conditions that have changed; empty where none has.

    Args:
        before: of the budget that was kept.
    """
    changed = [key for key in {**before, **now} if before.get(key) != now.get(key)]
    return ", ".join(f"{key} was {written(before.get(key))} and is {written(now.get(key))}" for key in changed)


def write_note(path: Path, state: Mapping[str, Any]) -> None:
    """Write the state of a budget for the next learner, which then finds all of it or the one before.

    Raises:
        OSError: the disk refuses it.
    """
    aside = path.with_name(f"{path.name}.new-{os.getpid()}")
    aside.write_text(json.dumps(state))
    aside.replace(path)


def read_note(path: Path) -> dict[str, Any] | None:
    """Return the state that an earlier learner has written; None where there is none, or none that can be read."""
    try:
        state = json.loads(path.read_bytes())
        tokens, configured, before = state["tokens"], state["configured"], state["conditions"]
    except (OSError, ValueError, KeyError, TypeError):
        return None
    is_whole = isinstance(tokens, int) and isinstance(configured, int | str) and isinstance(before, dict)
    return dict(state) if is_whole and tokens > 0 else None
