"""Settings that others keep from having an effect in `train`: `load` refuses those that are words of the command line,
`--dry-run` hides them, and a run that goes on may have others."""

from collections.abc import Sequence
from dataclasses import fields, replace
from typing import Any, NamedTuple

from impala_llm.checks.own_problems import problems_of
from impala_llm.plugs import read_word
from impala_llm.settings import AgentConfig, Config, LearnerConfig, leaves, written


class Idle(NamedTuple):
    """Why a setting has no effect."""

    reason: str
    """To be read after "has no effect", such as "with engine.name=torch"."""
    fix: str = ""
    """Setting with which it has one; empty where none is better than leaving it out."""
    is_refused: bool = True
    """Whether it is refused as a word of the command line. Not where another command reads it, and not where a
    comparison gives the same words to all of its arms, such as samplers, of which one has no use for them."""


_Rule = tuple[bool, Sequence[str], Idle]
"""Whether settings are idle, their keys, and why."""
# Not those of an engine of the user's own, which may read every setting, or wrap SGLang's.
_OF_SERVERS = [f"engine.{key}" for key in ("python", "urls", "in_flight", "transfer", "tensor_parallel", "prefix_cache",
                                           "memory_fraction", "server_args", "start_timeout_s",
                                           "request_timeout_s")]  # fmt: skip
_OF_STARTED_SERVERS = [f"engine.{key}" for key in ("python", "tensor_parallel", "prefix_cache", "memory_fraction",
                                                   "server_args")]  # fmt: skip
_OF_EVALUATIONS = [f"evaluation.{key}" for key in ("run_tasks", "run_temperature", "run_share", "run_timeout_s",
                                                   "patience")]  # fmt: skip
_OF_A_TABLE = [f"evaluation.{key}" for key in ("split", "num_tasks", "baselines", "num_examples", "unseen_seed")]
_OF_THE_SPEAKER = ["env.webshop.script_speaks", "env.webshop.script_speaks_of_prices"]
_OF_THE_SHOP = ["env.webshop", "evaluation.unseen_seed"]
_OF_A_CLIP = [f"algorithm.loss.{key}" for key in ("clip_low", "clip_high", "dual_clip")]
_OF_REWARDS = [f"algorithm.{key}" for key in ("normalize_reward", "overlong_tokens", "overlong_penalty",
                                              "reward_kl_coef", "credit.discount")]  # fmt: skip


def idle_settings(config: Config) -> dict[str, Idle]:
    """Return those of a configuration for `train`, by key; the key of a section stands for all that is in it."""
    rules = [*_rules_of_parts(config), *_rules_of_learning(config)]
    return {key: why for is_idle, keys, why in rules if is_idle for key in keys}


def _rules_of_parts(config: Config) -> list[_Rule]:
    """Rules for tasks, engine, model and evaluation. If two rules name one setting, the later one holds."""
    engine = config.engine
    of_agents = [f"agent.{key}" for key, _ in leaves(AgentConfig()) if key not in ("name", "command")]
    agent = "agent.command" if config.agent.name is None else "agent.name"
    return [
        (not config.evaluation.before_and_after, _OF_A_TABLE,
         Idle("without evaluation.before_and_after", "evaluation.before_and_after=true", is_refused=False)),
        (engine.name == "torch", _OF_SERVERS, Idle("with engine.name=torch", "engine=sglang")),
        (engine.name == "sglang" and engine.urls is not None, _OF_STARTED_SERVERS,
         Idle("with engine.urls, whose servers run already", "engine.urls=null")),
        (engine.name in ("torch", "sglang"), ["engine.options"],
         Idle(f"with engine.name={engine.name}, which has none")),
        (not config.agent.is_set, of_agents, Idle("without an agent", "agent.name or agent.command")),
        (config.env.name != "webshop", _OF_THE_SHOP, Idle(f"with env.name={config.env.name}", "env=webshop")),
        (config.agent.is_set, ["env.name", "env.args", *_OF_THE_SHOP],
         Idle("with an agent, which has its own tasks", f"{agent}=null")),
        (config.env.name == "webshop", ["env.args"], Idle("with env.name=webshop, which has none")),
        (config.plays_shop and config.env.webshop.catalogue == "easy",
         _OF_THE_SPEAKER, Idle("with env.webshop.catalogue=easy", "env.webshop.catalogue=hard")),
        (config.plays_shop and config.env.webshop.items is not None, _OF_THE_SPEAKER,
         Idle("with env.webshop.items, whose shopper says nothing",
              "env.webshop.items=null and env.webshop.attributes=null")),
        (config.model.path != "scratch", ["model.scratch"],
         Idle(f"with model.path={config.model.path}", "model=scratch")),
        (config.model.device == "cpu", ["model.cuda_products"], Idle("with model.device=cpu", "model.device=auto")),
        (config.model.lora.rank == 0, ["model.lora.alpha", "model.lora.targets"],
         Idle("with model.lora.rank=0, which trains all weights", "model.lora.rank=16")),
        (config.pipeline.bind is None and config.pipeline.connect is None, ["pipeline.keys"],
         Idle("without pipeline.bind and pipeline.connect", "pipeline.bind=tcp://0.0.0.0:7400")),
        (not config.evaluation.inside_run, _OF_EVALUATIONS,
         Idle("without evaluations inside of the run", "evaluation.every_updates=50")),
    ]  # fmt: skip


def _rules_of_learning(config: Config) -> list[_Rule]:
    """Rules for algorithm, learner and replay buffer. A fix names all words without which it would be refused."""
    algorithm, learner, replay = config.algorithm, config.learner, config.replay
    loss: Any = algorithm.loss
    clips_one = loss.name == "decoupled_ppo" and loss.proximal == "recomputed" and learner.steps_per_update == 1
    usual = LearnerConfig()
    no_reward_kl = ", reward_kl_coef=0" if algorithm.credit.learns_from_rewards else ""
    no_reference = f"with algorithm.kl_coef=0{no_reward_kl} and algorithm.credit={algorithm.credit.name}"
    rejecting = replace(algorithm, reject="token")
    may_reject = problems_of(algorithm.credit, rejecting) == problems_of(algorithm.credit, algorithm)
    shares = ["learner.sharding=fsdp2"]
    if learner.tensor_parallel > 1:
        shares.append("learner.tensor_parallel=1")
    overlong = max(1, config.engine.max_length // 4)
    by_std = "algorithm.credit.normalize_std=true" if getattr(algorithm.credit, "normalize_std", False) else ""
    no_head = Idle(f"with algorithm.credit={algorithm.credit.name}, which has no value head", "algorithm.credit=gae")
    replayed = "replay.max_replayed_share=0.5" + (" and replay.max_replays=4" if replay.max_replays == 1 else "")
    return [
        # A fitted head of this width, beside the weights of model.path, is kept also where nothing trains it.
        (not algorithm.credit.uses_values and config.model.path == "scratch", ["model.value_hidden_size"], no_head),
        (not algorithm.credit.uses_values, ["learner.value_learning_rate"], no_head),
        # Not refused here: the study gives value_trunk_gradient as a word with every credit, and a value_warmup_updates
        # other than 0 is refused by settings_checks, in files too.
        (not algorithm.credit.uses_values, ["model.value_trunk_gradient", "learner.value_warmup_updates"],
         no_head._replace(is_refused=False)),
        (algorithm.credit.ignores_turn_ratio, ["algorithm.credit.turn_ratio"],
         Idle("with algorithm.credit.granularity=token", "algorithm.credit.granularity=turn")),
        # Not refused here: settings_checks refuses a refill above 0, and a comparison of losses gives a clip to all.
        (not algorithm.credit.compares_group, ["algorithm.refill"],
         Idle(f"with algorithm.credit={algorithm.credit.name}, which compares no group", is_refused=False)),
        (clips_one, _OF_A_CLIP, Idle("with one optimizer step an update, where π/π_prox is 1", is_refused=False)),
        (not algorithm.uses_reference, ["algorithm.reference"], Idle(no_reference, "algorithm.kl_coef=0.05")),
        (algorithm.overlong_tokens is None, ["algorithm.overlong_penalty"],
         Idle("with algorithm.overlong_tokens=null", f"algorithm.overlong_tokens={overlong}")),
        (not algorithm.credit.learns_from_rewards, _OF_REWARDS,
         Idle(f"with algorithm.credit={algorithm.credit.name}, which learns from no reward")),
        (algorithm.credit.ignores_scale, ["algorithm.normalize_reward"],
         Idle(f"with {by_std or f'algorithm.credit={algorithm.credit.name}'}, whose advantages are the same at any "
              "scale of rewards", "algorithm.credit.normalize_std=false" if by_std else "")),
        (algorithm.entropy_target is None, ["algorithm.entropy_rate"],
         Idle("with algorithm.entropy_target=null", "algorithm.entropy_target=0.5")),
        (algorithm.reject == "none", ["algorithm.reject_low", "algorithm.reject_high"],
         Idle("with algorithm.reject=none", "algorithm.reject=token" if may_reject else "")),
        (learner.num_processes == 1, ["learner.rank_timeout_s"],
         Idle("with a learner of one process", "learner.num_ranks=2")),
        (learner.sharding != "fsdp2", ["learner.cpu_offload"],
         Idle(f"with learner.sharding={learner.sharding}", " and ".join(shares))),
        (learner.decay == "constant", ["learner.final_learning_rate_fraction"],
         Idle("with learner.decay=constant", "learner.decay=linear")),
        (learner.checkpoints_kept == 0, ["learner.checkpoint_every", "learner.checkpoint_minutes"],
         Idle("with learner.checkpoints_kept=0", f"learner.checkpoints_kept={usual.checkpoints_kept}")),
        (not replay.prioritised, ["replay.uniform_floor", "replay.correction_exponent"],
         Idle("with replay.max_replays=1 and no priorities, where the oldest is drawn first", "replay=prioritised",
              is_refused=replay.max_replays == 1)),
        (replay.max_replays == 1, ["replay.advantage_exponent"],
         Idle("with replay.max_replays=1, where an episode leaves the buffer before its advantage is known",
              "replay.max_replays=2")),
        (replay.max_replayed_share is None, ["replay.target_ess"],
         Idle("without replay.max_replayed_share", replayed)),
    ]  # fmt: skip


def idle_problems(config: Config, words: Sequence[str] = ()) -> list[str]:
    """Return the words of the command line that have no effect, as sentences with key, value and fix.

    What stands in a file is not refused: a file, such as the config.yaml of a run, holds settings for every choice, and
    where another one is made beside it, as with engine=torch, those of the first one wait.

    Args:
        words: `key=value` of the command line.
    """
    idle, defaults, given = idle_settings(config), dict(leaves(Config())), given_keys(words)
    defaults |= {f"algorithm.credit.{option.name}": option.default for option in fields(config.algorithm.credit)}
    found = []
    for key, value in leaves(config):
        why = idle.get(key) or idle.get(key.rpartition(".")[0])
        is_given = any(f"{word}.".startswith(f"{key}.") for word in given)
        if is_given and why and why.is_refused and value != defaults.get(key):
            fix = f"{why.fix}, for instance, or " if why.fix else ""
            # An environment's own arguments have no default that could be given.
            has_default = key in defaults and not key.startswith("env.args")
            default = f"{key}={written(defaults[key])}" if has_default else "no env"
            found.append(f"{key}={written(value)} has no effect {why.reason}: set {fix}{default}")
    return found


def given_keys(words: Sequence[str]) -> set[str]:
    """Return the keys of the settings that words of the command line set, those of a section one by one."""
    found = set()
    for word in words:
        key, _, value = word.lstrip("+").partition("=")
        found |= {f"{key}.{name}" for name in read_word(word)[1]} if value.startswith("{") else {key}
    return found


def in_force(settings: dict[str, Any], config: Config) -> dict[str, Any]:
    """Return settings, as nested dicts, without those that have no effect in `train`."""
    left_out = {*idle_settings(config), "demonstrations", "sft", "evaluation.start"}

    def kept(section: dict[str, Any], prefix: str) -> dict[str, Any]:
        return {
            key: kept(value, f"{prefix}{key}.") if isinstance(value, dict) else value
            for key, value in section.items()
            if f"{prefix}{key}" not in left_out
        }

    return kept(settings, "")
