"""Every setting of the system: one dataclass a part, registered with Hydra, and all checks of their values.

Invariant: whoever holds a `Config` holds a checked one. `load` composes it from configs/ and `key=value` overrides and
stops at the first door, before any process, socket or file exists, with sentences that name key, value and fix.
Nobody else reads raw Hydra dicts.
"""

import difflib
import math
import os
import shutil
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, fields, is_dataclass
from pathlib import Path
from urllib.parse import urlsplit

from hydra import compose, initialize_config_dir
from hydra.core.config_store import ConfigStore
from hydra.core.global_hydra import GlobalHydra
from hydra.errors import HydraException
from omegaconf import OmegaConf
from omegaconf.errors import ConfigKeyError, OmegaConfBaseException

from impala_llm.hosts import (
    AUTHORISED,
    LEARNER_PUBLIC,
    LEARNER_SECRET,
    SECRET_SUFFIX,
    TcpEndpoint,
    actor_secrets,
    check_bind,
    check_connect,
    rank_endpoint,
)

PACKAGE = Path(__file__).resolve().parent
ASSETS = PACKAGE / "assets"


class ConfigError(ValueError):
    """Settings that cannot work. Each line of the message names a key, its value and the fix."""


@dataclass
class RunConfig:
    name: str = "impala"
    """Names the run's folder in /dev/shm, where actors find their learner."""
    dir: str = "outputs/${run.name}"
    """Folder of logs, metrics and checkpoints; made if it is missing."""
    seed: int = 0
    resume: bool = False
    """A learner started by hand goes on from what a killed one left in shared memory: weights, tickets, trajectories.
    Under `impala-llm train` a killed learner is started again by itself, and always does."""
    terminal: bool = True
    """Live view in the terminal."""


@dataclass
class WebShopConfig:
    items: str | None = None
    """The original's items_shuffle*.json; None: the synthetic catalogue."""
    attributes: str | None = None
    """The original's items_ins_v2*.json."""
    human: str | None = None
    """The original's items_human_ins.json."""
    nouns: str | None = None
    """A file asin -> nouns of its title; None: spaCy where it is installed, else the built-in heuristic."""
    num_products: int = 1000
    """Size of the synthetic catalogue; of files, the first so many records."""
    catalogue_seed: int = 0
    goals: str = "synthetic"
    """synthetic | human."""
    observation_mode: str = "text_rich"
    """text | text_rich, as in the original | compact: a third of the tokens, for small models."""
    strict_compat: bool = True
    solvable_only: bool = False
    max_steps: int = 15
    max_invalid_actions: int | None = None
    """In training an episode ends after so many actions that do nothing; None: never."""
    results_per_page: int = 10
    """The original shows 10."""
    instruction_once: bool = False
    """Show the instruction on the first page only, since the conversation holds it."""
    delta_pages: bool = False
    """After a click on an option show only what changed on the page."""
    sparse_reward: bool = False
    """Reward 10 for a score of 1.0 and 0 otherwise, instead of the score."""


@dataclass
class EnvConfig:
    name: str = "webshop"
    """webshop | parrot (toy, one turn) | corridor (toy, several turns)."""
    webshop: WebShopConfig = field(default_factory=WebShopConfig)


@dataclass
class EngineConfig:
    name: str = "torch"
    """torch: the embedded engine | sglang: SGLang servers, one an actor."""
    temperature: float = 1.0
    """Sampling temperature; the learner divides its logits by the same."""
    top_p: float = 1.0
    """Only 1.0 in training: see `problems`."""
    top_k: int = -1
    """Only -1 (off) in training."""
    max_new_tokens: int = 64
    """Longest answer of one turn, in tokens."""
    max_length: int = 2048
    """Longest episode, in tokens."""
    dtype: str = "float32"
    """float32 | bfloat16."""
    python: str | None = None
    """sglang: the Python that has SGLang; None: ours, or the one that tools/install_sglang_cpu.sh has made."""
    urls: list[str] | None = None
    """sglang: running servers, or a router in front of them, instead of a server started by each actor; dealt out among
    the actors of this host."""
    in_flight: str = "recompute_kv"
    """sglang, new weights while answers are under way: recompute_kv (go on with new keys and values) | keep_kv (go on
    over the old ones) | drain (let the answers end first). What each means for the ratios: docs/engines.md."""
    transfer: str = "disk"
    """sglang, how weights come: disk (the weight board's directory) | distributed (a process group with the learner:
    NCCL on GPUs, gloo elsewhere)."""
    tensor_parallel: int = 1
    """sglang: GPUs of a server."""
    prefix_cache: bool = False
    """sglang: keep keys and values of ended requests. Flushed at each new version; not with in_flight=keep_kv."""
    memory_fraction: float | None = None
    """sglang: share of a GPU's memory for weights and KV cache; None: SGLang's own choice."""
    server_args: list[str] = field(default_factory=list)
    """sglang: further arguments of sglang.launch_server, word by word."""
    start_timeout_s: float = 600.0
    """sglang: how long a server may take to come up."""
    request_timeout_s: float = 300.0
    """sglang: how long an answer may take."""


@dataclass
class ScratchConfig:
    """A randomly initialised model with a tokenizer of characters, for the toy environments."""

    hidden_size: int = 64
    num_layers: int = 2


@dataclass
class ModelConfig:
    path: str = "tiny_shopper"
    """A Hugging Face directory, the name of a policy in impala_llm/assets, or `scratch`."""
    scratch: ScratchConfig = field(default_factory=ScratchConfig)
    device: str = "auto"
    """auto | cpu | cuda."""
    value_hidden_size: int = 0
    """Hidden width of the value head; 0: linear."""
    value_trunk_gradient: bool = False
    """Whether the value loss also shapes the trunk."""


@dataclass
class ActorConfig:
    num_actors: int = 1
    max_episodes: int = 64
    """Episodes that one actor plays at once."""
    episode_timeout_s: float = 300.0
    """Wall-clock budget of an episode, reset included; past it the ticket is given back."""
    unroll_turns: int | None = None
    """Learn from an episode before it has ended: after every so many turns, with the value of the state reached in
    place of what is to come (IMPALA's unrolls). Each unroll is a trajectory of the batch. None: whole episodes."""
    unroll_tokens: int | None = None
    """The same after the turn in which an unroll has so many action tokens; with both, whichever comes first."""


@dataclass
class AlgorithmConfig:
    advantage: str = "vtrace"
    """What an action is worth. With a value head: vtrace | gae (the same without correction). Without: group_relative
    (an episode's score against its group's mean) | rloo (against the mean of the others) | distillation (how much more
    likely the teacher finds each token)."""
    granularity: str = "turn"
    """vtrace, gae: one step of the recursion is a turn | token (the textbook; see algorithms/vtrace.py)."""
    group_size: int = 1
    """Episodes of the same task that are granted, and where scores are compared, compared together."""
    normalize_std: bool = False
    """group_relative: divide by the group's standard deviation."""
    normalize_reward: bool = False
    """Divide rewards and scores by the standard deviation of all returns so far."""
    discount: float = 1.0
    """γ a turn."""
    lam: float = 1.0
    rho_bar: float = 1.0
    c_bar: float = 1.0
    turn_ratio: str = "geometric"
    """Ratio of a turn in V-trace: geometric (mean of its tokens' log-ratios) | product."""
    dead_band: float = 0.0
    """vtrace: token log-ratios smaller than this count as 0 in the recursion."""
    loss: str = "truncated_is"
    """reinforce (no ratio: no correction) | truncated_is | ppo_clip | decoupled_ppo | cispo | gspo | dpo (pairs of the
    best and the worst episode of each group)."""
    is_cap: float = 1.0
    """truncated_is: cap C of the weight min(π/μ, C)."""
    is_level: str = "token"
    """truncated_is: the weight is of a token | sequence (of all its tokens together)."""
    clip_low: float = 0.2
    clip_high: float = 0.28
    """ppo_clip, decoupled_ppo, cispo; gspo wants about 3e-4 and 4e-4 instead."""
    dual_clip: float = 3.0
    proximal: str = "log_linear"
    """decoupled_ppo: π_prox lies between μ and π by the tokens' versions (log_linear) | is π as the step begins
    (recomputed). With one step a batch, as here, the ratio π/π_prox of the latter is 1 and the weight acts alone."""
    proximal_cap: float | None = None
    """decoupled_ppo: cap of the weight π_prox/μ; None: not truncated."""
    reject: str = "none"
    """Leave data out instead of weighing it down, by the ratio of a token | sequence | geometric (mean over the
    sequence); what lies outside of reject_low and reject_high does not teach."""
    reject_low: float = 0.5
    reject_high: float = 2.0
    probability_limit: float | None = None
    """Leave out tokens whose probability has moved by more than this, to where their advantage pushes them."""
    aggregate: str = "token_mean"
    """token_mean | sequence_mean_token_sum | sequence_mean_token_mean."""
    value_coef: float = 0.5
    entropy_coef: float = 0.0
    """Bonus for entropy; with a target, its start."""
    entropy_target: float | None = None
    """Nats a token: `entropy_coef` rises while the entropy is below and falls while it is above."""
    entropy_rate: float = 0.01
    """Change of `entropy_coef` in an update, per nat between entropy and target."""
    entropy_alarm: float = 0.05
    """A policy whose entropy falls below this share of its first one, with scores below 0.9, has collapsed: it is
    said. 0: never."""
    length_alarm: float = 0.2
    """The same for the mean number of tokens an episode's answers have."""
    kl_coef: float = 0.0
    """Weight of the KL divergence from the reference policy (k3, per token)."""
    reference: str | None = None
    """Reference policy of kl_coef and dpo, as model.path; None: the one that training started from."""
    dpo_beta: float = 0.1
    teacher: str | None = None
    """distillation: the teacher, as model.path; None: the policy itself, which reads `teacher_context` as well."""
    teacher_context: str = ""
    """distillation: what the teacher reads before the episode, such as a hint."""
    max_staleness: int | None = 2
    """η: the oldest data a batch may hold, in policy versions; 0 is synchronous, None free running."""
    mismatch_alarm: float = 0.05
    """Mean |log π - log μ| in nats, of tokens that the learner's own version sampled, above which engine and learner
    count as disagreeing. A float32 engine stays below 1e-5 and can be held to 1e-3; bfloat16 gives 0.002 to 0.01."""
    recompute_behaviour: str = "never"
    """never | on_mismatch: while that alarm is on | always: the learner's own log-probabilities, of when a trajectory
    reaches it, in place of the engine's. They are right where the engine's are wrong; where the engine merely computes
    otherwise, its own are those it sampled from, and the ratios correct for it. See learning/mismatch.py."""


@dataclass
class LearnerConfig:
    num_ranks: int = 1
    """Processes of torchrun; each has its own receiver and replay shard."""
    batch_size: int = 64
    """Trajectories of an update, over all ranks."""
    total_updates: int = 400
    sync_interval: int | None = 1
    """Weights are published every so many updates; None: never, so that actors keep the first ones (offline)."""
    max_minutes: float | None = None
    """End after this much wall-clock time; the learning rate decays towards whichever end comes first."""
    token_budget: int = 8192
    """Tokens of a micro-batch."""
    learning_rate: float = 3e-4
    value_learning_rate: float = 1e-3
    weight_decay: float = 0.0
    adam_beta1: float = 0.9
    adam_beta2: float = 0.95
    warmup_updates: int = 5
    value_warmup_updates: int = 0
    """First updates in which only the value head learns."""
    decay: str = "linear"
    """constant | linear | cosine: of the learning rate after the warm-up, to `final_learning_rate_fraction`."""
    final_learning_rate_fraction: float = 0.1
    max_grad_norm: float = 1.0
    save_every: int = 0
    """Updates between two saved models; 0: only the last one."""
    stall_timeout_s: float = 600.0
    """The learner ends with an error when no batch came together for so long."""


@dataclass
class ReplayConfig:
    capacity: int = 4096
    """Trajectories a rank keeps."""
    capacity_mb: int = 512
    recency_tau: float | None = None
    """τ of e^(-age/τ), in versions; None: recency off."""
    advantage_exponent: float = 0.0
    rarity_exponent: float = 0.0
    uniform_floor: float = 0.0
    """Share of draws that ignore priority."""
    correction_exponent: float = 1.0
    """b of the weights (N·P)^-b that undo the bias of the draw."""
    max_replays: int = 1
    """Updates that may use a trajectory; 1: each is used once."""
    samples_per_insert: float = 1.0
    """Reuse: samples drawn per trajectory inserted, on average at most."""
    max_replayed_share: float | None = None
    """Share of a batch that may have been used before; None: as the priorities draw it."""
    target_ess: float = 0.0
    """With max_replayed_share: where the effective sample size of a batch's weights, as a fraction, falls below this,
    the share falls as well, and rises again slowly."""


@dataclass
class PipelineConfig:
    arena_mb: int = 64
    """Shared memory of an actor for trajectories under way."""
    weight_slots: int = 3
    heartbeat_s: float = 1.0
    actor_timeout_s: float = 20.0
    """Silence after which an actor counts as dead and its tickets are granted again."""
    ticket_timeout_s: float = 600.0
    """An episode that has brought nothing for so long is taken from its actor and played again."""
    learner_timeout_s: float = 120.0
    """Silence of the learner after which an actor ends itself."""
    bind: str | None = None
    """TCP endpoint for actors on other hosts, such as tcp://0.0.0.0:7400; rank r listens at port + r, the weight server
    at port + learner.num_ranks. None: this host only."""
    connect: str | None = None
    """On a host without learner: rank 0's TCP endpoint, such as tcp://learner-host:7400. None: the learner is here."""
    keys: str | None = None
    """Folder of keys that `impala-llm keys` made; needed for everything beyond this host."""


@dataclass
class EvaluationConfig:
    before_and_after: bool = False
    """`impala-llm train` ends with a table: the policy before and after, greedy, on held-out tasks."""
    split: str = "test"
    num_tasks: int = 500
    """Tasks of the split, the first ones in canonical order."""
    unseen_seed: int | None = None
    """WebShop: also evaluate on the synthetic catalogue of this seed, whose products were never seen."""
    num_examples: int = 3
    """Episodes printed to read."""


@dataclass
class Config:
    run: RunConfig = field(default_factory=RunConfig)
    env: EnvConfig = field(default_factory=EnvConfig)
    engine: EngineConfig = field(default_factory=EngineConfig)
    model: ModelConfig = field(default_factory=ModelConfig)
    actor: ActorConfig = field(default_factory=ActorConfig)
    algorithm: AlgorithmConfig = field(default_factory=AlgorithmConfig)
    learner: LearnerConfig = field(default_factory=LearnerConfig)
    replay: ReplayConfig = field(default_factory=ReplayConfig)
    pipeline: PipelineConfig = field(default_factory=PipelineConfig)
    evaluation: EvaluationConfig = field(default_factory=EvaluationConfig)


WITH_VALUES = ("vtrace", "gae")
"""Values of `algorithm.advantage` that need the value head, and can bootstrap an episode that was cut."""
AGAINST_GROUP = ("group_relative", "rloo")
"""Those that compare an episode with the others of its group."""

CHOICES: dict[str, tuple[str, ...]] = {
    "env.name": ("webshop", "parrot", "corridor"),
    "env.webshop.goals": ("synthetic", "human"),
    "env.webshop.observation_mode": ("text", "text_rich", "compact"),
    "engine.name": ("torch", "sglang"),
    "engine.dtype": ("float32", "bfloat16"),
    "engine.in_flight": ("keep_kv", "recompute_kv", "drain"),
    "engine.transfer": ("disk", "distributed"),
    "model.device": ("auto", "cpu", "cuda"),
    "algorithm.advantage": (*WITH_VALUES, *AGAINST_GROUP, "distillation"),
    "algorithm.granularity": ("turn", "token"),
    "algorithm.turn_ratio": ("geometric", "product"),
    "algorithm.loss": ("reinforce", "truncated_is", "ppo_clip", "decoupled_ppo", "cispo", "gspo", "dpo"),
    "algorithm.is_level": ("token", "sequence"),
    "algorithm.proximal": ("log_linear", "recomputed"),
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
    "actor.num_actors": (1, math.inf),
    "actor.max_episodes": (1, math.inf),
    "actor.episode_timeout_s": (1e-3, math.inf),
    "actor.unroll_turns": (1, math.inf),
    "actor.unroll_tokens": (1, math.inf),
    "algorithm.group_size": (1, math.inf),
    "algorithm.discount": (0, 1),
    "algorithm.lam": (0, 1),
    "algorithm.rho_bar": (1e-3, math.inf),
    "algorithm.c_bar": (0, math.inf),
    "algorithm.dead_band": (0, math.inf),
    "algorithm.is_cap": (1e-3, math.inf),
    "algorithm.clip_low": (0, 1),
    "algorithm.clip_high": (0, math.inf),
    "algorithm.dual_clip": (1, math.inf),
    "algorithm.proximal_cap": (1e-3, math.inf),
    "algorithm.reject_low": (0, 1),
    "algorithm.reject_high": (1, math.inf),
    "algorithm.probability_limit": (0, 1),
    "algorithm.value_coef": (0, math.inf),
    "algorithm.entropy_coef": (0, math.inf),
    "algorithm.entropy_target": (0, math.inf),
    "algorithm.entropy_rate": (0, math.inf),
    "algorithm.entropy_alarm": (0, 1),
    "algorithm.length_alarm": (0, 1),
    "algorithm.kl_coef": (0, math.inf),
    "algorithm.dpo_beta": (1e-6, math.inf),
    "algorithm.max_staleness": (0, math.inf),
    "algorithm.mismatch_alarm": (1e-9, math.inf),
    "learner.num_ranks": (1, math.inf),
    "learner.batch_size": (1, math.inf),
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
    "replay.advantage_exponent": (0, math.inf),
    "replay.rarity_exponent": (0, math.inf),
    "replay.uniform_floor": (0, 1),
    "replay.correction_exponent": (0, 1),
    "replay.max_replays": (1, math.inf),
    "replay.samples_per_insert": (1e-3, math.inf),
    "replay.max_replayed_share": (0, 1),
    "replay.target_ess": (0, 1),
    "pipeline.arena_mb": (1, 1 << 20),
    "pipeline.weight_slots": (2, 64),
    "pipeline.heartbeat_s": (1e-2, math.inf),
    "pipeline.actor_timeout_s": (1e-1, math.inf),
    "pipeline.ticket_timeout_s": (1e-1, math.inf),
    "pipeline.learner_timeout_s": (1e-1, math.inf),
    "evaluation.num_tasks": (1, math.inf),
    "evaluation.num_examples": (0, math.inf),
}


def problems(config: Config) -> list[str]:
    """All reasons why a configuration cannot work; empty when it can. Pure: looks at no process and starts none."""
    values = dict(_leaves(config))
    found = []
    for key, allowed in CHOICES.items():
        if values[key] not in allowed:
            found.append(f"{key}={values[key]} is not known: choose one of {', '.join(allowed)}")
    for key, (low, high) in BOUNDS.items():
        value = values[key]
        if isinstance(value, int | float) and not low <= value <= high:
            limits = f"at least {low:g}" if high == math.inf else f"between {low:g} and {high:g}"
            found.append(f"{key}={value} is out of range: set it to {limits}")
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
    if share > replay.capacity:
        found.append(
            f"learner.batch_size={learner.batch_size} ({share} a rank) is larger than the buffer, "
            f"replay.capacity={replay.capacity}: raise replay.capacity to at least {share}"
        )
    compares = f"algorithm.advantage={algorithm.advantage}" if algorithm.advantage in AGAINST_GROUP else None
    compares = "algorithm.loss=dpo" if algorithm.loss == "dpo" else compares
    if compares and algorithm.group_size < 2:
        found.append(
            f"algorithm.group_size={algorithm.group_size} leaves {compares} nothing to compare: "
            "set algorithm.group_size to at least 2, such as 8"
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
    if config.model.path != "scratch" and model_directory(config.model.path) is None:
        found.append(
            f"model.path={config.model.path} is neither a Hugging Face directory (with config.json), nor one of "
            f"{', '.join(sorted(p.name for p in ASSETS.glob('*') if p.is_dir())) or 'the assets'}, nor scratch: "
            "correct it"
        )
    if not config.run.name or not all(c.isalnum() or c in "-_." for c in config.run.name):
        found.append(f"run.name={config.run.name!r} must consist of letters, digits, '-', '_' and '.': rename the run")
    return found


def _algorithm_problems(config: Config) -> list[str]:
    """Settings of the algorithm that contradict each other, or models that are not there."""
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
        if algorithm.advantage not in WITH_VALUES:
            found.append(
                f"actor.{key}={value} does not go with algorithm.advantage={algorithm.advantage}, which judges whole "
                f"episodes or each token: set actor.{key}=null or algorithm.advantage=vtrace"
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
    if algorithm.loss == "gspo" and algorithm.advantage not in AGAINST_GROUP:
        found.append(
            f"algorithm.advantage={algorithm.advantage} does not go with algorithm.loss=gspo, whose ratio is one for a "
            "whole episode: set algorithm.advantage=group_relative"
        )
    if algorithm.loss == "dpo" and algorithm.aggregate != "sequence_mean_token_sum":
        found.append(
            f"algorithm.aggregate={algorithm.aggregate} does not go with algorithm.loss=dpo, whose pairs are compared "
            "as wholes: set algorithm.aggregate=sequence_mean_token_sum"
        )
    if algorithm.loss == "dpo" and algorithm.advantage not in AGAINST_GROUP:
        found.append(
            f"algorithm.advantage={algorithm.advantage} does not go with algorithm.loss=dpo, which compares episodes "
            "of a group: set algorithm=dpo or algorithm.advantage=group_relative"
        )
    if algorithm.advantage == "distillation" and algorithm.teacher is None and not algorithm.teacher_context:
        found.append(
            "algorithm.advantage=distillation has neither algorithm.teacher nor algorithm.teacher_context: the policy "
            "would be its own teacher; set one of them"
        )
    for key in ("reference", "teacher"):
        path = getattr(algorithm, key)
        if path is not None and model_directory(path) is None:
            found.append(
                f"algorithm.{key}={path} is neither a Hugging Face directory (with config.json) nor one of the shipped "
                "policies: correct it"
            )
    return found


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
    if is_apart and (engine.urls is None or any(_is_loopback(url) for url in engine.urls)):
        found.append(
            "engine.transfer=distributed needs servers that the learner can reach, and with pipeline.connect="
            f"{config.pipeline.connect} it is on another host: an actor's own server listens on this one alone; "
            "start servers at an address of this host and set engine.urls=[http://ADDRESS:PORT], or "
            "engine.transfer=disk"
        )
    if engine.urls is not None and len(engine.urls) < config.actor.num_actors:
        found.append(
            f"engine.urls has {len(engine.urls)} servers for actor.num_actors={config.actor.num_actors}: each actor "
            "loads weights into servers of its own; lower actor.num_actors or add servers"
        )
    for url in engine.urls or ():
        if not url.startswith(("http://", "https://")):
            found.append(f"engine.urls has {url!r}: write it as http://host:port")
    if engine.python is not None and not (Path(engine.python).expanduser().is_file() or shutil.which(engine.python)):
        found.append(
            f"engine.python={engine.python} is no interpreter: give the path of the python that has SGLang, see "
            "tools/install_sglang_cpu.sh"
        )
    return found


def _is_loopback(url: str) -> bool:
    try:
        return TcpEndpoint(urlsplit(url).hostname or "", None).is_loopback
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


def model_directory(path: str) -> Path | None:
    """The Hugging Face directory that a value of `model.path` means; None if there is none (or it is `scratch`)."""
    for candidate in (Path(path).expanduser(), ASSETS / path):
        if (candidate / "config.json").is_file():
            return candidate.resolve()
    return None


def load(overrides: Sequence[str] = ()) -> Config:
    """Compose, type-check and check a configuration.

    Args:
        overrides: Hydra's `key=value` and `group=choice` words, such as `experiment=quickstart learner.batch_size=32`.

    Raises:
        ConfigError: an unknown key, a wrong type, an impossible value or combination.
    """
    store = ConfigStore.instance()
    store.store(name="schema", node=Config)
    GlobalHydra.instance().clear()
    try:
        with initialize_config_dir(version_base="1.3", config_dir=str(config_folder())):
            raw = compose("config", overrides=list(overrides))
        OmegaConf.resolve(raw)
        config = OmegaConf.to_object(raw)
    except (HydraException, OmegaConfBaseException) as error:
        raise ConfigError(_explain(error, overrides)) from None
    assert isinstance(config, Config)
    found = problems(config)
    if found:
        raise ConfigError("\n".join(found))
    return config


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


def _leaves(node: object, prefix: str = "") -> Iterator[tuple[str, object]]:
    """All settings as (dotted key, value)."""
    assert is_dataclass(node)
    for f in fields(node):
        value = getattr(node, f.name)
        if is_dataclass(value):
            yield from _leaves(value, f"{prefix}{f.name}.")
        else:
            yield prefix + f.name, value


def _explain(error: Exception, overrides: Sequence[str]) -> str:
    """One sentence with key, value and fix from what Hydra or OmegaConf raised."""
    causes: list[BaseException] = []
    cause: BaseException | None = error
    while cause is not None:
        causes.append(cause)
        cause = cause.__cause__ or cause.__context__
    given = dict(word.lstrip("+~").partition("=")[::2] for word in overrides)
    known = dict(_leaves(Config()))
    groups = [p.name for p in config_folder().iterdir() if p.is_dir()]
    for key, value in given.items():
        if key in groups:
            choices = sorted(p.stem for p in (config_folder() / key).glob("*.yaml"))
            if value not in choices:
                return f"{key}={value} is not known: choose one of {', '.join(choices)}"
        elif key not in known:
            close = difflib.get_close_matches(key, known, n=1, cutoff=0.5)
            leaf = [k for k in known if k.rsplit(".", 1)[-1] == key.rsplit(".", 1)[-1]]
            hint = (leaf or close or ["run `impala-llm train --dry-run` to see all keys"])[0]
            return f"{key}={value} is an unknown key: did you mean {hint}?"
    for cause in causes:
        full_key = getattr(cause, "full_key", None)
        if isinstance(cause, OmegaConfBaseException) and full_key and not isinstance(cause, ConfigKeyError):
            reason = str(cause.msg or cause).splitlines()[0]
            return (
                f"{full_key}={given.get(full_key, '?')} has the wrong type: {reason}; "
                f"the default is {known.get(full_key)!r}"
            )
    return str(error).splitlines()[0]
