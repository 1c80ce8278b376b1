"""Memory that a run certainly needs for its model, on each GPU and on the host, before any activation."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import psutil

from impala_llm.config import ConfigError
from impala_llm.gpus import deal_gpus, visible_gpus
from impala_llm.learning.policy.model_files import float32_bytes, layer_parameters
from impala_llm.processes.cgroups import most_memory
from impala_llm.settings import Config, LearnerConfig, other_models

STATE_BYTES, FROZEN_BYTES = 16, 4
"""Bytes a parameter in a learner rank: float32 weight, gradient, and AdamW's two moments; the weight alone."""
READ_BYTES, COPIED_BYTES = 4, 12
"""Bytes a parameter of the host's memory: the policy as each process of the learner reads it at its start; weight and
moments as a checkpoint copies them before they are written."""


@dataclass(frozen=True)
class Needs:
    """Needs of a run's model, in GB."""

    process: float
    """Weights, gradients and moments of a process of the learner."""
    others: Mapping[str, float]
    """Weights of a reference and a teacher, by the settings that name them: whole in each process of the learner, on
    its device."""
    num_processes: int
    engine: float
    """Weights of an actor's embedded engine; 0 where a server has its own."""
    read: float
    """The policy in the host's memory, of each process that reads it."""
    copied: float
    """Copy for a checkpoint, of all processes."""


def needs_of(config: Config) -> Needs:
    """Return what a run's model needs, by the rules of docs/sharding.md."""
    learner, parameters = config.learner, float32_bytes(config.model.path) // 4
    has_adapters, is_embedded = config.model.lora.rank > 0, config.engine.name == "torch"
    divided = parameters if learner.sharding == "fsdp2" else layer_parameters(config.model.path)
    share = divided / (learner.num_ranks if learner.sharding == "fsdp2" else learner.tensor_parallel)
    width = FROZEN_BYTES if has_adapters else STATE_BYTES  # adapters are small beside it
    is_copied = learner.checkpoints_kept > 0 and not has_adapters
    return Needs(
        process=width * (share + parameters - divided) / 1e9,
        others={key: FROZEN_BYTES * number / 1e9 for key, number in _other_parameters(config, parameters).items()},
        num_processes=learner.num_processes,
        engine=is_embedded * (2 if config.engine.dtype == "bfloat16" else 4) * parameters / 1e9,
        read=READ_BYTES * parameters / 1e9,
        copied=is_copied * COPIED_BYTES * parameters / 1e9,
    )


def _other_parameters(config: Config, of_policy: int) -> dict[str, int]:
    """Return how many parameters each model has that a learner loads beside the policy, by the setting that names it.

    Args:
        of_policy: number of the policy's.
    """
    found = {key: float32_bytes(path) // 4 for key, path in other_models(config).items()}
    # The policy that training begins with; with LoRA it is the one that learns, without its adapters.
    if config.algorithm.uses_reference and config.algorithm.reference is None and config.model.lora.rank == 0:
        found["algorithm.reference"] = of_policy
    return found


def _size(gb: float) -> str:
    """A size as people read it."""
    return f"{gb:.1f} GB" if gb >= 0.1 else f"{1000 * gb:.0f} MB"


def look(config: Config, gpus: Sequence[Mapping[str, Any]]) -> tuple[str, list[str]]:
    """Compare what the model needs with the memory of the GPUs and of the host.

    Args:
        gpus: that torch can use, each with its size, "gb".

    Returns:
        What is needed, in words, and what is wrong.
    """
    needs, learner = needs_of(config), config.learner
    if not needs.process and not sum(needs.others.values()):
        return f"not counted: there are no weights of model.path={config.model.path} yet", []
    is_on_gpus = bool(gpus) and config.model.device != "cpu"
    state = f"{_size(needs.process)} for weights, gradients and optimizer of a process; activations come on top"
    state += "".join(f"; {_size(size)} for {key}, whole in each process" for key, size in needs.others.items())
    problems = _gpu_problems(config, needs, gpus) if is_on_gpus else []
    held = 0.0 if is_on_gpus and not learner.cpu_offload else needs.num_processes * needs.process
    others = {} if is_on_gpus else {key: needs.num_processes * size for key, size in needs.others.items()}
    held += sum(others.values())
    where = f"model.path={config.model.path} with learner.num_ranks={learner.num_ranks}"
    if not is_on_gpus:
        state += f"; {_size(config.num_actors * needs.engine)} for the weights of the actors' engines"
        where += f" and actor.num_actors={config.num_actors}"
        held += config.num_actors * needs.engine
    what, num_readers, start = _largest_reading(needs, learner, is_on_gpus)
    state += f"; of the host {_size(start)} at the start, {_size(needs.copied)} for the copy of a checkpoint"
    there = min(psutil.virtual_memory().total, most_memory()) / 1e9
    if (needed := held + needs.copied) > there:
        remedies = ["set learner.checkpoints_kept=0, which writes none"]
        if held > there:
            remedies = _host_remedies(config, needs, is_on_gpus)
        named = "".join(f"{size:.1f} GB of them for {key}, whole in each process, " for key, size in others.items())
        at_start = f", at its start {start:.1f} GB" if start > needed else ""
        problems.append(
            f"{where} takes {needed:.1f} GB of this host's {there:.1f} GB{at_start}, {named}{needs.copied:.1f} GB of "
            f"them as the copy for a checkpoint: {_fix(config, others, needed, there, remedies, 'more memory')}"
        )
    elif start > there:
        several = num_readers > 1
        remedies = ["lower learner.num_ranks"] if several and learner.num_ranks > 1 else []
        readers = f"{num_readers} processes read {what} each" if several else f"a process reads {what}"
        read = {what: start} if what in needs.others else {}
        problems.append(
            f"{where} takes {start:.1f} GB of this host's {there:.1f} GB at its start, where {readers}: "
            f"{_fix(config, read, start, there, remedies, 'more memory')}"
        )
    return state, problems


def _largest_reading(needs: Needs, learner: LearnerConfig, is_on_gpus: bool) -> tuple[str, int, float]:
    """Return the models of which the host holds most at the start: which, read by how many processes, and the GB."""
    # Processes read a model one after another where the host does not hold it several times, and keep of it what they
    # need. Those that divide each matrix keep all of it until the last has read it.
    is_shared = learner.sharding == "fsdp2"
    keeps_all = learner.tensor_parallel > 1 or not (is_on_gpus or is_shared)
    num_readers = needs.num_processes if keeps_all else 1
    shares = needs.read if is_shared and (learner.cpu_offload or not is_on_gpus) else 0.0
    found = [("the whole policy", num_readers, num_readers * needs.read + shares)]
    if is_on_gpus:
        found += [(key, 1, size + shares) for key, size in needs.others.items()]
    return max(found, key=lambda reading: reading[2])


def look_at_engines(config: Config, gpus: Sequence[Mapping[str, Any]]) -> tuple[str, list[str]]:
    """Compare what the embedded engines need with the memory of a host that has actors alone; see `look`."""
    size, is_on_gpus = needs_of(config).engine, bool(gpus) and config.model.device != "cpu"
    if not size:
        is_embedded = config.engine.name == "torch"
        reason = f"there are no weights of model.path={config.model.path} yet" if is_embedded else "no embedded engines"
        return f"not counted: {reason}", []
    places = {"this host": min(psutil.virtual_memory().total, most_memory()) / 1e9}
    numbers = {"this host": config.num_actors}
    if is_on_gpus:
        names, dealt = visible_gpus(), deal_gpus(config, visible_gpus()).actors
        places = {f"GPU {name}": gpu["gb"] for name, gpu in zip(names, gpus, strict=False)}
        numbers = {f"GPU {name}": sum(name in own for own in dealt) for name in names}
    state = f"{_size(size)} for the weights of an engine, {config.num_actors} of them; keys and values come on top"
    for place, there in places.items():
        number = numbers[place]
        if number * size > there:
            fix = "lower actor.num_actors, or " * (number > 1 and size <= there)
            fix += "set engine.dtype=bfloat16, or " * (config.engine.dtype == "float32" and number * size / 2 <= there)
            engines = "the actor's engine takes" if number == 1 else f"the engines of {number} actors take"
            return state, [
                f"{place} has {_size(there)}, and with model.path={config.model.path} {engines} {_size(number * size)} "
                f"for weights alone: {fix}take a smaller model or more memory"
            ]
    return state, []


def _fix(
    config: Config, others: Mapping[str, float], needed: float, there: float, remedies: Sequence[str], more: str
) -> str:
    """Return what to do where memory does not suffice.

    Args:
        others: GB of each other model, by the setting that names it: a part of `needed`.
        there: GB of the memory.
        remedies: what makes other parts smaller; where the other models alone are too large it does not help.
        more: what has more memory.
    """
    found, smaller, of_others = list(remedies), "a smaller model or ", sum(others.values())
    if of_others > needed / 2:
        if of_others > there:
            found, smaller = [], ""
        key = max(others, key=lambda key: others[key])
        found.insert(0, f"set {key} to a smaller model")
        if key == "algorithm.reference" and config.algorithm.reference is None:
            found.insert(0, f"set model.lora.rank=16{_undivided(config)}, whose policy without adapters serves as it")
    return "".join(f"{remedy}, or " for remedy in found) + f"take {smaller}{more}"


def _undivided(config: Config) -> str:
    """End of a fix that does not go with a larger learner.tensor_parallel."""
    return " and learner.tensor_parallel=1" * (config.learner.tensor_parallel > 1)


def _host_remedies(config: Config, needs: Needs, is_on_gpus: bool) -> list[str]:
    """Return what lowers the sum that a run's processes hold of the host's memory, whatever their number: ranks that
    share the policy hold together what a single one does."""
    learner, found = config.learner, []
    if learner.sharding != "fsdp2" and learner.num_ranks > 1:
        found.append(
            f"set learner.sharding=fsdp2{_undivided(config)}, by which the ranks hold the policy once together"
        )
    if not is_on_gpus and needs.engine and config.num_actors > 1:
        found.append("lower actor.num_actors")
    if config.model.lora.rank == 0 and learner.tensor_parallel == 1:
        found.append("set model.lora.rank=16, with which only adapters have gradients and moments")
    return found


def _gpu_problems(config: Config, needs: Needs, gpus: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return a sentence on the first GPU that does not hold its part of the learner and its engines."""
    names, learner = visible_gpus(), config.learner
    try:
        shares = deal_gpus(config, names)
    except ConfigError:
        return []  # "device" has it
    for name, gpu in zip(names, gpus, strict=False):
        others = needs.others if name in shares.learner else {}
        of_learner = needs.process if name in shares.learner and not learner.cpu_offload else 0.0
        num_engines = sum(name in own for own in shares.actors) if needs.engine else 0
        needed = of_learner + sum(others.values()) + num_engines * needs.engine
        if needed > gpu["gb"]:
            beside = "".join(f", {size:.1f} GB for {key}, whole in each process" for key, size in others.items())
            engines = f", and {num_engines} engine{'s' * (num_engines > 1)} of actors" if num_engines else ""
            is_shared = learner.sharding == "fsdp2"
            remedies = [] if is_shared else [f"set learner.sharding=fsdp2{_undivided(config)}, with more ranks"]
            fix = _fix(config, others, needed, gpu["gb"], remedies, "a larger GPU")
            return [
                f"GPU {name} has {gpu['gb']:.1f} GB, and model.path={config.model.path} with learner.num_ranks="
                f"{learner.num_ranks} and learner.tensor_parallel={learner.tensor_parallel} takes {needed:.1f} GB "
                f"({of_learner:.1f} GB for the learner{beside}{engines}): {fix}"
            ]
    return []
