"""Every setting of the system: one dataclass a part. The range, the choices and the meaning of a setting stand on its
field; `impala-llm train --help .` and docs/settings.md are made from them, by commands/settings_reference.py.
A long file, since whoever looks for a setting should have one to look in.

Invariant: nothing here looks at another setting, or at more of the machine than whether a file is there.
"""

import math
import os
from collections.abc import Iterator, Mapping
from dataclasses import KW_ONLY, dataclass, field, fields, is_dataclass
from pathlib import Path
from typing import Any, ClassVar

PACKAGE = Path(__file__).resolve().parent
ASSETS = PACKAGE / "assets"


def bounded(default: float | None, least: float, most: float = math.inf) -> Any:
    """A field for a number, or None, between two bounds, both included."""
    return field(default=default, metadata={"range": (least, most)})


def one_of(default: str, *others: str) -> Any:
    """A field for one of several words."""
    return field(default=default, metadata={"choices": (default, *others)})


def bounded_or(word: str, default: int, least: int) -> Any:
    """A field for a number from a bound on, or a word."""
    return field(default=default, metadata={"range": (least, math.inf), "choices": (word,)})


@dataclass
class RunConfig:
    name: str = "impala"
    """Names the run's folders: outputs/NAME, and one in /dev/shm, where actors find their learner."""
    dir: str = "outputs/${run.name}"
    """Folder of logs, metrics and checkpoints; made if it is missing."""
    seed: int = bounded(0, least=0, most=2**31 - 1)
    """Seed of everything random: task order, sampling, weights of new heads."""
    resume: Any = field(default="auto", metadata={"choices": ("auto", True, False)})
    """auto: where run.dir holds a run of the same model, environment, algorithm and seed, it goes on: from what a
    killed learner left in shared memory, or from the newest whole checkpoint. true: it must go on, also with other
    settings of the algorithm. false: it begins anew, and a folder that holds a run is refused. See
    docs/checkpoints.md."""
    terminal: bool = True
    """Live view in the terminal."""
    metric_writers: list[str] = field(default_factory=lambda: ["tensorboard"])
    """Writers of the metrics beside metrics.jsonl, which is always written: tensorboard | an installed one | your own,
    as module:Class, see docs/launching.md, "Metrics elsewhere"."""


@dataclass
class WebShopConfig:
    items: str | None = None
    """The original's items_shuffle*.json; None: a synthetic catalogue."""
    attributes: str | None = None
    """The original's items_ins_v2*.json."""
    human: str | None = None
    """The original's items_human_ins.json."""
    nouns: str | None = None
    """A file asin -> nouns of its title; None: spaCy where it is installed, else the built-in heuristic."""
    num_products: int = bounded(1000, least=1)
    """Size of the synthetic catalogue; of files, the first so many records."""
    catalogue: str = one_of("easy", "hard")
    """Synthetic catalogue: easy, whose first hit is mostly the right one, or hard, where prices, options and features
    of several alike products must be read, and splits share no product; see docs/environments.md."""
    catalogue_seed: int = bounded(0, least=0, most=2**31 - 1)
    """Seed of the synthetic catalogue."""
    goals: str = one_of("synthetic", "human")
    """Goals made from the attributes and options of products, or those that people wrote (`human`, a file)."""
    observation_mode: str = one_of("text_rich", "text", "compact")
    """text and text_rich: the pages of the original; compact: a third of the tokens, for small models."""
    strict_compat: bool = True
    """Keep the quirks of the original, such as its rounding and its mistakes: see envs/webshop/env.py."""
    solvable_only: bool = False
    """Leave out goals for which no sequence of actions scores 1.0."""
    max_steps: int = bounded(15, least=1)
    """Actions of an episode at most."""
    max_invalid_actions: int | None = bounded(None, least=1)
    """In training an episode ends after so many actions that do nothing; None: never."""
    results_per_page: int = bounded(10, least=1, most=50)
    """Products on a page of results; the original shows 10."""
    row_numbers: bool = False
    """Mode compact: each result shows its number on the page instead of its asin, in brackets once it was opened, and
    is clicked by it, click[3]. Clicks on asins count all the same."""
    instruction_once: bool = False
    """Show the instruction on the first page only, since the conversation holds it."""
    delta_pages: bool = False
    """After a click on an option show only what changed on the page."""
    script_speaks: bool = False
    """Hard catalogue: before the scripted shopper acts on a features page, it says of each wanted attribute whether it
    is there, such as "sugar free yes vegan no search[tea]": policies that learn from it learn to judge."""
    script_speaks_of_prices: bool = False
    """Hard catalogue: before the scripted shopper opens a result, it says of each new one up to there whether the price
    is low enough, such as "104 no 20 yes click[2]"; where it overlooks the price limit it says nothing. In
    tiny_shopper's tokens that takes up to 28 for five results, 34 and more for ten: engine.max_new_tokens must hold
    them."""
    sparse_reward: bool = False
    """Reward 10 for a score of 1.0 and 0 otherwise, instead of the score."""
    success_bonus: float = bounded(0.0, least=0, most=1000.0)
    """Added to the reward where the score is 1.0; not with sparse_reward. On hard catalogues the score alone pays
    reading little more than buying unread."""


@dataclass
class EnvConfig:
    name: str = "webshop"
    """webshop | parrot (toy, one turn) | corridor (toy, several turns) | an adapter, such as reasoning_gym | one that
    is installed | your own, as module:Class; see docs/environments.md. The word env=NAME means the same, and for a
    preset its other settings too."""
    webshop: WebShopConfig = field(default_factory=WebShopConfig)
    args: Any = None
    """Arguments of all environments but webshop: env.args.NAME=value sets a parameter of its constructor, or a field of
    its class `Options`."""


@dataclass
class AgentConfig:
    """An agent of your own that plays the episodes, through an OpenAI-compatible server: docs/agents.md."""

    name: str | None = None
    """Function agent(task, client) as module:function, or the name of an installed one; null: the environment's
    episodes are played by reset and step."""
    command: str | None = None
    """Command line of a program that is started for each episode, in place of a function."""
    tasks: str | None = None
    """JSON lines, an object each: the tasks, which are handed to the agent. null: it gets their numbers alone."""
    num_tasks: int = bounded(1000, least=3)
    """Number of tasks where there is no file of them."""
    processes: int = bounded(2, least=1, most=256)
    """Processes of an actor in which its agents run."""
    process_memory_mb: int = bounded(4096, least=64)
    """Memory of such a process, in MiB, beyond which it is replaced."""
    max_tokens: int | None = bounded(None, least=2)
    """Tokens of an episode in all branches of its conversation, with what they share counted in each; null: four times
    engine.max_length."""
    unsupported: str = one_of("refuse", "drop")
    """Parameters of requests that would make the recorded log-probabilities wrong, such as top_p or another
    temperature, or that are not served, such as logprobs: refuse (with status 400) or drop (with a warning in the
    actor's log)."""
    tool_parser: str = one_of("none", "qwen3", "qwen3.5", "glm", "deepseek-v3")
    """How the policy writes calls of tools: as the family of models that is named here, whose tokens its tokenizer must
    have; none: they stay text."""
    reasoning_parser: str = one_of("none", "think")
    """How the policy marks its reasoning: think: by <think> and </think>; none: it stays text."""

    @property
    def is_set(self) -> bool:
        """Whether an agent plays the episodes."""
        return self.name is not None or self.command is not None


@dataclass
class EngineConfig:
    name: str = "torch"
    """torch: the embedded engine | sglang: SGLang servers, one an actor | an installed one | your own, as module:Class,
    see docs/engines.md."""
    options: Any = None
    """Options of an engine of your own: engine.options.NAME=value sets a field of its class `Options`."""
    temperature: float = bounded(1.0, least=0.001, most=100)
    """Sampling temperature; the learner divides its logits by the same."""
    top_p: float = 1.0
    """Only 1.0 in training: with another the engine would sample from another distribution than the one whose
    log-probabilities it reports."""
    top_k: int = -1
    """Only -1 (off) in training."""
    max_new_tokens: int = bounded(64, least=1)
    """Longest completion, what the policy samples for one turn, in tokens."""
    max_length: int = bounded(2048, least=2)
    """Longest episode, in tokens. One that does not fit ends there, as it does in evaluation: nothing is to come."""
    dtype: str = one_of("float32", "bfloat16")
    """Weights and arithmetic of the engine."""
    python: str | None = None
    """sglang: the Python that has SGLang; None: ours, or the one that tools/install_sglang_cpu.sh has made."""
    urls: list[str] | None = None
    """sglang: running servers, or a router in front of them, instead of a server started by each actor; dealt out among
    the actors of this host."""
    in_flight: str = one_of("recompute_kv", "keep_kv", "drain")
    """sglang, new weights while completions are under way: recompute_kv (go on with new keys and values), keep_kv (go
    on over the old ones) or drain (let the completions end first). What each means for the ratios: docs/engines.md."""
    transfer: str = one_of("disk", "distributed")
    """sglang, how weights come: disk (the weight board's directory) or distributed (a process group with the learner:
    NCCL on GPUs, gloo elsewhere)."""
    tensor_parallel: int = bounded(1, least=1)
    """sglang: GPUs of a server."""
    prefix_cache: bool = False
    """sglang: keep keys and values of ended requests. Flushed at each new version; not with in_flight=keep_kv."""
    memory_fraction: float | None = bounded(None, least=0.01, most=0.99)
    """sglang: share of a GPU's memory for weights and KV cache; None: SGLang's own choice."""
    server_args: list[str] = field(default_factory=list)
    """sglang: further arguments of sglang.launch_server, word by word; everybody on the host can read them."""
    start_timeout_s: float = bounded(600.0, least=0.001)
    """sglang: how long a server may take to come up."""
    request_timeout_s: float = bounded(300.0, least=0.001)
    """sglang: how long a completion may take."""


@dataclass
class ScratchConfig:
    """A randomly initialised model with a tokenizer of characters, for the toy environments."""

    hidden_size: int = bounded(64, least=16)
    """Width of the model."""
    num_layers: int = bounded(2, least=1)
    """Transformer layers."""


@dataclass
class LoraConfig:
    """Low-rank adapters that learn in place of the policy's weights. Needs peft: pip install -e '.[lora]'."""

    rank: int = bounded(0, least=0, most=1024)
    """Rank of the adapters; 0: none, all weights learn."""
    alpha: int = bounded(32, least=1)
    """The adapters' product is multiplied by alpha / rank."""
    targets: list[str] = field(default_factory=lambda: ["all-linear"])
    """Matrices with an adapter, by the ends of their names, such as q_proj; all-linear: all of the layers'."""


@dataclass
class ModelConfig:
    path: str = "tiny_shopper"
    """A Hugging Face directory, the name of a policy in impala_llm/assets, or `scratch`."""
    scratch: ScratchConfig = field(default_factory=ScratchConfig)
    lora: LoraConfig = field(default_factory=LoraConfig)
    device: str = one_of("auto", "cpu", "cuda")
    """Device of learner and engine; auto: a GPU where there is one."""
    cuda_products: str = one_of("float32", "tf32")
    """Product of float32 matrices on a GPU, in learner and embedded engine: float32 (exact) or tf32 (10 bits of the
    mantissa, several times as fast)."""
    value_hidden_size: int | None = bounded(None, least=0)
    """Width of the value head's hidden layer; null: that of the policy; 0: no such layer, a linear head, which
    scored lower in the first study, with old data and without (docs/results/off_policy_first.md)."""
    value_trunk_gradient: bool = True
    """Whether the value loss also shapes the policy's trunk, as in IMPALA."""


@dataclass
class ActorConfig:
    num_actors: int | None = bounded(None, least=0, most=4096)
    """Actor processes on this host, each with an engine of its own; 0: none beside the learner; None: one, and with
    engine=sglang one for each server of engine.urls, or that the GPUs beside the learner's hold."""
    max_episodes: int = bounded(64, least=1)
    """Episodes that one actor plays at once."""
    episode_timeout_s: float = bounded(300.0, least=0.001)
    """Wall-clock budget of an episode, reset included; past it the turns so far are learned from where a value head can
    stand for the rest, else the ticket is given back. An actor whose environment blocks it for so long, and
    for three times pipeline.actor_timeout_s, is ended."""
    fault_patience_s: float = bounded(20.0, least=0)
    """Time for which all episodes must have failed before the actor ends, with the reason: shorter outages of what an
    environment or an agent needs are waited for. Returned values that are not what docs/environments.md says end it
    after 32 in a row."""
    unroll_turns: int | None = bounded(None, least=1)
    """Learn from an episode before it has ended: after every so many turns, with the value of the state reached in
    place of what is to come (IMPALA's unrolls). Each unroll is a trajectory of the batch. None: whole episodes."""
    unroll_tokens: int | None = bounded(None, least=1)
    """The same after the turn in which an unroll has so many action tokens; with both, whichever comes first."""


@dataclass
class CreditSettings:
    """The chosen credit. `config.load` makes it the registered class of that name, which adds options of its own."""

    _: KW_ONLY  # so that a class of the user's may have options without a default
    name: str = ""
    """Short name, or import path of your own as module:Class; written `algorithm.credit=NAME`."""
    discount: float = bounded(1.0, least=0, most=1)
    """γ a turn, of returns and values."""

    uses_values: ClassVar[bool] = False
    """Whether it needs the value head, which can also stand for the rest of an episode that was cut."""
    compares_group: ClassVar[bool] = False
    """Whether it compares an episode with the others of its group."""
    needs_reference: ClassVar[bool] = False
    """Whether it calls `Episodes.log_probs`."""
    learns_from_rewards: ClassVar[bool] = True
    """Whether its advantages follow from rewards, and with them from what shapes these."""
    metrics: ClassVar[Mapping[str, str]] = {}
    """Name -> meaning of each metric; a name without `/` is logged under `credit/`."""
    teaches_at_any_age: ClassVar[bool] = False
    """Whether tokens older than max_staleness teach as well, as nothing of theirs is weighed by a ratio."""
    is_for_one_step: ClassVar[bool] = False
    """Whether its advantages hold only for the weights that an update begins with, and so for one optimizer step."""

    @property
    def ignores_scale(self) -> bool:
        """Whether its advantages are the same whatever the rewards are divided by."""
        return False

    @property
    def ignores_turn_ratio(self) -> bool:
        """Whether its option `turn_ratio` has no effect."""
        return False

    def problems(self, algorithm: "AlgorithmConfig") -> list[str]:
        """Reasons why this credit cannot work with the other settings: sentences with key, value and fix."""
        return []


@dataclass
class LossSettings:
    """The chosen policy loss. `config.load` makes it the registered class of that name, which adds its own options."""

    _: KW_ONLY  # so that a class of the user's may have options without a default
    name: str = ""
    """Short name, or import path of your own as module:Class; written `algorithm.loss=NAME`."""

    metrics: ClassVar[Mapping[str, str]] = {}
    """Name -> meaning of each metric; a name without `/` is logged under `loss/`."""
    bounds_steps: ClassVar[bool] = True
    """Whether it bounds how far several optimizer steps on a batch move the policy."""

    def needs_sampling_policy(self, num_steps: int) -> bool:
        """Return whether behaviour log-probabilities must be those of the version that sampled each token.

        Args:
            num_steps: optimizer steps an update.
        """
        return False

    def problems(self, algorithm: "AlgorithmConfig") -> list[str]:
        """Reasons why this loss cannot work with the other settings: sentences with key, value and fix."""
        return []

    def problems_of_class(self) -> list[str]:
        """The same, for what no loss may be; not to be overridden."""
        return []


@dataclass
class AlgorithmConfig:
    credit: CreditSettings = field(default_factory=CreditSettings)
    loss: LossSettings = field(default_factory=LossSettings)
    group_size: int = bounded(1, least=1)
    """Episodes of the same task that are granted, and where returns are compared, compared together."""
    refill: float = bounded(0.0, least=0, most=1000)
    """Groups whose episodes all have the same return (by the environment's rewards) have nothing to compare: they are
    dropped as they arrive, and others are played in their place, in an update at most this many times the groups of a
    batch; what remains of that below a whole group is added in the next update. 0: none."""
    curriculum: float | None = bounded(None, least=0.001, most=1)
    """Pass over tasks whose kind, the environment's signature, mostly succeeds or mostly fails: with success rate p a
    task is played with probability 4p(1 - p), and at least this. None: every task, once an epoch."""
    normalize_reward: bool = False
    """Divide rewards by the standard deviation of all returns so far; with actor.unroll_turns or actor.unroll_tokens
    of the returns of unrolls, which is smaller."""
    overlong_tokens: int | None = bounded(None, least=1)
    """An episode that ends within so many tokens of engine.max_length, or at it, loses reward: `overlong_penalty` at
    the limit, linearly less before. None: none does."""
    overlong_penalty: float = bounded(1.0, least=0, most=1000000.0)
    """Reward that an episode at the limit loses."""
    reward_kl_coef: float = bounded(0.0, least=0, most=1000)
    """Weight of log μ - log π_reference, summed over the tokens of a turn, that is taken from the turn's reward;
    kl_coef has the divergence in the loss instead."""
    whiten_advantages: bool = False
    """Shift and scale advantages to mean 0 and deviation 1 over the action tokens of the batch, of all ranks. Where
    they come from values, or a teacher, that takes one more forward pass."""
    reject: str = one_of("none", "token", "sequence", "geometric")
    """Leave data out instead of weighing it down, by the ratio of a token, of a sequence, or its geometric mean
    over the sequence; what lies outside of reject_low and reject_high does not teach."""
    reject_low: float = bounded(0.5, least=0, most=1)
    """Smallest ratio that is kept."""
    reject_high: float = bounded(2.0, least=1)
    """Largest ratio that is kept."""
    probability_limit: float | None = bounded(None, least=0, most=1)
    """Leave out tokens whose probability has moved by more than this, to where their advantage pushes them."""
    aggregate: str = one_of("token_mean", "sequence_mean_token_sum", "sequence_mean_token_mean")
    """Average of the tokens' losses: over all tokens of the batch, or first summed or averaged in each
    sequence and then averaged over sequences."""
    entropy_coef: float = bounded(0.0, least=0, most=1000)
    """Bonus for entropy, an average over the action tokens of the batch whatever `aggregate` says; with a target, its
    start."""
    entropy_target: float | None = bounded(None, least=0, most=100)
    """Nats a token: `entropy_coef` rises while the entropy is below and falls while it is above."""
    entropy_rate: float = bounded(0.01, least=0, most=1000)
    """Change of `entropy_coef` in an update, per nat between entropy and target."""
    entropy_alarm: float = bounded(0.05, least=0, most=1)
    """A policy whose entropy falls below this share of its first one, with scores below 0.9, has collapsed: a
    warning in the terminal says so. 0: never."""
    length_alarm: float = bounded(0.2, least=0, most=1)
    """The same for the mean number of tokens an episode's completions have."""
    kl_coef: float = bounded(0.0, least=0, most=1000)
    """Weight of KL(π‖reference), which is a part of each token's loss and averaged with it, by `aggregate`."""
    reference: str | None = None
    """Reference policy of kl_coef, reward_kl_coef and algorithm.credit=preference, as model.path; None: the one that
    training started from."""
    max_staleness: int | None = bounded(2, least=0)
    """η, in policy versions: the policy loss has no term for an older action token, and a trajectory, or group, is
    dropped when all of its action tokens are older. 0 is synchronous, None free running. What episodes that last
    longer than η versions lose, and what helps: docs/pipeline.md, "Long episodes"."""
    mismatch_alarm: float = bounded(0.05, least=1e-09)
    """Mean |log π - log μ| in nats, of tokens that the learner's own version sampled, above which engine and learner
    count as disagreeing. A float32 engine stays below 1e-5 and can be held to 1e-3; bfloat16 gives 0.002 to 0.01."""
    recompute_behaviour: str = one_of("never", "on_mismatch", "always")
    """When the learner takes its own log-probabilities, of when a trajectory reaches it, in place of the engine's;
    on_mismatch: while that alarm is on. They are right where the engine's are wrong; where the engine merely computes
    otherwise, its own are those it sampled from, and the ratios correct for it. See learning/mismatch.py."""

    @property
    def uses_reference(self) -> bool:
        """Whether log-probabilities under the reference policy are needed."""
        return self.kl_coef > 0 or self.has_kl_in_rewards or self.credit.needs_reference

    @property
    def has_kl_in_rewards(self) -> bool:
        """Whether the KL to the reference policy is a part of rewards that are learned from."""
        return self.reward_kl_coef > 0 and self.credit.learns_from_rewards


@dataclass
class LearnerConfig:
    num_ranks: int = bounded(1, least=1)
    """Ranks of the learner, all on one host; each has its own receiver and replay shard, and is one process, or as many
    as tensor_parallel says."""
    tensor_parallel: int = bounded(1, least=1, most=64)
    """Processes of each rank, a GPU each, that divide the layers' matrices and compute the same rows together, as the
    model's own plan in transformers says. See docs/sharding.md."""
    sharding: str = one_of("replicated", "fsdp2")
    """replicated: every rank holds the whole policy; fsdp2: each holds a share of parameters, gradients and moments,
    and gathers a layer while it computes it. See docs/sharding.md."""
    cpu_offload: bool = False
    """fsdp2: shares lie in the host's memory, and the optimizer steps there; a GPU holds only what it computes with."""
    batch_size: int = bounded(64, least=1)
    """Trajectories of an update, over all ranks."""
    epochs: int = bounded(1, least=1, most=1000)
    """Passes over the batch in an update. Several are for losses that bound how far they move the policy, such as
    ppo_clip; TOPR does not."""
    minibatches: int = bounded(1, least=1)
    """Optimizer steps of each pass, on as many parts of the batch. With several steps an update, the log-probabilities
    that it begins with are scored first: they are the proximal policy of algorithm.loss=decoupled_ppo."""
    total_updates: int = bounded(400, least=1)
    """Updates of the run: versions of the weights."""
    sync_interval: int | None = bounded(1, least=1)
    """Weights are published every so many updates; None: never, so that actors keep the first ones (offline)."""
    max_minutes: float | None = bounded(None, least=0.001)
    """End after this much wall-clock time since the run first began to train, restarts included; the learning rate
    decays towards whichever end comes first."""
    token_budget: int | str = bounded_or("auto", 8192, least=2)
    """Tokens of a micro-batch; a longer row has one of its own. Where memory runs out the update is begun again with
    half of it. auto: found by a trial on the first batch, on a GPU the largest that its memory holds, on a CPU the
    fastest. Sums then have another order, and results other last digits: see docs/learner.md."""
    precision: str = one_of("float32", "bfloat16")
    """Arithmetic of the learner's matrix products and attention. Weights, gradients, optimizer, log-probabilities,
    values and losses are float32 in both."""
    attention: str = one_of("auto", "segments", "flex", "flash")
    """How packed rows attend: segments (torch's attention, rows of a length together), flex (torch's flex attention) or
    flash (flash attention, with precision=bfloat16 alone). auto: segments on a CPU and in float32; on a GPU in bfloat16
    flash, where it agrees with segments. See docs/learner.md."""
    activation_checkpointing: int = bounded(0, least=0)
    """Layers of which only the input is kept for the backward pass, which computes them again: 0 none, 1 all, n every
    n-th. Lowers memory, and costs up to a third more time; see docs/learner.md."""
    compile_layers: bool = False
    """torch.compile of the model's layers, whose element-wise operations it fuses: faster, after half a minute of
    compilation at the start. On a CPU it needs a C++ compiler, and no space in the paths of torch and of what it keeps.
    Results have other last digits; see docs/learner.md."""
    learning_rate: float = bounded(3e-4, least=0, most=1)
    """Learning rate of the policy: the largest, after the warm-up."""
    value_learning_rate: float = bounded(1e-3, least=0, most=1)
    """Learning rate of the value head. A matrix with n > 64 inputs has 64 / n of it: a step then moves values as
    far at any width."""
    weight_decay: float = bounded(0.0, least=0, most=1)
    """AdamW's weight decay."""
    adam_beta1: float = bounded(0.9, least=0, most=0.9999)
    """AdamW's β₁: decay of the mean of the gradient."""
    adam_beta2: float = bounded(0.95, least=0, most=0.99999)
    """AdamW's β₂: decay of the mean of its square."""
    warmup_updates: int = bounded(5, least=0)
    """Updates in which the learning rate rises from 0."""
    value_warmup_updates: int = bounded(0, least=0)
    """First updates in which only the value head learns. The decay counts them, so that the policy begins below
    learning_rate."""
    decay: str = one_of("linear", "constant", "cosine")
    """Course of the learning rates from the first update to the last, down to `final_learning_rate_fraction`; constant:
    none."""
    final_learning_rate_fraction: float = bounded(0.1, least=0, most=1)
    """Learning rate at the end, as a fraction of the largest."""
    max_grad_norm: float = bounded(1.0, least=1e-06)
    """The gradient is scaled down to this norm."""
    save_every: int = bounded(0, least=0)
    """Updates between two saved models; 0: only the last one."""
    checkpoint_minutes: float | None = bounded(10.0, least=0.01)
    """Time between two checkpoints, in the background; null: by updates alone. One is also written after the first
    update of a run, at its end, at Ctrl-C and at SIGTERM. What a lost host costs is the work since the last one: see
    docs/checkpoints.md."""
    checkpoint_every: int = bounded(0, least=0)
    """Updates between two checkpoints, beside those by time; 0: by time alone."""
    checkpoints_kept: int = bounded(2, least=0)
    """Checkpoints that stay on the disk, the newest ones, and beside them the best by evaluation. 0: none is written,
    and a run that has ended cannot go on."""
    rank_timeout_s: float = bounded(3600.0, least=1, most=1e6)
    """Several ranks: one that waits for another for longer ends with an error. The others wait also while rank 0
    compares the checksums of a checkpoint, or writes one: 100 GB take ten minutes at 160 MB/s."""
    stall_timeout_s: float = bounded(600.0, least=1, most=1e6)
    """The learner ends with an error when no batch came together for so long. Time in which it has no actor does not
    count: they may be started, and come back, at any time."""

    @property
    def num_processes(self) -> int:
        """Processes of the learner."""
        return self.num_ranks * self.tensor_parallel

    @property
    def steps_per_update(self) -> int:
        """Optimizer steps an update."""
        return self.epochs * self.minibatches


@dataclass
class ReplayConfig:
    capacity: int = bounded(4096, least=1)
    """Trajectories a rank keeps."""
    capacity_mb: int = bounded(512, least=1)
    """MiB that a rank keeps at most."""
    recency_tau: float | None = bounded(None, least=1e-06)
    """τ of e^(-age/τ), in versions; None: recency off."""
    advantage_exponent: float = bounded(0.0, least=0, most=100)
    """α of (|A| + ε)^α; 0: off."""
    rarity_exponent: float = bounded(0.0, least=0, most=100)
    """β of n^-β, n: number of items of the task's signature in the buffer; 0: off."""
    uniform_floor: float = bounded(0.0, least=0, most=1)
    """Share of draws that ignore priority."""
    correction_exponent: float = bounded(0.0, least=0, most=1)
    """b of the weights (N·P)^-b that undo the bias of the draw; 0: none, 1: all of it. Part (c) of the first study in
    docs/results/off_policy_first.md decided the default."""
    max_replays: int = bounded(1, least=1)
    """Updates that may use a trajectory; 1: each is used once."""
    samples_per_insert: float = bounded(1.0, least=0.001, most=1000)
    """Reuse: samples drawn per trajectory inserted, on average at most. Below 1, so that some are not used at all, only
    with algorithm.max_staleness=null."""
    max_replayed_share: float | None = bounded(None, least=0, most=1)
    """Share of a batch that may have been used before; None: as the priorities draw it. With a share s an episode is
    used at most 1 / (1 - s) times on average, whatever replay.samples_per_insert asks for."""
    target_ess: float = bounded(0.0, least=0, most=1)
    """With max_replayed_share: where the effective sample size of a batch's weights, as a fraction, falls below this,
    the share falls as well, and rises again slowly."""

    @property
    def prioritised(self) -> bool:
        """Whether recency, advantage or rarity decide what is drawn. An episode that is drawn once has no known |A|."""
        by_advantage = self.advantage_exponent > 0 and self.max_replays > 1
        return by_advantage or self.recency_tau is not None or self.rarity_exponent > 0


@dataclass
class PipelineConfig:
    arena_mb: int = bounded(64, least=1, most=1 << 20)
    """Shared memory of an actor for trajectories under way, in MiB, in equal parts for the learner's ranks."""
    weight_slots: int = bounded(3, least=2, most=64)
    """Versions of the weights that lie on the board at once."""
    weights_dtype: str = one_of("float32", "engine")
    """Weights on the board: float32, from which a learner that is started again goes on exactly; engine: in
    engine.dtype, half as many bytes with bfloat16 for actors, relays and SGLang. A learner that goes on from those
    without a checkpoint has lost what its weights were beyond them."""
    heartbeat_s: float = bounded(1.0, least=0.01, most=3600)
    """Time between two signs of life of an actor; longer where a learner rank has more than 100 actors."""
    actor_timeout_s: float = bounded(20.0, least=0.1)
    """Silence after which an actor counts as dead and its tickets are granted again; at least three heartbeats."""
    ticket_timeout_s: float = bounded(600.0, least=0.1)
    """An episode that has brought nothing for so long, no unroll either, is taken from its actor and played again; a
    whole episode not before actor.episode_timeout_s and half a minute are over. With algorithm.max_staleness=0, where
    an actor holds its share of a whole batch: once none of it has brought anything for so long."""
    learner_timeout_s: float | None = bounded(None, least=0.1)
    """Silence of the learner after which an actor ends itself; None: it waits for as long as its run is there, on
    another host for ever."""
    bind: str | None = None
    """TCP endpoint for actors on other hosts, such as tcp://0.0.0.0:7400; rank r listens at port + r, the weight server
    at port + learner.num_ranks. None: this host only."""
    connect: str | None = None
    """On a host without learner: rank 0's TCP endpoint, such as tcp://learner-host:7400, or @FILE, a file that holds it
    and is read again while the learner is silent. None: the learner is here."""
    keys: str | None = None
    """Folder of keys that `impala-llm keys` made; needed with `bind` and `connect`."""


@dataclass
class EvaluationConfig:
    before_and_after: bool = False
    """`impala-llm train` ends with a table: the policy before and after, greedy, on held-out tasks."""
    split: str = one_of("test", "train", "validation")
    """Tasks to play."""
    num_tasks: int = bounded(500, least=1)
    """Tasks of the split, the first ones in canonical order."""
    unseen_seed: int | None = bounded(None, least=0, most=2**31 - 1)
    """WebShop: also evaluate on the synthetic catalogue of this seed, whose products were never seen: not that of
    env.webshop.catalogue_seed, and none that demonstrations are of."""
    baselines: bool = True
    """Show rules and scripts that the environment offers beside the policy, on the same tasks."""
    start: str | None = None
    """`impala-llm evaluate`: policy that the one of model.path began as, a Hugging Face directory or the name of one
    in impala_llm/assets; it plays the same tasks, and the paired difference is printed."""
    num_examples: int = bounded(3, least=0)
    """Episodes printed to read: the first ones, in canonical order, of the policy that is evaluated."""
    every_updates: int | None = bounded(None, least=1)
    """Evaluate inside of the run, at its start, after every so many updates and at its end: actors play validation
    tasks with the published weights, beside their training episodes. None: not by updates."""
    every_minutes: float | None = bounded(None, least=0.001)
    """The same after so many minutes since the last such evaluation was begun; with both, whichever comes first."""
    run_tasks: int = bounded(64, least=1, most=1 << 16)
    """Tasks of an evaluation inside of the run, the first ones of the validation split in canonical order."""
    run_temperature: float = bounded(0.0, least=0, most=100)
    """Sampling temperature there; 0: greedy, the most likely token."""
    run_share: float = bounded(0.25, least=0, most=1)
    """Share of actor.max_episodes that an actor plays of them at once, instead of as many training episodes; at least
    one."""
    run_timeout_s: float = bounded(600.0, least=1)
    """How long their results are waited for, since the first one was at an actor. Those that came by then are shown;
    with fewer than 95 % the evaluation is neither the best one nor counted for patience."""
    patience: int | None = bounded(None, least=1)
    """The run ends early after so many evaluations in a row that were no better than the best one; None: never. Those
    that are begun before the policy learns, in learner.value_warmup_updates, are not counted."""

    @property
    def inside_run(self) -> bool:
        """Whether evaluations inside of the run are wanted."""
        return self.every_updates is not None or self.every_minutes is not None


@dataclass
class DemonstrationsConfig:
    """Episodes that `impala-llm demonstrate` records, see docs/demonstrations.md."""

    dir: str = "outputs/${run.name}-demonstrations"
    """Folder of the demonstrations; made if it is missing. What it holds already is not recorded again."""
    player: str = one_of("script", "policy", "person")
    """Who plays: script (the environment's own, such as the shop's scripted shopper) | policy (model.path, through the
    engine, at engine.temperature) | person (at the terminal)."""
    num_episodes: int = bounded(1000, least=1)
    """Episodes of the folder."""
    split: str = one_of("train", "validation", "test")
    """Tasks to play, in a random order that run.seed draws."""
    noise: float = bounded(0.5, least=0, most=1)
    """script: how sloppily it plays, from 0 (as well as it can) to 1."""
    num_catalogues: int = bounded(1, least=1)
    """WebShop: so many synthetic catalogues, of the seeds from env.webshop.catalogue_seed on, with equally many
    episodes of each. A policy that has seen one learns it by heart."""


@dataclass
class SftConfig:
    """Warm start of model.path on demonstrations by `impala-llm sft`. What is not here, such as precision, the budget
    of micro-batches, the clip and checkpoints, is as in `learner`. See docs/demonstrations.md."""

    data: list[str] = field(default_factory=list)
    """Folders of demonstrations. Empty: demonstrations.dir, recorded first where there are too few."""
    dir: str = "outputs/${run.name}-sft"
    """Folder of the result, `policy` in it, and of metrics and checkpoints; made if it is missing."""
    min_score: float = bounded(0.0, least=0, most=1)
    """Demonstrations with a lower score are left out."""
    held_out_tasks: int = bounded(32, least=0)
    """Tasks, a tenth of all at most, whose demonstrations are not learned from but measured on."""
    held_out_every: int = bounded(50, least=1)
    """Updates between two such measurements; there is also one at the start and one at the end."""
    epochs: int = bounded(1, least=1, most=1000)
    """Passes over the demonstrations, each in an order of its own."""
    batch_size: int = bounded(8, least=1)
    """Demonstrations of an update."""
    max_updates: int | None = bounded(None, least=1)
    """End after so many updates; None: after `epochs`."""
    max_minutes: float | None = bounded(None, least=0.001)
    """End after this much wall-clock time, restarts included. The learning rate decays towards whichever end comes
    first, as learner.decay says."""
    learning_rate: float = bounded(3e-4, least=0, most=1)
    """Learning rate of the policy: the largest, after the warm-up."""
    value_learning_rate: float = bounded(1e-3, least=0, most=1)
    """Learning rate of the value head, see learner.value_learning_rate."""
    warmup_updates: int = bounded(5, least=0)
    """Updates in which the learning rates rise from 0."""
    observation_weight: float = bounded(0.0, least=0, most=100)
    """Weight of the tokens that the policy reads in the loss, where those that it says have 1. 0: it learns from its
    completions alone."""
    value_coef: float = bounded(0.5, least=0, most=100)
    """Weight of the value head's squared error against the returns of the demonstrations, where algorithm.credit uses
    a value head; else, and with 0, it is not fitted."""


@dataclass
class Config:
    run: RunConfig = field(default_factory=RunConfig)
    env: EnvConfig = field(default_factory=EnvConfig)
    agent: AgentConfig = field(default_factory=AgentConfig)
    engine: EngineConfig = field(default_factory=EngineConfig)
    model: ModelConfig = field(default_factory=ModelConfig)
    actor: ActorConfig = field(default_factory=ActorConfig)
    algorithm: AlgorithmConfig = field(default_factory=AlgorithmConfig)
    learner: LearnerConfig = field(default_factory=LearnerConfig)
    replay: ReplayConfig = field(default_factory=ReplayConfig)
    pipeline: PipelineConfig = field(default_factory=PipelineConfig)
    evaluation: EvaluationConfig = field(default_factory=EvaluationConfig)
    demonstrations: DemonstrationsConfig = field(default_factory=DemonstrationsConfig)
    sft: SftConfig = field(default_factory=SftConfig)

    @property
    def plays_shop(self) -> bool:
        """Whether the episodes are of WebShop. An agent has its own tasks."""
        return self.env.name == "webshop" and not self.agent.is_set

    @property
    def num_actors(self) -> int:
        """Actor processes on this host; where none are set and no GPUs were counted (`gpus.with_num_actors`): 1."""
        return 1 if self.actor.num_actors is None else self.actor.num_actors

    @property
    def publishes_bfloat16(self) -> bool:
        """Whether the weights for engines lie in bfloat16 in shared memory, and not in the learner's float32."""
        return self.pipeline.weights_dtype == "engine" and self.engine.dtype == "bfloat16"

    @property
    def learner_processes_here(self) -> int:
        """Processes of the learner on this host: none where actors alone run, with a learner elsewhere."""
        is_here = self.pipeline.connect is None or self.pipeline.bind is not None
        return self.learner.num_processes if is_here else 0


def longest_record(config: Config) -> int:
    """Tokens of a trajectory at most."""
    longest = config.engine.max_length
    return longest if not config.agent.is_set else max(longest, config.agent.max_tokens or 4 * longest)


def other_models(config: Config) -> dict[str, str]:
    """Models that the learner loads beside the policy: setting -> path."""
    algorithm = config.algorithm
    paths = {
        "algorithm.reference": algorithm.reference if algorithm.uses_reference else None,
        "algorithm.credit.teacher": getattr(algorithm.credit, "teacher", None),
    }
    return {key: path for key, path in paths.items() if path is not None}


def model_directory(path: str) -> Path | None:
    """The Hugging Face directory that a value of `model.path` means; None if there is none (or it is `scratch`)."""
    for candidate in (Path(path).expanduser(), ASSETS / path):
        if os.path.isfile(candidate / "config.json"):  # which is False, and no error, for a name that is too long
            return candidate.resolve()
    return None


def holds_run(folder: Path) -> bool:
    """Whether a run has written metrics or checkpoints into this folder: a second one would be mixed with it."""
    metrics = folder / "tensorboard" / "metrics.jsonl"
    return metrics.is_file() and metrics.stat().st_size > 0 or any((folder / "checkpoints").glob("update-*"))


def written(value: object) -> str:
    """A value as the command line has it."""
    if isinstance(value, list):
        return f"[{','.join(map(written, value))}]"
    return {"None": "null", "True": "true", "False": "false"}.get(str(value), str(value))


def leaves(node: object, prefix: str = "") -> Iterator[tuple[str, object]]:
    """All settings as (dotted key, value)."""
    assert is_dataclass(node)
    for f in fields(node):
        value = getattr(node, f.name)
        if is_dataclass(value):
            yield from leaves(value, f"{prefix}{f.name}.")
        else:
            yield prefix + f.name, value
