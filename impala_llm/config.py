"""The door of all settings: composed with Hydra and checked. What each means: settings.py.

Invariant: whoever holds a `Config` holds a checked one. `load` composes it from configs/ and `key=value` overrides and
stops at the first door, before any process, socket or file exists, with sentences that name key, value and fix.
Nobody else reads raw Hydra dicts.
"""

import difflib
import math
import os
import re
import shutil
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import yaml
from hydra import compose, initialize_config_dir
from hydra.core.config_store import ConfigStore
from hydra.core.global_hydra import GlobalHydra
from hydra.errors import HydraException, OverrideParseException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import ConfigKeyError, InterpolationKeyError, OmegaConfBaseException

from impala_llm.hosts import (
    AUTHORISED,
    LEARNER_PUBLIC,
    LEARNER_SECRET,
    SECRET_SUFFIX,
    actor_secrets,
    check_bind,
    check_connect,
    is_loopback_url,
    rank_endpoint,
)
from impala_llm.known_models import reasons_against
from impala_llm.plugs import ENVIRONMENTS, Kind, choose, import_path, make_options, make_part, option_fields
from impala_llm.plugs import load as load_part
from impala_llm.settings import (
    ASSETS,
    PACKAGE,
    AlgorithmConfig,
    Config,
    EngineConfig,
    EnvConfig,
    field_problems,
    leaves,
    limits,
    model_directory,
    other_models,
)
from impala_llm.trajectory import block_words


class ConfigError(ValueError):
    """Settings that cannot work. Each line of the message names a key, its value and the fix."""

    MOST_LINES = 3

    @classmethod
    def of(cls, found: Sequence[str]) -> "ConfigError":
        """With a line for each problem, or for the first ones and the number of the others."""
        if len(found) <= cls.MOST_LINES:
            return cls("\n".join(found))
        shown = found[: cls.MOST_LINES - 1]
        return cls("\n".join([*shown, f"and {len(found) - len(shown)} more problems: mend these first"]))


CHOICES: dict[str, tuple[str, ...]] = {
    "env.webshop.goals": ("synthetic", "human"),
    "env.webshop.observation_mode": ("text", "text_rich", "compact"),
    "engine.name": ("torch", "sglang"),
    "engine.dtype": ("float32", "bfloat16"),
    "engine.in_flight": ("keep_kv", "recompute_kv", "drain"),
    "engine.transfer": ("disk", "distributed"),
    "model.device": ("auto", "cpu", "cuda"),
    "model.cuda_products": ("float32", "tf32"),
    "algorithm.reject": ("none", "token", "sequence", "geometric"),
    "algorithm.aggregate": ("token_mean", "sequence_mean_token_sum", "sequence_mean_token_mean"),
    "algorithm.recompute_behaviour": ("never", "on_mismatch", "always"),
    "learner.decay": ("constant", "linear", "cosine"),
    "evaluation.split": ("train", "validation", "test"),
}

BOUNDS: dict[str, tuple[float, float]] = {
    # key: smallest and largest allowed value, both included
    "run.seed": (0, 2**31 - 1),
    "env.webshop.num_products": (1, math.inf),
    "env.webshop.catalogue_seed": (0, 2**31 - 1),
    "env.webshop.max_steps": (1, math.inf),
    "env.webshop.max_invalid_actions": (1, math.inf),
    "env.webshop.results_per_page": (1, 50),
    "engine.temperature": (1e-3, 100),
    "engine.max_new_tokens": (1, math.inf),
    "engine.max_length": (2, math.inf),
    "engine.tensor_parallel": (1, math.inf),
    "engine.memory_fraction": (0.01, 0.99),
    "engine.start_timeout_s": (1e-3, math.inf),
    "engine.request_timeout_s": (1e-3, math.inf),
    "model.value_hidden_size": (0, math.inf),
    "model.scratch.hidden_size": (16, math.inf),
    "model.scratch.num_layers": (1, math.inf),
    "actor.num_actors": (0, 4096),
    "actor.max_episodes": (1, math.inf),
    "actor.episode_timeout_s": (1e-3, math.inf),
    "actor.unroll_turns": (1, math.inf),
    "actor.unroll_tokens": (1, math.inf),
    "algorithm.group_size": (1, math.inf),
    "algorithm.refill": (0, 1000),
    "algorithm.overlong_tokens": (1, math.inf),
    "algorithm.overlong_penalty": (0, 1e6),
    "algorithm.reward_kl_coef": (0, 1000),
    "algorithm.reject_low": (0, 1),
    "algorithm.reject_high": (1, math.inf),
    "algorithm.probability_limit": (0, 1),
    "algorithm.entropy_coef": (0, 1000),
    "algorithm.entropy_target": (0, 100),
    "algorithm.entropy_rate": (0, 1000),
    "algorithm.entropy_alarm": (0, 1),
    "algorithm.length_alarm": (0, 1),
    "algorithm.kl_coef": (0, 1000),
    "algorithm.max_staleness": (0, math.inf),
    "algorithm.mismatch_alarm": (1e-9, math.inf),
    "learner.num_ranks": (1, math.inf),
    "learner.batch_size": (1, math.inf),
    "learner.epochs": (1, 1000),
    "learner.minibatches": (1, math.inf),
    "learner.total_updates": (1, math.inf),
    "learner.sync_interval": (1, math.inf),
    "learner.max_minutes": (1e-3, math.inf),
    "learner.token_budget": (2, math.inf),
    "learner.learning_rate": (0, 1),
    "learner.value_learning_rate": (0, 1),
    "learner.weight_decay": (0, 1),
    "learner.adam_beta1": (0, 0.9999),
    "learner.adam_beta2": (0, 0.99999),
    "learner.warmup_updates": (0, math.inf),
    "learner.value_warmup_updates": (0, math.inf),
    "learner.final_learning_rate_fraction": (0, 1),
    "learner.max_grad_norm": (1e-6, math.inf),
    "learner.save_every": (0, math.inf),
    "learner.stall_timeout_s": (1, math.inf),
    "replay.capacity": (1, math.inf),
    "replay.capacity_mb": (1, math.inf),
    "replay.recency_tau": (1e-6, math.inf),
    "replay.advantage_exponent": (0, 100),
    "replay.rarity_exponent": (0, 100),
    "replay.uniform_floor": (0, 1),
    "replay.correction_exponent": (0, 1),
    "replay.max_replays": (1, math.inf),
    "replay.samples_per_insert": (1e-3, math.inf),
    "replay.max_replayed_share": (0, 1),
    "replay.target_ess": (0, 1),
    "pipeline.arena_mb": (1, 1 << 20),
    "pipeline.weight_slots": (2, 64),
    "pipeline.heartbeat_s": (1e-2, 3600),
    "pipeline.actor_timeout_s": (1e-1, math.inf),
    "pipeline.ticket_timeout_s": (1e-1, math.inf),
    "pipeline.learner_timeout_s": (1e-1, math.inf),
    "evaluation.num_tasks": (1, math.inf),
    "evaluation.unseen_seed": (0, 2**31 - 1),
    "evaluation.num_examples": (0, math.inf),
}


_RUN_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,39}")
"""It is part of the path of a socket, which must be short."""
BYTES_PER_TOKEN, METADATA_BYTES = 17, 1024
"""Of a trajectory (record.py), roughly: few turns, short texts."""


def problems(config: Config) -> list[str]:
    """All reasons why a configuration cannot work; empty when it can. Pure: looks at no process and starts none."""
    values = dict(leaves(config))
    found = []
    for key, allowed in CHOICES.items():
        if values[key] not in allowed:
            found.append(f"{key}={values[key]} is not known: choose one of {', '.join(allowed)}")
    for key, (low, high) in BOUNDS.items():
        value = values[key]
        if isinstance(value, int | float) and not low <= value <= high:
            found.append(f"{key}={value} is out of range: set it to {limits(low, high)}")
    found += field_problems("algorithm.credit", config.algorithm.credit)
    found += field_problems("algorithm.loss", config.algorithm.loss)
    if config.env.options is not None:
        found += field_problems("env.options", config.env.options)
    if found:
        return found  # what follows compares values that must be sane first

    algorithm, learner, replay, engine = config.algorithm, config.learner, config.replay, config.engine
    share = learner.batch_size // learner.num_ranks
    if engine.top_p != 1.0 or engine.top_k != -1:
        key, value = ("engine.top_p", engine.top_p) if engine.top_p != 1.0 else ("engine.top_k", engine.top_k)
        found.append(
            f"{key}={value} cannot be trained on: the engine would sample from another distribution than the one whose "
            f"log-probabilities it reports; leave {key}={1.0 if key.endswith('p') else -1} and use engine.temperature"
        )
    if engine.max_new_tokens >= engine.max_length:
        found.append(
            f"engine.max_new_tokens={engine.max_new_tokens} leaves no room for a prompt in "
            f"engine.max_length={engine.max_length}: set it lower"
        )
    if learner.batch_size % learner.num_ranks:
        found.append(
            f"learner.batch_size={learner.batch_size} does not divide among learner.num_ranks={learner.num_ranks}: "
            f"set it to a multiple, such as {share * learner.num_ranks or learner.num_ranks}"
        )
    elif share % algorithm.group_size:
        found.append(
            f"algorithm.group_size={algorithm.group_size} does not divide a rank's share of the batch, {share} "
            f"trajectories: set learner.batch_size to a multiple of {algorithm.group_size * learner.num_ranks}"
        )
    if learner.minibatches > share:
        found.append(
            f"learner.minibatches={learner.minibatches} is more than the {share} trajectories of a rank's share of the "
            f"batch: set it to at most {share}"
        )
    if share > replay.capacity:
        found.append(
            f"learner.batch_size={learner.batch_size} ({share} a rank) is larger than the buffer, "
            f"replay.capacity={replay.capacity}: raise replay.capacity to at least {share}"
        )
    # All groups that may be under way, each without its last member, or else a batch.
    most = share * (1 + (algorithm.max_staleness or 0) * (algorithm.group_size > 1))
    needed = most * (BYTES_PER_TOKEN * engine.max_length + METADATA_BYTES)
    if needed > replay.capacity_mb << 20:
        what = "in groups whose other members are still to come" if algorithm.group_size > 1 else "in a batch"
        found.append(
            f"replay.capacity_mb={replay.capacity_mb} cannot hold the {most} episodes of a rank {what}: they take "
            f"{needed / (1 << 20):.0f} MiB at engine.max_length={engine.max_length}: raise it to at least "
            f"{-(-needed // (1 << 20))}, or lower learner.batch_size"
            + (", algorithm.max_staleness" if algorithm.group_size > 1 and algorithm.max_staleness else "")
            + " or engine.max_length"
        )
    found += _algorithm_problems(config)
    if engine.max_length > learner.token_budget:
        found.append(
            f"learner.token_budget={learner.token_budget} cannot hold an episode of "
            f"engine.max_length={engine.max_length} "
            f"tokens: raise it to at least {engine.max_length}"
        )
    if replay.samples_per_insert > replay.max_replays:
        found.append(
            f"replay.samples_per_insert={replay.samples_per_insert} cannot be reached with replay.max_replays="
            f"{replay.max_replays}: set replay.max_replays to at least {math.ceil(replay.samples_per_insert)}"
        )
    if replay.max_replayed_share is not None and replay.max_replays == 1:
        found.append(
            f"replay.max_replayed_share={replay.max_replayed_share} bounds what replay.max_replays=1 forbids: raise "
            "replay.max_replays or leave the share out"
        )
    if replay.target_ess > 0 and replay.max_replayed_share is None:
        found.append(
            f"replay.target_ess={replay.target_ess} steers a share that is not set: set replay.max_replayed_share, "
            "such as 0.5"
        )
    if algorithm.max_staleness == 0 and replay.max_replays > 1:
        found.append(
            f"replay.max_replays={replay.max_replays} cannot go with algorithm.max_staleness=0: "
            "data used twice is stale; "
            "set replay.max_replays=1 or raise algorithm.max_staleness"
        )
    if config.pipeline.actor_timeout_s <= config.pipeline.heartbeat_s:
        found.append(
            f"pipeline.actor_timeout_s={config.pipeline.actor_timeout_s} must exceed pipeline.heartbeat_s="
            f"{config.pipeline.heartbeat_s}: set it to several heartbeats"
        )
    part = (config.pipeline.arena_mb << 20) // learner.num_ranks
    if (needed := 8 * block_words(engine.max_length, 1)) > part:
        found.append(
            f"pipeline.arena_mb={config.pipeline.arena_mb} leaves {part} bytes for each of learner.num_ranks="
            f"{learner.num_ranks}, and a trajectory of engine.max_length={engine.max_length} tokens takes {needed}: "
            f"raise pipeline.arena_mb to at least {math.ceil(2 * needed * learner.num_ranks / 2**20)}"
        )
    found += _engine_problems(config)
    found += _host_problems(config)
    shop = config.env.webshop
    if (shop.items is None) != (shop.attributes is None):
        found.append(
            f"env.webshop.items={shop.items} and env.webshop.attributes={shop.attributes} come together: "
            "give both files, "
            "or neither for the synthetic catalogue"
        )
    for name in ("items", "attributes", "human", "nouns"):
        path = getattr(shop, name)
        if path is not None and not Path(path).is_file():
            found.append(f"env.webshop.{name}={path} is not a file: give the path of an existing one")
    found += _model_problems(config)
    if not config.run.dir:
        found.append("run.dir= is empty: name a folder, which is made if it is missing")
    if not _RUN_NAME.fullmatch(config.run.name):
        found.append(
            f"run.name={config.run.name!r} must consist of 1 to 40 letters, digits, '-', '_' and '.', and begin with a "
            "letter or digit: rename the run"
        )
    return found


def _model_problems(config: Config) -> list[str]:
    """Models that are not there, and models of kinds that cannot be trained here."""
    found = []
    for key, path in {"model.path": config.model.path, **other_models(config)}.items():
        if key == "model.path" and path == "scratch":
            continue
        directory = model_directory(path)
        if directory is None:
            found.append(_no_model(key, path))
        else:
            found += reasons_against(key, path, directory, config.engine.max_length)
    return found


def _no_model(key: str, path: str) -> str:
    """Why a value of a model's path means no model."""
    if Path(path).expanduser().is_dir():
        return f"{key}={path} has no config.json: give the folder in which a Hugging Face model lies"
    shipped = ", ".join(sorted(p.name for p in ASSETS.glob("*") if p.is_dir()))
    if re.fullmatch(r"[\w.-]+/[\w.-]+", path) and not path.startswith("."):
        return (
            f"{key}={path} is no folder here. Of a name on the Hugging Face hub nothing is downloaded by itself: "
            f"get it with `hf download {path} --local-dir DIR` and set {key}=DIR"
        )
    return f"{key}={path} does not exist: give a folder with a Hugging Face model, or one of {shipped}, scratch"


def _algorithm_problems(config: Config) -> list[str]:
    """Settings of the algorithm that contradict each other."""
    algorithm, found = config.algorithm, []
    staleness, interval = algorithm.max_staleness, config.learner.sync_interval
    if staleness is not None and (interval is None or staleness < interval - 1):
        found.append(
            f"algorithm.max_staleness={staleness} does not allow learner.sync_interval={interval}: nothing would be "
            f"young enough; set it to {'null' if interval is None else f'at least {interval - 1}'}"
        )
    for key in ("unroll_turns", "unroll_tokens"):
        value = getattr(config.actor, key)
        if value is None:
            continue
        if not algorithm.credit.uses_values:
            found.append(
                f"actor.{key}={value} does not go with algorithm.credit={algorithm.credit.name}, which has no value to "
                f"stand for the rest of an episode: set actor.{key}=null or algorithm.credit=vtrace"
            )
        if algorithm.group_size > 1:
            found.append(
                f"actor.{key}={value} does not go with algorithm.group_size={algorithm.group_size}: groups are put "
                f"together of whole episodes; set actor.{key}=null or algorithm.group_size=1"
            )
        if staleness == 0:
            found.append(
                f"actor.{key}={value} does not go with algorithm.max_staleness=0: an episode that is learned from "
                "before it has ended goes on under other weights; raise algorithm.max_staleness to 1"
            )
    if algorithm.refill > 0 and not algorithm.credit.compares_group:
        found.append(
            f"algorithm.refill={algorithm.refill:g} does not go with algorithm.credit={algorithm.credit.name}, which "
            "compares no group: set algorithm.refill=0 or algorithm.credit=group_relative"
        )
    if algorithm.overlong_tokens is not None and algorithm.overlong_tokens > config.engine.max_length:
        found.append(
            f"algorithm.overlong_tokens={algorithm.overlong_tokens} is more than an episode has, engine.max_length="
            f"{config.engine.max_length}: set it lower, such as {max(1, config.engine.max_length // 4)}"
        )
    return [*found, *algorithm.credit.problems(algorithm), *algorithm.loss.problems(algorithm)]


_OF_THE_RUN = ("--api-key", "--admin-api-key", "--ssl-keyfile-password", "--config")
"""Arguments of SGLang's servers that would keep the run from its own, and secrets from being such."""


def _engine_problems(config: Config) -> list[str]:
    """What SGLang servers cannot do, or what only they can."""
    engine, found = config.engine, []
    defaults = EngineConfig()
    if engine.name == "torch":
        for key in ("python", "urls", "in_flight", "transfer", "tensor_parallel", "prefix_cache"):
            if getattr(engine, key) != getattr(defaults, key):
                found.append(
                    f"engine.{key}={getattr(engine, key)} is a setting of SGLang's servers and engine.name=torch has "
                    "none: set engine=sglang or leave it out"
                )
        return found
    if engine.prefix_cache and engine.in_flight == "keep_kv":
        found.append(
            "engine.prefix_cache=True cannot go with engine.in_flight=keep_kv: the cache would serve keys and values "
            "of an old policy under a new version's label; set engine.in_flight=recompute_kv or drain"
        )
    if engine.transfer == "distributed" and engine.in_flight == "drain":
        found.append(
            "engine.transfer=distributed cannot go with engine.in_flight=drain: the learner would stand still until "
            "every answer has ended; set engine.in_flight=recompute_kv or keep_kv, or engine.transfer=disk"
        )
    is_apart = engine.transfer == "distributed" and config.pipeline.connect is not None
    if is_apart and (engine.urls is None or any(is_loopback_url(url) for url in engine.urls)):
        found.append(
            "engine.transfer=distributed needs servers that the learner can reach, and with pipeline.connect="
            f"{config.pipeline.connect} it is on another host: an actor's own server listens on this one alone; "
            "start servers at an address of this host and set engine.urls=[http://ADDRESS:PORT], or "
            "engine.transfer=disk"
        )
    for word in engine.server_args:
        flag = word.partition("=")[0]
        # SGLang takes abbreviations too.
        if len(flag) > len("--a") and flag != "--ssl-keyfile" and any(each.startswith(flag) for each in _OF_THE_RUN):
            found.append(
                f"engine.server_args has {flag}: each run makes a key for the servers that it starts, and hands it on "
                "in a file; what stands here would be seen by every user of the host. Leave it out"
            )
    if engine.urls is not None and len(engine.urls) < config.actor.num_actors:
        found.append(
            f"engine.urls has {len(engine.urls)} servers for actor.num_actors={config.actor.num_actors}: each actor "
            "loads weights into servers of its own; lower actor.num_actors or add servers"
        )
    for url in engine.urls or ():
        if not _is_server(url):
            found.append(f"engine.urls has {url!r}: write it as http://host:port")
    if engine.python is not None and not (Path(engine.python).expanduser().is_file() or shutil.which(engine.python)):
        found.append(
            f"engine.python={engine.python} is no interpreter: give the path of the python that has SGLang, see "
            "tools/install_sglang_cpu.sh"
        )
    return found


def _is_server(url: str) -> bool:
    """Whether an http URL names a host, and its port is one."""
    try:
        parts = urlsplit(url)
        return parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:
        return False


def _host_problems(config: Config) -> list[str]:
    """What keeps the learner and actors on different hosts from talking to each other."""
    pipeline, found = config.pipeline, []
    for key, endpoint, check in (("bind", pipeline.bind, check_bind), ("connect", pipeline.connect, check_connect)):
        if endpoint is not None:
            try:
                # The ports of all ranks, and the one of the weight server above them.
                rank_endpoint(endpoint, config.learner.num_ranks)
                check(endpoint, has_keys=pipeline.keys is not None)
                if pipeline.keys is None:
                    found.append(
                        f"pipeline.{key}={endpoint} is a port of this host, which every user of it can take or talk "
                        "to: run `impala-llm keys --dir KEYS` and set pipeline.keys=KEYS on both sides; actors on the "
                        f"learner's host need no pipeline.{key}"
                    )
            except ValueError as error:
                found.append(f"pipeline.{key}={endpoint}: {error}")
    if pipeline.bind is not None and pipeline.weight_slots < 3:
        found.append(
            f"pipeline.weight_slots={pipeline.weight_slots} is too few with pipeline.bind: set it to 3 or more, as "
            "other hosts fetch one version while the next is written"
        )
    if pipeline.keys is None:
        return found
    folder = Path(pipeline.keys).expanduser()
    if not folder.is_dir():
        return [*found, f"pipeline.keys={pipeline.keys} is not a folder: make it with `impala-llm keys --dir DIR`"]
    needed = set()
    if pipeline.bind is not None:
        needed |= {LEARNER_SECRET, LEARNER_PUBLIC, AUTHORISED}
    if pipeline.connect is not None:
        secrets = [path.name for path in actor_secrets(folder)]
        needed |= {LEARNER_PUBLIC, secrets[0] if secrets else f"actor{SECRET_SUFFIX}"}
        if len(secrets) > 1:
            found.append(
                f"pipeline.keys={pipeline.keys} has the secret keys of several actors, {', '.join(secrets)}: copy the "
                f"one of this host and {LEARNER_PUBLIC} into a folder of their own"
            )
    missing = sorted(name for name in needed if not (folder / name).exists())
    if missing:
        found.append(
            f"pipeline.keys={pipeline.keys} has no {', '.join(missing)}: make keys with `impala-llm keys`, or copy "
            "what is missing from the folder where they were made"
        )
    return found


@dataclass
class _RawAlgorithm(AlgorithmConfig):
    """As it stands in files, before the names of its parts are looked up."""

    credit: Any = field(default_factory=dict)
    loss: Any = field(default_factory=dict)


@dataclass
class _RawConfig(Config):
    algorithm: _RawAlgorithm = field(default_factory=_RawAlgorithm)


def load(overrides: Sequence[str] = ()) -> Config:
    """Compose, type-check and check a configuration.

    Args:
        overrides: Hydra's `key=value` and `group=choice` words, such as `experiment=quickstart learner.batch_size=32`.
            `experiment` may also be the path of a YAML file: one like those in configs/experiment/, or the config.yaml
            that a run has left in its folder.

    Raises:
        ConfigError: an unknown key, a wrong type, an impossible value or combination.
    """
    _refuse_unknown_keys(overrides)
    words = _hydra_words([word for word in overrides if _kind_of(word) is None])
    store = ConfigStore.instance()
    store.store(name="schema", node=_RawConfig)
    GlobalHydra.instance().clear()
    try:
        with initialize_config_dir(version_base="1.3", config_dir=str(config_folder())):
            raw = compose("config", overrides=words)
        OmegaConf.resolve(raw)
        composed = OmegaConf.to_object(raw)
    except ConfigError:
        raise
    except (HydraException, OmegaConfBaseException, ValueError) as error:
        raise ConfigError(_explain(error, overrides)) from None
    assert isinstance(composed, _RawConfig)
    try:
        algorithm = {
            name: make_part(kind, _values(getattr(composed.algorithm, name)), _words_of(kind, overrides))
            for name, kind in algorithm_parts().items()
        }
        env = _environment(composed.env, _words_of(ENVIRONMENTS, overrides))
    except (HydraException, OmegaConfBaseException) as error:
        raise ConfigError(_explain(error, overrides)) from None
    except ValueError as error:
        raise ConfigError(str(error)) from None
    config = Config(
        **(vars(composed) | {"algorithm": AlgorithmConfig(**(vars(composed.algorithm) | algorithm)), "env": env})
    )
    reasons = problems(config)
    if reasons:
        raise ConfigError.of(reasons)
    return config


@cache
def algorithm_parts() -> dict[str, Kind]:
    """Kinds of parts by the setting of `AlgorithmConfig` that names one. They bring torch, which takes seconds to load:
    what needs no settings, such as `impala-llm --help`, does without."""
    from impala_llm.algorithms.registry import PARTS

    return PARTS


def _environment(in_files: EnvConfig, words: Sequence[str]) -> EnvConfig:
    """The environment that files and words choose, with its options. ValueError where that cannot be."""
    name, values = choose(ENVIRONMENTS, {"name": in_files.name, **_values(in_files.options)}, words)
    if name == "webshop" and values:
        option, value = next(iter(values.items()))
        raise ValueError(
            f"env.options.{option}={value} does not go with env.name=webshop, whose options are env.webshop.*: "
            + _suggestion(f"env.webshop.{option}", list(known_keys()))
        )
    options = None
    if import_path(ENVIRONMENTS, name) not in ENVIRONMENTS.packaged.values():
        options = getattr(load_part(ENVIRONMENTS, name), "Options", None)
    return EnvConfig(name, in_files.webshop, make_options(ENVIRONMENTS, name, options, values))


def _values(in_files: Any) -> dict[str, Any]:
    """The settings of a part as files compose them; none where there is something else."""
    return in_files if isinstance(in_files, dict) else {}


def _words_of(kind: Kind, overrides: Sequence[str]) -> list[str]:
    return [word for word in overrides if _kind_of(word) is kind]


def _kind_of(word: str) -> Kind | None:
    """The kind of part that a word names or sets an option of."""
    key = word.lstrip("+").partition("=")[0]
    for kind in (*algorithm_parts().values(), ENVIRONMENTS):
        if key in (kind.key, kind.options_key) or key.startswith(f"{kind.options_key}."):
            return kind
    return None


def _hydra_words(overrides: Sequence[str]) -> list[str]:
    """The overrides as Hydra takes them: the settings of an `experiment=FILE.yaml` are an experiment of that name."""
    words = []
    for word in (word.lstrip("+") for word in overrides):
        key, _, value = word.partition("=")
        if key == "experiment" and Path(value).suffix in (".yaml", ".yml"):
            ConfigStore.instance().store(
                group="experiment", name="file", node=_settings_file(Path(value)), package="_global_"
            )
            word = "experiment=file"
        elif value.startswith("~/"):  # which no shell expands there, and Hydra does not read
            word = f"{key}={os.path.expanduser(value)}"
        words.append(word)
    return words


def _settings_file(path: Path) -> DictConfig:
    """What a YAML file with settings holds. ConfigError where it is none."""
    try:
        text = path.expanduser().read_text()
        settings = OmegaConf.create(text) if isinstance(yaml.safe_load(text), dict | list | None) else None
    except OSError as error:
        raise ConfigError(f"settings file {path} cannot be read ({error.strerror}): correct the path") from None
    except (yaml.YAMLError, OmegaConfBaseException, ValueError) as error:  # not of UTF-8 included
        line = f", line {mark.line + 1}" if (mark := getattr(error, "problem_mark", None)) else ""
        reason = getattr(error, "problem", None) or str(error).splitlines()[0]
        raise ConfigError(f"settings file {path}{line}: this is not YAML ({reason}): correct it") from None
    if not isinstance(settings, DictConfig):
        raise ConfigError(f"settings file {path} holds no settings: write lines such as `learner: {{batch_size: 32}}`")
    return settings


def known_keys() -> dict[str, object]:
    """All settings with their defaults, those of every built-in credit and loss included."""
    keys = {key: default for key, default in leaves(Config()) if _kind_of(key) not in algorithm_parts().values()}
    for kind in algorithm_parts().values():
        keys[kind.key] = None
        for part in kind.packaged.values():
            keys |= {f"{kind.options_key}.{f.name}": f.default for f in option_fields(part)}
    return keys


def _refuse_unknown_keys(overrides: Sequence[str]) -> None:
    """Hydra would take `+key=value` of any key, and leave out `~key`."""
    known = known_keys()
    parts = {key.rsplit(".", n)[0] for key in known for n in range(1, key.count(".") + 1)}
    for word in overrides:
        key, equals, value = word.partition("=")
        name = key.lstrip("+")
        if not equals or name.startswith("~"):
            raise ConfigError(f"{word} is no setting: write key=value, such as learner.batch_size=32")
        if _kind_of(name) is not None:
            continue  # what options there are, the part that is chosen says
        if name not in known and name not in parts and name not in _groups():
            raise ConfigError(f"{name}={value} is an unknown key: {_suggestion(name, list(known))}")


FAMILIAR_NAMES = {
    "advantage": "algorithm.credit",
    "advantage_estimator": "algorithm.credit",
    "batch": "learner.batch_size",
    "mini_batches": "learner.minibatches",
    "num_epochs": "learner.epochs",
    "ppo_epochs": "learner.epochs",
    "eta": "algorithm.max_staleness",
    "gamma": "algorithm.credit.discount",
    "lambda": "algorithm.credit.lam",
    "lr": "learner.learning_rate",
    "max_steps": "learner.total_updates",
    "max_tokens": "engine.max_new_tokens",
    "model": "model.path",
    "model_name_or_path": "model.path",
    "num_steps": "learner.total_updates",
    "num_workers": "actor.num_actors",
    "rollouts": "actor.max_episodes",
    "steps": "learner.total_updates",
    "tp": "engine.tensor_parallel",
    "tp_size": "engine.tensor_parallel",
}
"""Names that other trainers have for some of our settings, by the last part of the key."""


def _suggestion(key: str, known: Sequence[str]) -> str:
    """A sentence with the setting that an unknown key may stand for."""
    last = key.rsplit(".", 1)[-1]
    same = [name for name in known if name.rsplit(".", 1)[-1] == last]
    meant = FAMILIAR_NAMES.get(last.lower())
    close = difflib.get_close_matches(key, known, n=1, cutoff=0.7)
    for name in (*same, *([meant] if meant else ()), *close):
        return f"did you mean {name}?"
    return "run `impala-llm train --help` to see all keys"


def _groups() -> list[str]:
    """Names of the groups of choices in configs/."""
    return [path.name for path in config_folder().iterdir() if path.is_dir()]


def config_folder() -> Path:
    """configs/: inside the package in a wheel, beside it in a checkout."""
    inside = PACKAGE / "configs"
    return inside if inside.is_dir() else PACKAGE.parent / "configs"


def to_yaml(config: Config) -> str:
    """The resolved configuration as YAML."""
    return OmegaConf.to_yaml(OmegaConf.structured(config))


def threads_per_process(config: Config) -> int:
    """Threads of each learner rank and actor, so that together they do not exceed the cores of this host.

    Oversubscribed OpenMP barriers spin and cost 5 to 100 times the work.
    """
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else (os.cpu_count() or 1)
    return max(1, cores // (config.learner.num_ranks + config.actor.num_actors))


def _explain(error: Exception, overrides: Sequence[str]) -> str:
    """One sentence with key, value and fix from what Hydra or OmegaConf raised."""
    causes: list[BaseException] = []
    cause: BaseException | None = error
    while cause is not None:
        causes.append(cause)
        cause = cause.__cause__ or cause.__context__
    given = dict(word.lstrip("+").partition("=")[::2] for word in overrides)
    known = known_keys()
    file = given.get("experiment", "")
    file = file if file.endswith((".yaml", ".yml")) else ""
    for key, value in given.items():
        choices = sorted(p.stem for p in (config_folder() / key).glob("*.yaml")) if key in _groups() else []
        if choices and value not in (*choices, file or None):
            own = f", or set env.name={value} for one of your own" if key == "env" and ":" in value else ""
            return f"{key}={value} is not known: choose one of {', '.join(choices)}{own}"
        if key not in known and key not in _groups() and _kind_of(key) is None:
            return f"{key}={value}: {key} is a group of settings: set them one by one, such as " + next(
                f"{name}={default}" for name, default in known.items() if name.startswith(f"{key}.")
            )
        if "${" in value and isinstance(error, InterpolationKeyError):
            return f"{key}={value} refers to a key that does not exist: correct it"
    for cause in causes:
        full_key = getattr(cause, "full_key", None)
        # What is wrong with a word of the command line names the word; the rest stands in a file.
        where = f"settings file {file}: " if file and full_key not in given else ""
        if isinstance(cause, OverrideParseException):
            return f"{cause.override} cannot be read: quote a value with special characters, as in \"key='a=b'\""
        if isinstance(cause, ConfigKeyError) and full_key:
            return f"{where}{full_key} is an unknown key: {_suggestion(full_key, list(known))}"
        if isinstance(cause, OmegaConfBaseException) and full_key:
            value = given.get(full_key) or (OmegaConf.select(_settings_file(Path(file)), full_key) if where else "?")
            reason = str(cause.msg or cause).splitlines()[0]
            return f"{where}{full_key}={value} has the wrong type: {reason}; the default is {known.get(full_key)!r}"
    return f"{f'settings file {file}: ' if file else ''}{str(causes[-1]).splitlines()[0]}: correct this setting"
