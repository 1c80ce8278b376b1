"""Settings that others keep from having an effect: refused where they are given, and not shown by a dry run."""

import sys
from pathlib import Path

import pytest
from omegaconf import OmegaConf

from impala_llm.cli import main
from impala_llm.config import ConfigError, load, to_yaml
from impala_llm.demonstrate import record
from impala_llm.pipeline.network.keys import make_keys
from impala_llm.settings import Config, leaves
from impala_llm.sft import WarmStart
from tests.test_sft import signal_handlers_kept, words

BY_TOKEN = ("algorithm.credit.granularity=token",)
DATA = Path(__file__).parents[1] / "fixtures" / "webshop" / "data"
FILES = (f"env.webshop.items={DATA}/items_shuffle.json", f"env.webshop.attributes={DATA}/items_ins_v2.json")
CLIP = ["algorithm.loss.clip_low", "algorithm.loss.clip_high", "algorithm.loss.dual_clip"]
RUNNING = ("engine=sglang", "engine.urls=['http://a:1']")


@pytest.mark.parametrize(
    ("word", "reason"),
    [
        ("engine.memory_fraction=0.5", "with engine.name=torch: set engine=sglang"),
        ("engine.server_args=[--tp]", "with engine.name=torch"),
        ("engine.start_timeout_s=5", "with engine.name=torch"),
        ("engine.request_timeout_s=5", "with engine.name=torch"),
        ("agent.processes=4", "without an agent: set agent.name or agent.command"),
        ("agent.tasks=tasks.jsonl", "without an agent"),
        ("replay.uniform_floor=0.1", "with replay.max_replays=1 and no priorities, where"),
        ("replay.advantage_exponent=0.6", "with replay.max_replays=1, where an episode leaves the buffer before"),
        ("algorithm.reject_low=0.9", "with algorithm.reject=none"),
        ("env.webshop.num_products=10", "with env.name=parrot: set env=webshop"),
        ("evaluation.run_tasks=8", "without evaluations inside of the run"),
        ("evaluation.run_share=0.5", "without evaluations inside of the run"),
        ("evaluation.unseen_seed=3", "with env.name=parrot: set env=webshop"),
        ("model.scratch.num_layers=3", "with model.path=tiny_shopper"),
    ],
)
def test_a_setting_without_effect_is_refused(word: str, reason: str) -> None:
    policy = ["model=tiny_shopper"] if word.startswith("model.scratch") else []
    with pytest.raises(ConfigError) as caught:
        load(["experiment=toy", *policy, word])
    assert reason in str(caught.value)
    assert word.partition("=")[0] in str(caught.value)


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        (["algorithm=dpo"], "with algorithm.credit=preference, whose .* any scale of rewards: set algorithm"),
        (
            ["algorithm=topr", "algorithm.credit.normalize_std=true"],
            "with algorithm.credit.normalize_std=true, .* of rewards: set algorithm.credit.normalize_std=false",
        ),
    ],
)
def test_a_scale_of_rewards_is_refused_where_advantages_have_none(words: list[str], reason: str) -> None:
    with pytest.raises(ConfigError, match=f"normalize_reward=true has no effect {reason}"):
        load(["experiment=toy", *words, "algorithm.normalize_reward=true"])
    load(["experiment=toy", "algorithm=topr", "algorithm.normalize_reward=true"])


OWN = """
from dataclasses import dataclass
from impala_llm.algorithms.losses import Reinforce
from impala_llm.algorithms.vtrace import VTrace

@dataclass
class MyVTrace(VTrace):
    pass

@dataclass
class MyReinforce(Reinforce):
    pass
"""


@pytest.fixture
def own(user_folder: Path) -> None:
    """A module of the user's own, with parts that derive from packaged ones."""
    (user_folder / "mine.py").write_text(OWN)


@pytest.mark.parametrize("name", ["vtrace", "impala_llm.algorithms.vtrace:VTrace", "mine:MyVTrace"])
def test_an_option_without_effect_is_refused_under_every_name_of_a_credit(own: None, name: str) -> None:
    words = ["model=scratch", f"algorithm.credit={name}", "algorithm.credit.turn_ratio=product"]
    assert load(words)
    with pytest.raises(
        ConfigError, match=r"turn_ratio=product has no effect with algorithm\.credit\.granularity=token"
    ):
        load([*words, *BY_TOKEN])


@pytest.mark.parametrize("name", ["reinforce", "impala_llm.algorithms.losses:Reinforce", "mine:MyReinforce"])
def test_a_loss_is_what_it_is_under_every_name(own: None, name: str) -> None:
    assert load(["model=scratch", "algorithm=dpo", f"algorithm.loss={name}"])


@pytest.mark.parametrize("name", ["impala_llm.engines:sglang_engine", "sglang"])
def test_settings_of_an_engine_go_with_every_name_of_it(name: str) -> None:
    words = ["model=scratch", f"engine.name={name}"]
    assert load([*words, "engine.memory_fraction=0.5"]).engine.memory_fraction == 0.5
    with pytest.raises(ConfigError, match=r"engine\.urls has 'nowhere'"):
        load([*words, "engine.urls=[nowhere]"])


@pytest.mark.parametrize(
    ("word", "said"),
    [
        ("env.webshop={num_products:10}", "env.webshop.num_products=10 has no effect with env.name=parrot"),
        ("model.lora={alpha: 64}", "model.lora.alpha=64 has no effect with model.lora.rank=0"),
        ("agent={num_tasks:50}", "agent.num_tasks=50 has no effect without an agent"),
    ],
)
def test_a_setting_without_effect_is_refused_in_a_section_that_is_given_as_a_whole(word: str, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        load(["experiment=toy", word])
    load(["experiment=toy", "env.webshop={num_products:1000}", "agent={name: null, num_tasks: 1000}"])


def test_it_is_taken_with_the_setting_that_gives_it_one() -> None:
    load(["experiment=toy", "replay.uniform_floor=0.1", "replay=prioritised"])
    load(["experiment=toy", "algorithm.reject_low=0.9", "algorithm.reject=token"])
    load(["experiment=toy", "evaluation.run_tasks=8", "evaluation.run_share=0.5", "evaluation.every_updates=5"])
    load(["experiment=toy", "env=webshop", "env.webshop.num_products=10", "evaluation.unseen_seed=3"])


@pytest.mark.parametrize(
    ("words", "key"),
    [
        (["algorithm=ppo", "algorithm.reject_low=0.9"], "algorithm.reject_low"),
        (["algorithm=dpo", "algorithm.reject_low=0.9"], "algorithm.reject_low"),
        (["learner.cpu_offload=true"], "learner.cpu_offload"),
        (["learner.cpu_offload=true", "learner.tensor_parallel=2"], "learner.cpu_offload"),
        (["algorithm=vtrace", *BY_TOKEN, "algorithm.credit.turn_ratio=product"], "algorithm.credit.turn_ratio"),
        (["model.device=cpu", "model.cuda_products=tf32"], "model.cuda_products"),
        ([*RUNNING, "engine.memory_fraction=0.5"], "engine.memory_fraction"),
        ([*RUNNING, "engine.server_args=[--tp,2]"], "engine.server_args"),
        ([*RUNNING, f"engine.python={sys.executable}"], "engine.python"),
        ([*RUNNING, "engine.tensor_parallel=2"], "engine.tensor_parallel"),
        ([*RUNNING, "engine.prefix_cache=true"], "engine.prefix_cache"),
        (["env.webshop.script_speaks=true", "env.webshop.catalogue=easy"], "env.webshop.script_speaks"),
        ([*FILES, "env.webshop.catalogue=hard", "env.webshop.script_speaks=true"], "env.webshop.script_speaks"),
        (["replay.target_ess=0.5"], "replay.target_ess"),
        (["replay.target_ess=0.5", "replay.max_replays=2"], "replay.target_ess"),
        (["evaluation.patience=3"], "evaluation.patience"),
        (["algorithm=group_relative", "learner.value_learning_rate=0.5"], "learner.value_learning_rate"),
        (["algorithm=group_relative", "model.value_hidden_size=8"], "model.value_hidden_size"),
        (["agent.command=echo", "env=corridor", "env.args.num_tasks=9"], "env"),
        (["agent.command=echo", "env=tasks", "env.args.file=a.jsonl"], "env"),
    ],
)
def test_each_way_that_the_refusal_of_a_setting_names_is_taken(words: list[str], key: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load(["model=scratch", *words])
    assert key in str(caught.value)
    _, _, ways = str(caught.value).partition(": set ")
    for way in ways.split(", for instance, or "):
        set_so = [] if way == "no env" else way.split(" and ")
        given = dict(word.split("=", 1) for word in [*words, *set_so] if set_so or not word.startswith("env"))
        load(["model=scratch", *("=".join(word) for word in given.items())])


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (
            ["env=tasks", "env.args.file=a.jsonl"],
            r"env\.args\.file=a\.jsonl has no effect with an agent, .*=null, .*no env",
        ),
        (["env=corridor", "env.webshop.goals=human"], r"env\.webshop\.goals=human has no effect with an agent"),
        (["env.name=corridor"], r"env\.name=corridor has no effect with an agent.*env\.name=webshop"),
        (["env=corridor", "env.args.num_tasks=9"], r"env\.args\.num_tasks=9 has no effect with an agent"),
    ],
)
def test_an_agent_plays_no_environment(words: list[str], said: str) -> None:
    agent = ["agent.command=echo", "model=scratch"]
    with pytest.raises(ConfigError, match=said):
        load([*agent, *words])
    assert not OmegaConf.create(to_yaml(load([*agent, "env=parrot"]), only_in_force=True)).env


OF_THE_HEAD = {"learner.value_learning_rate": "0.5", "model.value_hidden_size": "8"}


@pytest.mark.parametrize("key", OF_THE_HEAD)
def test_a_value_head_that_nothing_trains_has_no_settings(key: str) -> None:
    words = ["model=scratch", "algorithm.group_size=2", f"{key}={OF_THE_HEAD[key]}"]
    load([*words, "algorithm.credit=gae"])
    with pytest.raises(ConfigError, match=rf"{key}=\S+ has no effect with algorithm\.credit=rloo, which has no value"):
        load([*words, "algorithm.credit=rloo"])


def test_a_dry_run_shows_no_settings_of_a_value_head_that_nothing_trains() -> None:
    hidden = {*OF_THE_HEAD, "model.value_trunk_gradient", "learner.value_warmup_updates"}
    for credit, expected in (("rloo", set[str]()), ("gae", hidden)):
        config = load(["model=scratch", "algorithm.group_size=2", f"algorithm.credit={credit}"])
        shown = OmegaConf.create(to_yaml(config, only_in_force=True))
        assert {key for key in hidden if OmegaConf.select(shown, key, default="no") != "no"} == expected


def test_a_fitted_value_head_is_kept_by_its_width_also_where_nothing_trains_it() -> None:
    load(["model=tiny_shopper", "algorithm=group_relative", "model.value_hidden_size=8"])


def test_what_evaluate_reads_alone_is_taken_and_not_shown() -> None:
    """The table at a run's end has all of it but the policy that the run began as."""
    of_a_table = {"split": "train", "num_tasks": 9, "baselines": False, "num_examples": 1, "unseen_seed": 3}
    given = ["experiment=quickstart", *(f"evaluation.{key}={value}" for key, value in of_a_table.items())]
    config = load([*given, "evaluation.start=tiny_shopper", "evaluation.before_and_after=false"])
    assert not {"start", *of_a_table} & set(OmegaConf.create(to_yaml(config, only_in_force=True)).evaluation)
    config = load([*given, "evaluation.start=tiny_shopper", "evaluation.before_and_after=true"])
    shown = OmegaConf.create(to_yaml(config, only_in_force=True)).evaluation
    assert of_a_table.items() <= dict(shown).items() and "start" not in shown


def test_its_default_is_no_mistake() -> None:
    load(["experiment=toy", "agent.processes=2", "engine.request_timeout_s=300", "algorithm.reject_low=0.5"])


def test_uniform_draws_have_no_floor_and_nothing_to_correct() -> None:
    """The words are taken all the same: a comparison of samplers gives them to all of them."""
    given = ["experiment=toy", "replay.max_replays=2", "replay.uniform_floor=0.3", "replay.correction_exponent=1"]
    of_draws = {"uniform_floor", "correction_exponent"}
    assert not of_draws & set(OmegaConf.create(to_yaml(load(given), only_in_force=True)).replay)
    by_age = load([*given, "replay.recency_tau=8"])
    assert of_draws <= set(OmegaConf.create(to_yaml(by_age, only_in_force=True)).replay)


def test_an_agents_tasks_are_of_no_catalogue() -> None:
    with pytest.raises(ConfigError, match=r"evaluation\.unseen_seed=3 has no effect with an agent"):
        load(["agent.command=echo", "evaluation.unseen_seed=3"])


@pytest.mark.system
@pytest.mark.parametrize(
    ("given", "otherwise"),
    [
        (["engine=sglang", "engine.urls=['http://a:1']"], ["engine=torch"]),
        (["engine=sglang", "engine.memory_fraction=0.5"], ["engine.urls=['http://a:1']"]),
        (["model.device=auto", "model.cuda_products=tf32"], ["model.device=cpu"]),
        (["algorithm=vtrace", "algorithm.credit.turn_ratio=product"], BY_TOKEN),
        (["evaluation.every_updates=5", "evaluation.patience=3"], ["evaluation.every_updates=null"]),
        (
            ["replay.max_replays=2", "replay.max_replayed_share=0.5", "replay.target_ess=0.3"],
            ["replay.max_replayed_share=null"],
        ),
        (["agent.command=echo", "agent.num_tasks=50", "agent.processes=4"], ["agent.command=null"]),
        (["model.lora.rank=8", "model.lora.alpha=64"], ["model.lora.rank=0"]),
        (["algorithm.kl_coef=0.1", "algorithm.reference=tiny_shopper"], ["algorithm.kl_coef=0"]),
        (["algorithm.entropy_target=0.5", "algorithm.entropy_rate=0.1"], ["algorithm.entropy_target=null"]),
        (["learner.checkpoint_every=5"], ["learner.checkpoints_kept=0"]),
    ],
)
def test_what_a_file_has_waits_where_a_word_takes_its_effect(
    given: list[str], otherwise: list[str], tmp_path: Path
) -> None:
    """Evaluating a run of SGLang with the embedded engine takes one word, and what that run keeps loads again."""
    file = tmp_path / "config.yaml"
    file.write_text(to_yaml(load(given)))
    config = load([f"experiment={file}", *otherwise])
    file.write_text(to_yaml(config))
    assert load([f"experiment={file}"]) == config
    with pytest.raises(ConfigError, match="has no effect"):
        load([f"experiment={file}", *given[-1:], *otherwise])


@pytest.mark.parametrize(
    "word",
    [
        *("algorithm.normalize_reward=true", "algorithm.overlong_tokens=20", "algorithm.overlong_penalty=2"),
        *("algorithm.reward_kl_coef=0.5", "algorithm.credit.discount=0.9"),
    ],
)
def test_a_teacher_sees_no_reward_that_could_be_shaped(word: str, tmp_path: Path) -> None:
    teaching = ["experiment=toy", "algorithm.group_size=1"]
    teaching += ["algorithm.credit=distillation", "algorithm.credit.teacher_context=hint"]
    with pytest.raises(ConfigError, match="has no effect with algorithm.credit=distillation, .* no reward: set alg"):
        load([*teaching, word])
    file = tmp_path / "config.yaml"
    file.write_text(to_yaml(load(["experiment=toy", "algorithm.credit=rloo", "algorithm.overlong_tokens=20", word])))
    config = load([f"experiment={file}", *teaching[1:]])
    assert not config.algorithm.uses_reference
    key = word.partition("=")[0]
    assert OmegaConf.select(OmegaConf.create(to_yaml(config, only_in_force=True)), key) is None


def test_a_reference_of_a_file_that_nothing_asks_is_not_looked_for(tmp_path: Path) -> None:
    file = tmp_path / "config.yaml"
    file.write_text(f"algorithm: {{kl_coef: 0.1, reference: {tmp_path}/gone}}\n")
    load([f"experiment={file}", "algorithm.kl_coef=0"])
    with pytest.raises(ConfigError, match="gone does not exist"):
        load([f"experiment={file}"])


def test_an_engine_of_the_users_own_may_read_every_setting_of_engines(user_folder: Path) -> None:
    (user_folder / "own_servers.py").write_text(
        "from impala_llm.engines import sglang_engine\n"
        "def engine(setup):\n"
        "    return sglang_engine(setup)\n"
    )  # fmt: skip
    config = load(["engine=own_servers:engine", "engine.server_args=[--enable-x]", "engine.urls=['http://a:1']"])
    shown = OmegaConf.create(to_yaml(config, only_in_force=True))
    assert (list(shown.engine.server_args), list(shown.engine.urls)) == (["--enable-x"], ["http://a:1"])


def test_what_a_preset_sets_gives_way_to_the_part_that_is_chosen_beside_it() -> None:
    config = load(["experiment=quickstart", "env=corridor", "model=scratch", "evaluation.unseen_seed=null"])
    assert config.env.webshop.success_bonus == 1.0
    assert "webshop" not in OmegaConf.create(to_yaml(config, only_in_force=True)).env


@pytest.mark.parametrize("other", ["env=parrot", "agent.command=echo"])
def test_files_of_a_shop_that_nobody_plays_are_not_looked_for(other: str, tmp_path: Path) -> None:
    file = tmp_path / "settings.yaml"
    file.write_text(f"env: {{webshop: {{items: {tmp_path}/gone, human: {tmp_path}/gone}}}}\n")
    load([f"experiment={file}", other])
    with pytest.raises(ConfigError, match="human=.*gone is not a file"):
        load([f"experiment={file}", "env=webshop"])


def test_catalogues_of_a_presets_demonstrations_wait_for_whoever_records(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["experiment=smollm2", "model=scratch", "env=corridor"]
    assert load(words).demonstrations.num_catalogues == 40
    assert main(["demonstrate", *words, f"demonstrations.dir={tmp_path}/new"]) == 2
    said = capsys.readouterr().err
    assert "demonstrations.num_catalogues=40: only WebShop" in said and "set demonstrations.num_catalogues=1" in said


def test_a_dry_run_shows_the_settings_that_have_an_effect() -> None:
    shown = OmegaConf.create(to_yaml(load(["experiment=toy"]), only_in_force=True))
    assert dict(shown.agent) == {"name": None, "command": None}
    assert dict(shown.model.lora) == {"rank": 0}
    assert dict(shown.model.scratch) == {"hidden_size": 128, "num_layers": 2}
    assert not {"webshop"} & set(shown.env)
    assert not {"urls", "transfer", "request_timeout_s"} & set(shown.engine)
    assert not {"reject_low", "overlong_penalty", "reference"} & set(shown.algorithm)
    assert not {"sft", "demonstrations"} & set(shown)
    shop = OmegaConf.create(to_yaml(load(["experiment=quickstart"]), only_in_force=True))
    assert shop.env.webshop.catalogue == "hard"
    assert "scratch" not in shop.model


@pytest.mark.parametrize(
    ("words", "hidden", "otherwise"),
    [
        (["algorithm=vtrace", *BY_TOKEN], ["algorithm.credit.turn_ratio"], ["algorithm=vtrace"]),
        (["model.device=cpu"], ["model.cuda_products"], ["model.device=auto"]),
        (RUNNING, ["engine.server_args", "engine.python", "engine.tensor_parallel"], ["engine=sglang"]),
        (["env.webshop.catalogue=easy"], ["env.webshop.script_speaks"], ["env.webshop.catalogue=hard"]),
        (FILES, ["env.webshop.script_speaks", "env.webshop.script_speaks_of_prices"], ["env.webshop.catalogue=hard"]),
        ([], ["env.args"], ["env=corridor"]),
        ([], ["pipeline.keys"], []),
        ([], ["engine.options"], []),
        (["algorithm=ppo"], ["algorithm.refill"], ["algorithm=group_relative"]),
        (["algorithm=icepop"], CLIP, ["algorithm=icepop", "learner.minibatches=2"]),
        ([], ["replay.target_ess"], ["replay.max_replays=2", "replay.max_replayed_share=0.5"]),
        ([], ["evaluation.patience"], ["evaluation.every_updates=5"]),
    ],
)
def test_a_dry_run_hides_the_default_of_what_others_make_idle(
    words: list[str], hidden: list[str], otherwise: list[str]
) -> None:
    def shown(*words: str) -> set[str]:
        settings = OmegaConf.create(to_yaml(load(["model=scratch", *words]), only_in_force=True))
        return {key for key in hidden if OmegaConf.select(settings, key, default="missing") != "missing"}

    assert not shown(*words)
    assert not otherwise or shown(*otherwise) == set(hidden)


def test_keys_of_hosts_are_refused_where_there_is_no_other_host(tmp_path: Path) -> None:
    make_keys(tmp_path / "keys")
    keys = f"pipeline.keys={tmp_path / 'keys'}"
    with pytest.raises(ConfigError, match="pipeline.keys=.* has no effect without pipeline.bind and pipeline.connect"):
        load(["model=scratch", keys])
    shown = OmegaConf.create(to_yaml(load(["model=scratch", keys, "pipeline.bind=tcp://0.0.0.0:7400"]), True))
    assert shown.pipeline["keys"] == str(tmp_path / "keys")


def test_the_settings_that_a_run_keeps_are_all_of_them() -> None:
    kept = OmegaConf.create(to_yaml(load(["experiment=toy"])))
    for key, _ in leaves(Config()):
        assert OmegaConf.select(kept, key, default="missing") != "missing", key


def test_a_warm_start_without_checkpoints_writes_its_last_one_alone(
    tmp_path: Path, tiny_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`learner.checkpoint_every` has no effect in it either."""
    written_at = list[int]()
    write = WarmStart.checkpoint

    def noted(warm: WarmStart) -> None:
        written_at.append(warm.update)
        write(warm)

    monkeypatch.setattr(WarmStart, "checkpoint", noted)
    few = ("demonstrations.num_episodes=12", "sft.max_updates=3", "sft.epochs=4", "learner.checkpoint_every=1")
    config = load(words(tmp_path, tiny_model, *few))
    record(config)
    file = tmp_path / "settings.yaml"
    file.write_text(to_yaml(config))
    with signal_handlers_kept():
        assert main(["sft", "--config", str(file), "learner.checkpoints_kept=0"]) == 0
    assert written_at == [3]
