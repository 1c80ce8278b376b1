"""Settings that others keep from having an effect: `load` refuses those that are given, `--dry-run` hides them."""

from collections.abc import Sequence
from typing import Any, NamedTuple

from impala_llm.settings import AgentConfig, Config, LearnerConfig, leaves, written


class Idle(NamedTuple):
    """Why a setting has no effect."""

    reason: str
    """To be read after "has no effect", such as "with engine.name=torch"."""
    fix: str
    """Setting with which it has one."""
    is_refused: bool
    """Whether any value but the default is refused, wherever it stands. Presets and files of runs have the others, and
    the setting that makes them idle may stand beside: they are refused as words of the command line alone."""


def idle_settings(config: Config) -> dict[str, Idle]:
    """Return those of a configuration for `train`, by key; the key of a section stands for all that is in it."""
    algorithm, engine, learner, replay = config.algorithm, config.engine, config.learner, config.replay
    evaluation, longest = config.evaluation, engine.max_length
    kept = LearnerConfig().checkpoints_kept
    is_queue = not replay.prioritised and replay.max_replays == 1
    of_agents = [f"agent.{key}" for key, _ in leaves(AgentConfig()) if key not in ("name", "command")]
    of_servers = ("python", "urls", "in_flight", "transfer", "tensor_parallel", "prefix_cache", "memory_fraction",
                  "server_args", "start_timeout_s", "request_timeout_s")  # fmt: skip
    no_reference = f"with algorithm.kl_coef=0, reward_kl_coef=0 and algorithm.credit={algorithm.credit.name}"
    rules: list[tuple[bool, Sequence[str], str, str, bool]] = [
        (engine.name != "sglang", [f"engine.{key}" for key in of_servers], f"with engine.name={engine.name}",
         "engine=sglang", True),
        (not config.agent.is_set, of_agents, "without an agent", "agent.name or agent.command", True),
        (config.model.lora.rank == 0, ["model.lora.alpha", "model.lora.targets"],
         "with model.lora.rank=0, which trains all weights", "model.lora.rank=16", True),
        (learner.sharding != "fsdp2", ["learner.cpu_offload"], f"with learner.sharding={learner.sharding}",
         "learner.sharding=fsdp2", True),
        (not algorithm.uses_reference, ["algorithm.reference"], no_reference, "algorithm.kl_coef=0.05", True),
        (algorithm.overlong_tokens is None, ["algorithm.overlong_penalty"], "with algorithm.overlong_tokens=null",
         f"algorithm.overlong_tokens={max(1, longest // 4)}", True),
        (algorithm.entropy_target is None, ["algorithm.entropy_rate"], "with algorithm.entropy_target=null",
         "algorithm.entropy_target=0.5", True),
        (learner.checkpoints_kept == 0, ["learner.checkpoint_every"], "with learner.checkpoints_kept=0",
         f"learner.checkpoints_kept={kept}", True),
        (is_queue, ["replay.uniform_floor", "replay.correction_exponent"],
         "with replay.max_replays=1 and no priorities, where the oldest is drawn first", "replay=prioritised", False),
        (learner.checkpoints_kept == 0, ["learner.checkpoint_minutes"], "with learner.checkpoints_kept=0",
         f"learner.checkpoints_kept={kept}", False),
        (algorithm.reject == "none", ["algorithm.reject_low", "algorithm.reject_high"], "with algorithm.reject=none",
         "algorithm.reject=token", False),
        (learner.decay == "constant", ["learner.final_learning_rate_fraction"], "with learner.decay=constant",
         "learner.decay=linear", False),
        (config.model.path != "scratch", ["model.scratch"], f"with model.path={config.model.path}", "model=scratch",
         False),
        (config.env.name != "webshop", ["env.webshop"], f"with env.name={config.env.name}", "env=webshop", False),
        (config.agent.is_set, ["env.webshop"], "with an agent, which has its own tasks", "agent.name=null", False),
        (not evaluation.inside_run, [f"evaluation.run_{key}" for key in ("tasks", "temperature", "timeout_s")],
         "without evaluations inside of the run", "evaluation.every_updates=50", False),
    ]  # fmt: skip
    return {
        key: Idle(reason, fix, is_refused)
        for is_idle, keys, reason, fix, is_refused in rules
        if is_idle
        for key in keys
    }


def idle_problems(config: Config, words: Sequence[str] = ()) -> list[str]:
    """Return the settings that were given and have no effect, as sentences with key, value and fix.

    Args:
        words: `key=value` of the command line.
    """
    idle, found, defaults = idle_settings(config), [], dict(leaves(Config()))
    given = {word.lstrip("+").partition("=")[0] for word in words}
    for key, value in leaves(config):
        why = idle.get(key) or idle.get(key.rpartition(".")[0])
        if why and value != defaults[key] and (why.is_refused or key in given):
            found.append(
                f"{key}={written(value)} has no effect {why.reason}: set {why.fix}, for instance, or "
                f"{key}={written(defaults[key])}"
            )
    return found


def in_force(settings: dict[str, Any], config: Config) -> dict[str, Any]:
    """Return settings, as nested dicts, without those that have no effect in `train`."""
    left_out = {*idle_settings(config), "demonstrations", "sft"}

    def kept(section: dict[str, Any], prefix: str) -> dict[str, Any]:
        return {
            key: kept(value, f"{prefix}{key}.") if isinstance(value, dict) else value
            for key, value in section.items()
            if f"{prefix}{key}" not in left_out
        }

    return kept(settings, "")
