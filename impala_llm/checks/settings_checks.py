"""Reasons why settings cannot work, as sentences with key, value and fix.

The range and the choices of a single setting stand on its field, in settings.py; here are the rules between settings,
and what must exist on this host: a list of rules, and long for that reason. Invariant: no process is looked at, and
none is started.
"""

import importlib.util
import math
import os
import re
import shlex
import shutil
from collections.abc import Iterable, Sequence
from dataclasses import fields, is_dataclass
from pathlib import Path
from urllib.parse import urlsplit

from impala_llm.checks.idle_settings import idle_problems
from impala_llm.checks.known_models import other_vocabulary, reasons_against, undivided_heads, vocab_size
from impala_llm.checks.own_problems import problems_of
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
    server_identity,
)
from impala_llm.plugs import METRIC_WRITERS, import_path, suggestion
from impala_llm.settings import (
    ASSETS,
    Config,
    LearnerConfig,
    longest_record,
    model_directory,
    other_models,
    written,
)
from impala_llm.trajectory import block_words

_RUN_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,39}")
"""Valid run names: a name is part of the path of a socket, which must be short."""
_SCRIPTS = {"models/smollm2": "tools/get_smollm2.sh"}
"""Models of presets that are too large to ship: path -> script that downloads them."""
BYTES_PER_TOKEN, METADATA_BYTES = 17, 1024
"""Approximate size of a trajectory (record.py) with few turns and short texts."""


def problems(config: Config, words: Sequence[str] = ()) -> list[str]:
    """Return all reasons why a configuration cannot work; none when it can.

    Args:
        words: `key=value` of the command line.
    """
    found = field_problems(config)
    if found:
        return found  # what follows compares values that must be sane first
    return [
        *_sampling_problems(config),
        *_batch_problems(config),
        *_memory_problems(config),
        *_schedule_problems(config),
        *idle_problems(config, words),
        *_algorithm_problems(config),
        *_replay_problems(config),
        *_pipeline_problems(config),
        *_engine_problems(config),
        *_host_problems(config),
        *_webshop_problems(config),
        *_model_problems(config),
        *_attention_problems(config),
        *_sharding_problems(config),
        *_run_problems(config),
        *_evaluation_problems(config),
        *_agent_problems(config),
    ]


def _is_one_of(value: object, choices: Iterable[object]) -> bool:
    """Return whether a value is among choices, with 0 and 1 for neither false nor true."""
    return any(value == choice and isinstance(value, bool) == isinstance(choice, bool) for choice in choices)


def field_problems(part: object, prefix: str = "") -> list[str]:
    """Return the settings that are out of the range, or not among the choices, that stand on their fields.

    Args:
        part: a dataclass; those that its fields hold are checked as well.
        prefix: of the keys, for messages.
    """
    found = []
    assert is_dataclass(part)
    for f in fields(part):
        key, value = prefix + f.name, getattr(part, f.name)
        choices, bounds = f.metadata.get("choices"), f.metadata.get("range")
        low, high = bounds or (-math.inf, math.inf)
        is_number = isinstance(value, int | float)
        if is_dataclass(value):
            found += field_problems(value, f"{key}.")
        elif choices and not _is_one_of(value, choices) and not (bounds and is_number):
            number = f", or a number, {limits(low, high)}" if bounds else ""
            allowed = ", ".join(map(written, choices))
            hint = suggestion(str(value), map(str, choices))
            found.append(f"{key}={written(value)} is not known: {hint}choose one of {allowed}{number}")
        elif is_number and not low <= value <= high:
            found.append(f"{key}={value} is out of range: set it to {limits(low, high)}")
    return found


def limits(low: float, high: float) -> str:
    """A range, as a message says it."""
    return f"at least {low:g}" if high == math.inf else f"between {low:g} and {high:.12g}"


def _attention_problems(config: Config) -> list[str]:
    """Attention that needs another precision or device."""
    learner, found = config.learner, []
    if learner.attention == "flash" and learner.precision != "bfloat16":
        found.append(
            f"learner.attention=flash cannot go with learner.precision={learner.precision}, as it computes in 16 bits "
            "alone: set learner.precision=bfloat16 or learner.attention=auto"
        )
    if learner.attention in ("flex", "flash") and config.model.device == "cpu":
        found.append(
            f"learner.attention={learner.attention} cannot go with model.device=cpu, since it trains on GPUs alone: "
            "set learner.attention=auto"
        )
    return found


def _sharding_problems(config: Config) -> list[str]:
    """Ways of sharding that are impossible, and adapters without the library that makes them."""
    learner, rank, found = config.learner, config.model.lora.rank, []
    if learner.tensor_parallel > 1:
        recomputes = config.algorithm.recompute_behaviour
        others = {
            f"learner.sharding={learner.sharding}": (learner.sharding == "fsdp2", "learner.sharding=replicated"),
            f"model.lora.rank={rank}": (rank > 0, "model.lora.rank=0"),
            "learner.compile_layers=true": (learner.compile_layers, "learner.compile_layers=false"),
            f"algorithm.recompute_behaviour={recomputes}": (
                recomputes != "never",
                "algorithm.recompute_behaviour=never",
            ),
        }
        found += [
            f"learner.tensor_parallel={learner.tensor_parallel} does not go with {key}: set {fix}, or "
            "learner.tensor_parallel=1"
            for key, (is_set, fix) in others.items()
            if is_set
        ]
    targets = config.model.lora.targets
    if rank and not targets:
        found.append("model.lora.targets=[] leaves nothing to learn: set [all-linear], or names such as [q_proj]")
    elif rank and "all-linear" in targets and len(targets) > 1:
        named = [name for name in targets if name != "all-linear"] or ["q_proj", "v_proj"]
        found.append(
            f"model.lora.targets={targets} has all-linear, which stands for all matrices of the layers, beside other "
            f"names: set model.lora.targets=[all-linear], or model.lora.targets=[{','.join(named)}] for those alone"
        )
    if rank and importlib.util.find_spec("peft") is None:
        found.append(
            f"model.lora.rank={rank} needs peft, which is not installed: pip install peft, or set model.lora.rank=0"
        )
    return found


def _sampling_problems(config: Config) -> list[str]:
    """Ways of sampling that cannot be trained on."""
    engine, found = config.engine, []
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
    return found


def _batch_problems(config: Config) -> list[str]:
    """Batches that cannot be divided among ranks, groups and minibatches."""
    algorithm, learner, found = config.algorithm, config.learner, []
    share = learner.batch_size // learner.num_ranks
    unit = algorithm.group_size * learner.num_ranks
    if learner.batch_size % learner.num_ranks:
        found.append(
            f"learner.batch_size={learner.batch_size} does not divide among learner.num_ranks={learner.num_ranks}: "
            f"set it to a multiple of {unit} (ranks times algorithm.group_size), such as "
            f"{learner.batch_size // unit * unit or unit}"
        )
    elif share % algorithm.group_size:
        found.append(
            f"algorithm.group_size={algorithm.group_size} does not divide a rank's share of the batch, {share} "
            f"trajectories: set learner.batch_size to a multiple of {unit}"
        )
    if learner.minibatches > share:
        found.append(
            f"learner.minibatches={learner.minibatches} is more than the {share} trajectories of a rank's share of the "
            f"batch: set it to at most {share}"
        )
    return found


def _schedule_problems(config: Config) -> list[str]:
    """Phases that outlast the run, or in which nothing would learn."""
    learner, credit, found = config.learner, config.algorithm.credit, []
    total, value_warmup, usual = learner.total_updates, learner.value_warmup_updates, LearnerConfig().warmup_updates
    left = total - value_warmup
    if left <= 0:
        found.append(
            f"learner.value_warmup_updates={value_warmup} leaves no update of learner.total_updates={total} to the "
            f"policy: set it to less than {total}, or raise learner.total_updates"
        )
    # A run of a few updates, to try something, may keep the default.
    elif learner.warmup_updates > max(left, usual if total <= usual else 0):
        of = f", less learner.value_warmup_updates={value_warmup}" if value_warmup else ""
        found.append(
            f"learner.warmup_updates={learner.warmup_updates} is more than learner.total_updates={total}{of}, and the "
            f"learning rate would never be reached: set it to at most {left}, or raise learner.total_updates"
        )
    if value_warmup and not credit.uses_values:
        found.append(
            f"learner.value_warmup_updates={value_warmup} does not go with algorithm.credit={credit.name}, which has "
            "no value head that could learn meanwhile: set learner.value_warmup_updates=0 or algorithm.credit=gae"
        )
    elif value_warmup and getattr(credit, "value_coef", 1.0) == 0:
        found.append(
            f"learner.value_warmup_updates={value_warmup} does not go with algorithm.credit.value_coef=0, with which "
            "nothing would learn meanwhile: set learner.value_warmup_updates=0, or raise algorithm.credit.value_coef"
        )
    return found


def _memory_problems(config: Config) -> list[str]:
    """Batches that do not fit into the replay buffer."""
    algorithm, learner, replay, found = config.algorithm, config.learner, config.replay, []
    share = learner.batch_size // learner.num_ranks
    if share > replay.capacity:
        found.append(
            f"learner.batch_size={learner.batch_size} ({share} a rank) is larger than the buffer, "
            f"replay.capacity={replay.capacity}: raise replay.capacity to at least {share}"
        )
    # All groups that may be under way, each without its last member, or else a batch.
    most = share * (1 + (algorithm.max_staleness or 0) * (algorithm.group_size > 1))
    needed = most * (BYTES_PER_TOKEN * longest_record(config) + METADATA_BYTES)
    if needed > replay.capacity_mb << 20:
        what = "in groups whose other members are still to come" if algorithm.group_size > 1 else "in a batch"
        found.append(
            f"replay.capacity_mb={replay.capacity_mb} cannot hold the {most} episodes of a rank {what}: they take "
            f"{needed / (1 << 20):.0f} MiB at {_longest(config)}: raise it to at least "
            f"{-(-needed // (1 << 20))}, or lower learner.batch_size"
            + (", algorithm.max_staleness" if algorithm.group_size > 1 and algorithm.max_staleness else "")
            + " or engine.max_length"
        )
    return found


def _replay_problems(config: Config) -> list[str]:
    """Reuse of data that other settings forbid."""
    algorithm, replay, found = config.algorithm, config.replay, []
    if replay.samples_per_insert > replay.max_replays:
        found.append(
            f"replay.samples_per_insert={replay.samples_per_insert} cannot be reached with replay.max_replays="
            f"{replay.max_replays}: set replay.max_replays to at least {math.ceil(replay.samples_per_insert)}"
        )
    if replay.samples_per_insert < 1 and algorithm.max_staleness is not None:
        # After k batches of B, k·B·(1/S - 1) of them lie in the buffer, and hold tickets, of which there are (η + 1)·B.
        # Draws by priority leave some to become too old, which suffices for an S near 1 alone.
        found.append(
            f"replay.samples_per_insert={replay.samples_per_insert} asks for trajectories that no update uses, and "
            f"with algorithm.max_staleness={algorithm.max_staleness} no more are played than updates can use in time: "
            "the learner would come to wait for ever; set replay.samples_per_insert=1, or algorithm.max_staleness=null"
        )
    if replay.max_replayed_share is not None and replay.max_replays == 1:
        found.append(
            f"replay.max_replayed_share={replay.max_replayed_share} bounds what replay.max_replays=1 forbids: raise "
            "replay.max_replays or leave the share out"
        )
    if algorithm.max_staleness == 0 and replay.max_replays > 1:
        found.append(
            f"replay.max_replays={replay.max_replays} cannot go with algorithm.max_staleness=0: "
            "data used twice is stale; "
            "set replay.max_replays=1 or raise algorithm.max_staleness"
        )
    return found


def _pipeline_problems(config: Config) -> list[str]:
    """Timeouts and shared memory that are too small."""
    learner, found = config.learner, []
    if config.pipeline.actor_timeout_s <= config.pipeline.heartbeat_s:
        found.append(
            f"pipeline.actor_timeout_s={config.pipeline.actor_timeout_s} must exceed pipeline.heartbeat_s="
            f"{config.pipeline.heartbeat_s}: set it to several heartbeats"
        )
    part = (config.pipeline.arena_mb << 20) // learner.num_ranks
    if (needed := 8 * block_words(longest_record(config), 1)) > part:
        found.append(
            f"pipeline.arena_mb={config.pipeline.arena_mb} leaves {part} bytes for each of learner.num_ranks="
            f"{learner.num_ranks}, and a trajectory of {_longest(config)} tokens takes {needed}: "
            f"raise pipeline.arena_mb to at least {math.ceil(2 * needed * learner.num_ranks / 2**20)}"
        )
    return found


def _webshop_problems(config: Config) -> list[str]:
    """Data files that are missing."""
    found = list[str]()
    shop = config.env.webshop
    if not config.plays_shop:
        return found
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
    return found


def _run_problems(config: Config) -> list[str]:
    """Names of the run, of its folder and of its metric writers."""
    found = []
    paths = [import_path(METRIC_WRITERS, name) for name in config.run.metric_writers]
    found += [
        f"run.metric_writers={written(config.run.metric_writers)} names the writer {name} twice, and both would write "
        "to the same folder: name it once"
        for k, name in enumerate(config.run.metric_writers)
        if paths[k] in paths[:k]
    ]
    if not config.run.dir:
        found.append("run.dir= is empty: name a folder, which is made if it is missing")
    if not _RUN_NAME.fullmatch(config.run.name):
        found.append(
            f"run.name={config.run.name!r} must consist of 1 to 40 letters, digits, '-', '_' and '.', and begin with a "
            "letter or digit: rename the run"
        )
    return found


def _evaluation_problems(config: Config) -> list[str]:
    """Evaluations inside of the run that would never be, or would find nothing new."""
    evaluation, found = config.evaluation, []
    if evaluation.inside_run and config.learner.sync_interval is None:
        key = "every_minutes" if evaluation.every_updates is None else "every_updates"
        found.append(
            f"evaluation.{key}={getattr(evaluation, key)} cannot go with learner.sync_interval=null: actors keep the "
            f"first weights, and each evaluation would be of those; set evaluation.{key}=null, or sync_interval to 1"
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
    policy = model_directory(config.model.path)  # of one from scratch, the learner compares it
    mine = None if policy is None else vocab_size(policy)
    if policy is not None:
        found += undivided_heads(policy, config.learner.tensor_parallel)
    for key, path in other_models(config).items():
        directory = model_directory(path)
        size = None if directory is None else vocab_size(directory)
        if mine is not None and size is not None and size != mine:
            found.append(other_vocabulary(key, path, size, mine))
    return found


def _no_model(key: str, path: str) -> str:
    """Reason why a path is not that of a model."""
    if os.path.isdir(Path(path).expanduser()):
        return f"{key}={path} has no config.json: give the folder in which a Hugging Face model lies"
    if path == "DIRECTORY":  # what the preset model=pretrained has
        return f"{key} is not set: model=pretrained needs a Hugging Face model beside it, {key}=FOLDER"
    if path in _SCRIPTS:
        return f"{key}={path} is not there yet: {_SCRIPTS[path]} brings it"
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
    if algorithm.credit.compares_group and algorithm.group_size == 1:
        found.append(
            f"algorithm.group_size=1 leaves algorithm.credit={algorithm.credit.name} nothing to compare: set "
            "algorithm.group_size to at least 2, such as 8"
        )
    if algorithm.refill > 0 and not algorithm.credit.compares_group:
        found.append(
            f"algorithm.refill={algorithm.refill:g} does not go with algorithm.credit={algorithm.credit.name}, which "
            "compares no group: set algorithm.refill=0 or algorithm.credit=group_relative"
        )
    is_shaped = algorithm.credit.learns_from_rewards
    if is_shaped and algorithm.overlong_tokens is not None and algorithm.overlong_tokens > config.engine.max_length:
        found.append(
            f"algorithm.overlong_tokens={algorithm.overlong_tokens} is more than an episode has, engine.max_length="
            f"{config.engine.max_length}: set it lower, such as {max(1, config.engine.max_length // 4)}"
        )
    if algorithm.has_kl_in_rewards and algorithm.recompute_behaviour != "never":
        found.append(
            f"algorithm.reward_kl_coef={algorithm.reward_kl_coef:g} takes the engine's log-probabilities, which "
            f"algorithm.recompute_behaviour={algorithm.recompute_behaviour} replaces: set algorithm.kl_coef in its "
            "place, or algorithm.recompute_behaviour=never"
        )
    credit, loss = algorithm.credit, algorithm.loss
    found += _step_problems(config)
    return [*found, *problems_of(credit, algorithm), *loss.problems_of_class(), *problems_of(loss, algorithm)]


def _step_problems(config: Config) -> list[str]:
    """Credits and losses that do not go with so many optimizer steps an update."""
    algorithm, found = config.algorithm, list[str]()
    for key in ("epochs", "minibatches"):
        if algorithm.credit.is_for_one_step and (value := getattr(config.learner, key)) > 1:
            found.append(
                f"learner.{key}={value} does not go with algorithm.credit={algorithm.credit.name}, whose advantages "
                f"hold only for the weights that an update begins with: set learner.{key}=1"
            )
    loss, recomputes = algorithm.loss, algorithm.recompute_behaviour
    if recomputes != "never" and loss.needs_sampling_policy(config.learner.steps_per_update):
        found.append(
            f"algorithm.recompute_behaviour={recomputes} does not go with algorithm.loss={loss.name}, whose proximal "
            "policy lies on a line that begins at the version that sampled, while the ratios would begin at a later "
            "one: set algorithm.recompute_behaviour=never, or algorithm.loss.proximal=recomputed"
        )
    return found


_OF_THE_RUN = ("--api-key", "--admin-api-key", "--ssl-keyfile-password", "--config")
"""Arguments of SGLang's servers that would keep the run from its own, and secrets from being such."""


def _engine_problems(config: Config) -> list[str]:
    """Problems with settings that SGLang's servers do not support."""
    engine, found = config.engine, list[str]()
    if engine.name != "sglang":
        return found
    if engine.urls is None and engine.prefix_cache and engine.in_flight == "keep_kv":
        found.append(
            "engine.prefix_cache=True cannot go with engine.in_flight=keep_kv: the cache would serve keys and values "
            "of an old policy under a new version's label; set engine.in_flight=recompute_kv or drain"
        )
    if engine.transfer == "distributed" and engine.in_flight == "drain":
        found.append(
            "engine.transfer=distributed cannot go with engine.in_flight=drain: the learner would stand still until "
            "every completion has ended; set engine.in_flight=recompute_kv or keep_kv, or engine.transfer=disk"
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
    if engine.urls is not None and len(engine.urls) < config.num_actors:
        found.append(
            f"engine.urls has {len(engine.urls)} servers for actor.num_actors={config.num_actors}: each actor "
            "loads weights into servers of its own; lower actor.num_actors or add servers"
        )
    seen = set[tuple[str, int]]()
    for url in engine.urls or ():
        if not _is_server(url):
            found.append(f"engine.urls has {url!r}: write it as http://host:port")
        elif (server := server_identity(url)) in seen:
            found.append(
                f"engine.urls has the server {url} twice: two actors would change its weights behind each other's "
                "back; name each once"
            )
        else:
            seen.add(server)
    python = engine.python if engine.urls is None else None
    if python is not None and not (Path(python).expanduser().is_file() or shutil.which(python)):
        found.append(
            f"engine.python={python} is no interpreter: give the path of the python that has SGLang, see "
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
    """Problems that keep the learner and actors on different hosts from reaching each other."""
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
        fix = "make keys with `impala-llm keys`, or copy what is missing from the folder where they were made"
        if pipeline.connect is not None and {*missing} <= {LEARNER_SECRET, AUTHORISED}:
            fix = "only the learner's host has that, so set pipeline.bind=null on a host of actors"
        found.append(f"pipeline.keys={pipeline.keys} has no {', '.join(missing)}: {fix}")
    return found


def _longest(config: Config) -> str:
    """The setting that bounds a trajectory, with its value."""
    key = "agent.max_tokens" if config.agent.is_set else "engine.max_length"
    return f"{key}={longest_record(config)}"


def _agent_problems(config: Config) -> list[str]:
    """Agents that are named twice, that are not there, or that other settings do not go with."""
    agent, found = config.agent, list[str]()
    if not agent.is_set:
        return found
    if agent.name is not None and agent.command is not None:
        found.append(f"agent.name={agent.name} and agent.command={agent.command} exclude each other: leave one out")
    if agent.max_tokens is not None and agent.max_tokens < config.engine.max_length:
        found.append(
            f"agent.max_tokens={agent.max_tokens} is of all contexts together, and one may have engine.max_length="
            f"{config.engine.max_length}: raise it, or lower engine.max_length"
        )
    if agent.command is not None:
        try:
            program = (shlex.split(agent.command) or [""])[0]
        except ValueError as error:
            found.append(f"agent.command={agent.command} is no command line ({error}): correct its quotes")
        else:
            if shutil.which(program) is None:
                found.append(f"agent.command={agent.command}: there is no program {program!r}: correct its path")
    if agent.tasks is not None and not Path(agent.tasks).expanduser().is_file():
        found.append(f"agent.tasks={agent.tasks} is no file: give JSON lines, an object for each task")
    if agent.name is not None and importlib.util.find_spec("openai") is None:
        found.append(f"agent.name={agent.name} needs the package openai: pip install 'impala-llm[agents]'")
    for key in ("unroll_turns", "unroll_tokens"):
        if (value := getattr(config.actor, key)) is not None:
            found.append(
                f"actor.{key}={value} does not go with an agent, whose reward comes at its end: set actor.{key}=null"
            )
    return found
