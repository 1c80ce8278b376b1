"""Credits and losses are chosen by name, with options of their own; your own ones by import path."""

import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from impala_llm.algorithms.advantages import GroupRelative
from impala_llm.algorithms.interface import credit, loss
from impala_llm.algorithms.losses import GSPO, PPOClip, TruncatedIS
from impala_llm.algorithms.registry import CREDITS, LOSSES
from impala_llm.algorithms.vtrace import GAE, VTrace
from impala_llm.config import ConfigError, load, to_yaml

DOCS = Path(__file__).parents[2] / "docs" / "algorithms.md"
OWN = """
from dataclasses import dataclass
from impala_llm.algorithms.interface import Credit, Prepared, Worth
from impala_llm.algorithms.losses import PPOClip, Reinforce

@dataclass
class PlainReturn(Credit):
    metrics = {"return_mean": "mean return of an episode"}
    scale: float = 1.0

    def prepare(self, episodes):
        count = len(episodes.trajectories)
        return Prepared(self.scale * episodes.returns, [("credit/return_mean", float(episodes.returns.mean()), count)])

    def __call__(self, scored, batch, prepared):
        return Worth(prepared[scored.segment_ids])

@dataclass
class Clashing(MyLoss):
    metrics = {"policy": "mine"}

@dataclass
class Unasked(MyLoss):
    def measure(self, scored, advantages):
        return scored.log_ratio

    def batch_limit(self, measured, sum_over_ranks):
        return 1.0

@dataclass
class Flagged(MyLoss):
    of_batch = True

    def problems(self, algorithm):
        return []  # its own, beside ours

@dataclass
class Clipped(Reinforce):
    def __call__(self, scored, advantages):
        return PPOClip()(scored, advantages)

class NoLoss:
    pass

@dataclass
class Raising(MyLoss):
    def problems(self, algorithm):
        return [algorithm.no_such_setting]

@dataclass
class Exiting(MyLoss):
    def problems(self, algorithm):
        raise SystemExit(3)

@dataclass
class Interrupted(MyLoss):
    def problems(self, algorithm):
        raise KeyboardInterrupt

@dataclass
class Silent(MyLoss):
    def problems(self, algorithm):
        pass

@dataclass
class Worded(PlainReturn):
    def problems(self, algorithm):
        return "bad idea"

@dataclass
class Sentences(PlainReturn):
    def problems(self, algorithm):
        return ("one sentence", "another one")

@dataclass
class Misdefined(MyLoss):
    cap: float = "two"

class Undecorated(MyLoss):
    margin: float = 0.5

class Unfinished(Loss):
    pass

@dataclass
class Lone(MyLoss):
    def __call__(self, scored):
        return None

@dataclass
class Required(Loss):
    margin: float

    def __call__(self, scored, advantages):
        return None

an_instance = MyLoss()
"""


@pytest.fixture
def own(user_folder: Path) -> Path:
    """A folder of the user's with parts of their own, the documentation's among them, as the current directory."""
    [example] = re.findall(r"```python\n(from dataclasses.*?)```", DOCS.read_text(), re.DOTALL)
    (user_folder / "my_parts.py").write_text(example + OWN)
    return user_folder


def test_a_preset_names_a_credit_and_a_loss() -> None:
    algorithm = load(["model=scratch", "algorithm=vtrace", "algorithm.loss.clip_low=0.1"]).algorithm
    assert algorithm.credit == VTrace(name="vtrace") and algorithm.loss == PPOClip(name="ppo_clip", clip_low=0.1)


@pytest.mark.parametrize("name", CREDITS)
def test_every_credit_can_be_named(name: str) -> None:
    needs = {
        "preference": ["algorithm=dpo"],
        "distillation": ["algorithm.credit.teacher_context=hint"],
    }.get(name, ["algorithm.group_size=2"])
    assert type(load(["model=scratch", *needs, f"algorithm.credit={name}"]).algorithm.credit) is CREDITS[name]


@pytest.mark.parametrize("name", LOSSES)
def test_every_loss_can_be_named(name: str) -> None:
    found = load(["model=scratch", "algorithm=group_relative", f"algorithm.loss={name}"]).algorithm.loss
    assert type(found) is LOSSES[name] and found.name == name


@pytest.mark.parametrize("name", ["rloo", "my_parts:MyGroupCredit"])
def test_a_credit_that_compares_a_group_needs_one_of_two(own: Path, name: str) -> None:
    words = ["model=scratch", f"algorithm.credit={name}"]
    with pytest.raises(ConfigError, match=f"group_size=1 leaves algorithm.credit={name} nothing to compare"):
        load([*words, "algorithm.group_size=1"])
    load([*words, "algorithm.group_size=2"])


def test_options_of_a_part_that_was_replaced_are_left_behind() -> None:
    own = ["experiment=toy", "algorithm.group_size=1"]
    assert load(["experiment=toy"]).algorithm.credit.normalize_std  # type: ignore[attr-defined]
    assert load([*own, "algorithm.credit=gae"]).algorithm.credit == GAE(name="gae")
    gspo = ["model=scratch", "algorithm=group_relative", "algorithm.loss=gspo"]
    assert load([*gspo, "algorithm.loss.dual_clip=2"]).algorithm.loss == GSPO(name="gspo", dual_clip=2.0)


def test_options_of_a_presets_part_that_a_file_replaces_are_left_behind(tmp_path: Path) -> None:
    preset = "defaults: [override /algorithm: group_relative_by_std]\n"
    file = tmp_path / "mine.yaml"
    words = ["model=scratch", f"experiment={file}"]
    file.write_text(preset + "algorithm: {credit: {name: rloo, discount: 0.5}}")
    assert load(words).algorithm.credit == CREDITS["rloo"](name="rloo", discount=0.5)
    assert load([*words, "algorithm=group_relative_by_std"]).algorithm.credit.normalize_std  # type: ignore[attr-defined]
    for same in ("{name: group_relative, discount: 0.5}", "{discount: 0.5}"):
        file.write_text(f"{preset}algorithm: {{credit: {same}}}")
        assert load(words).algorithm.credit == GroupRelative(name="group_relative", normalize_std=True, discount=0.5)
    file.write_text(preset + "algorithm: {credit: {name: rloo, normalize_std: true}}")
    with pytest.raises(ConfigError, match="normalize_std=True is no option of algorithm.credit=rloo"):
        load(words)


@pytest.mark.parametrize("name", ["decoupled_ppo", "impala_llm.algorithms.losses:DecoupledPPO"])
def test_options_of_a_presets_part_stay_under_any_name_of_the_same_part(tmp_path: Path, name: str) -> None:
    file = tmp_path / "mine.yaml"
    words = ["model=scratch", f"experiment={file}"]
    file.write_text("defaults: [{override /algorithm: icepop}]\n")
    expected = load(words).algorithm.loss
    assert expected.proximal == "recomputed"  # type: ignore[attr-defined]
    assert load([*words, f"algorithm.loss={name}"]).algorithm.loss == expected
    for own in (f"{{name: '{name}'}}", f"'{name}'"):
        file.write_text(f"defaults: [{{override /algorithm: icepop}}]\nalgorithm: {{loss: {own}}}")
        assert load(words).algorithm.loss == expected
    file.write_text(f"algorithm: {{loss: {{name: '{name}', clip_low: 0.15}}}}")
    beside = load([*words, "algorithm=icepop"]).algorithm.loss
    assert (beside.clip_low, beside.proximal) == (0.15, "recomputed")  # type: ignore[attr-defined]


@pytest.mark.parametrize(("value", "said"), [("null", "null"), ("{name: null}", "null"), ("5", "5")])
def test_what_is_no_name_in_a_file_is_refused_as_it_stands_there(tmp_path: Path, value: str, said: str) -> None:
    (tmp_path / "mine.yaml").write_text(f"algorithm: {{credit: {value}}}")
    with pytest.raises(ConfigError, match=f"^algorithm.credit={said} is not known: choose one of .*rloo"):
        load(["model=scratch", f"experiment={tmp_path}/mine.yaml"])


def test_all_unknown_keys_of_a_file_are_named_with_the_settings_they_may_be(tmp_path: Path) -> None:
    old = "advantage: gae, normalize_std: true, is_cap: 2, clip_low: 0.2, loss: ppo_clip, group_size: 4"
    (tmp_path / "old.yaml").write_text(f"algorithm: {{{old}}}\nlearner: {{lr: 1e-4}}")
    with pytest.raises(ConfigError) as caught:
        load(["model=scratch", f"experiment={tmp_path}/old.yaml"])
    said = str(caught.value)
    assert len(said.splitlines()) == 1 and f"{tmp_path}/old.yaml: 5 keys are unknown" in said
    now = {
        "algorithm.advantage": "algorithm.credit",
        "algorithm.normalize_std": "algorithm.credit.normalize_std",
        "algorithm.is_cap": "algorithm.loss.cap",
        "algorithm.clip_low": "algorithm.loss.clip_low",
        "learner.lr": "learner.learning_rate",
    }
    for key, name in now.items():
        assert f"{key} (did you mean {name}?)" in said
    assert "group_size" not in said


@pytest.mark.parametrize(("register", "parts"), [(credit, CREDITS), (loss, LOSSES)])
def test_a_short_name_is_of_one_class(
    register: Callable[[str], Callable[[type], type]], parts: dict[str, type], monkeypatch: pytest.MonkeyPatch
) -> None:
    name, taken = next(iter(parts.items()))
    with pytest.raises(ValueError, match=f"={name} is .*{taken.__qualname__} already: give Another another name"):
        register(name)(type("Another", (taken,), {}))
    assert parts[name] is taken
    monkeypatch.setitem(parts, name, taken)
    anew = type(taken.__name__, (taken,), {"__module__": taken.__module__})
    assert register(name)(anew) is anew is parts[name], "as a notebook's cell does that runs again"


def test_what_is_printed_is_in_force_and_loads_again(tmp_path: Path) -> None:
    config = load(["model=scratch", "algorithm=group_relative", "algorithm.loss.cap=2", "run.dir=x"])
    text = to_yaml(config)
    assert "rho_bar" not in text and "clip_low" not in text and "normalize_std: false" in text
    (tmp_path / "saved.yaml").write_text(text)
    assert load([f"experiment={tmp_path}/saved.yaml"]) == config
    again = load([f"experiment={tmp_path}/saved.yaml", "algorithm.loss.level=sequence"]).algorithm.loss
    assert again == TruncatedIS(name="truncated_is", cap=2.0, level="sequence")


def test_a_name_alone_and_a_name_with_options_are_settings_of_files_and_words(tmp_path: Path) -> None:
    saved = tmp_path / "saved.yaml"
    saved.write_text("algorithm: {credit: rloo, loss: gspo, group_size: 4}")
    algorithm = load(["model=scratch", f"experiment={saved}"]).algorithm
    assert (algorithm.credit.name, algorithm.loss) == ("rloo", GSPO(name="gspo"))
    word = "algorithm.loss={name: truncated_is, cap: 3}"
    assert load(["model=scratch", word]).algorithm.loss == TruncatedIS(name="truncated_is", cap=3.0)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["algorithm.loss=ppo_clp"], ["algorithm.loss=ppo_clp", "did you mean ppo_clip", "truncated_is"]),
        (["algorithm.credit=gea"], ["algorithm.credit=gea", "did you mean gae"]),
        (
            ["algorithm=ppo", "algorithm.loss.clip_lo=1"],
            ["algorithm.loss.clip_lo=1", "no option", "algorithm.loss.clip_low?"],
        ),
        (
            ["algorithm=ppo", "algorithm.loss.cap=1"],
            ["algorithm.loss.cap=1", "algorithm.loss=ppo_clip", "truncated_is"],
        ),
        (["algorithm=ppo", "algorithm.loss.cap=1"], ["leave it out, or set algorithm.loss=truncated_is"]),
        (
            ["algorithm=topr", "algorithm.loss.clip_hgh=0.3"],
            ["algorithm.loss.clip_hgh=0.3", "cispo", "ppo_clip have algorithm.loss.clip_high", "choose one of these"],
        ),
        (["algorithm.loss=PPO_CLIP"], ["algorithm.loss=PPO_CLIP", "did you mean ppo_clip?"]),
        (["algorithm.credit=GAE"], ["algorithm.credit=GAE", "did you mean gae?"]),
        (["engine.name=SGLang"], ["engine.name=SGLang", "did you mean sglang?"]),
        (["algorithm.loss=mine.A"], ["algorithm.loss=mine.A", "did you mean mine:A"]),
        (["algorithm.credit.rho_bar=1"], ["algorithm.credit.rho_bar=1", "algorithm.credit=gae", "vtrace"]),
        (["algorithm.loss=reinforce", "algorithm.loss.foo=1"], ["algorithm.loss.foo=1", "no options"]),
        (["algorithm=ppo", "algorithm.loss.clip_low=2"], ["algorithm.loss.clip_low=2", "between 0 and 1"]),
        (["algorithm=ppo", "algorithm.loss.clip_low=-1"], ["algorithm.loss.clip_low=-1", "between 0 and 1"]),
        (["algorithm=ppo", "algorithm.loss.clip_low=low"], ["algorithm.loss.clip_low=low", "wrong type", "0.2"]),
        (["algorithm.credit.granularity=word"], ["algorithm.credit.granularity=word", "turn, token"]),
        (["algorithm.loss=gspo"], ["algorithm.credit=gae", "algorithm.loss=gspo", "group_relative"]),
        (["algorithm.clip_low=0.1"], ["algorithm.clip_low=0.1", "unknown key", "algorithm.loss.clip_low"]),
        (["algorithm.advantage=vtrace"], ["algorithm.advantage=vtrace", "unknown key", "algorithm.credit"]),
        (["algorithm=dpo", "algorithm.loss=ppo_clip"], ["algorithm.loss=ppo_clip", "preference", "reinforce"]),
        (
            ["algorithm=dpo", "algorithm.loss=my_parts:Clipped"],
            ["algorithm.loss=my_parts:Clipped", "preference", "set algorithm.loss=reinforce"],
        ),
        (["algorithm=dpo", "algorithm.aggregate=token_mean"], ["algorithm.aggregate=token_mean", "preference"]),
        (["algorithm=dpo", "learner.epochs=2"], ["learner.epochs=2", "preference", "learner.epochs=1"]),
        (["algorithm=dpo", "learner.minibatches=2"], ["learner.minibatches=2", "preference", "learner.minibatches=1"]),
        (["algorithm=dpo", "algorithm.reject=token"], ["algorithm.reject=token", "preference", "reject=none"]),
        (["algorithm=dpo", "algorithm.probability_limit=0.5"], ["algorithm.probability_limit=0.5", "limit=null"]),
        (["algorithm=dpo", "algorithm.whiten_advantages=true"], ["algorithm.whiten_advantages=true", "preference"]),
        (["algorithm.credit=distillation"], ["algorithm.credit=distillation", "algorithm.credit.teacher"]),
        (["algorithm.loss=nowhere:Loss"], ["algorithm.loss=nowhere:Loss", "cannot be imported", "PYTHONPATH"]),
        (["algorithm.loss=json:Loss"], ["algorithm.loss=json:Loss", "json has no Loss"]),
        (["algorithm.loss=my_parts:NoLoss"], ["algorithm.loss=my_parts:NoLoss", "interface.Loss"]),
        (["algorithm.loss=my_parts:PlainReturn"], ["algorithm.loss=my_parts:PlainReturn", "interface.Loss"]),
        (["algorithm.loss=my_parts:Undecorated"], ["its margin is an option only with @dataclass above it"]),
        (["algorithm.loss=my_parts:Unfinished"], ["algorithm.loss=my_parts:Unfinished", "it lacks __call__"]),
        (["algorithm.loss=my_parts:Lone"], ["its __call__ takes (scored), and is called with (scored, advantages)"]),
        (["algorithm.loss=my_parts:an_instance"], ["algorithm.loss=my_parts:an_instance is a MyLoss: name a class"]),
        (["algorithm.loss=my_parts:myloss"], ["my_parts has no myloss: did you mean my_parts:MyLoss?"]),
        (
            ["algorithm.loss=my_parts:MyLoss", "algorithm.loss.limit=abc"],
            ["algorithm.loss.limit=abc has the wrong type: a number is expected; the default is 2.0"],
        ),
        (
            ["algorithm.loss=my_parts:Misdefined"],
            ["my_parts:Misdefined cannot be used: the default 'two' of its option cap has the wrong type: a number is"],
        ),
        (["algorithm.loss=my_parts:Required"], ["algorithm.loss.margin is not set"]),
        (
            ["algorithm.credit=vtrace", "algorithm.credit.granularity=token", "algorithm.credit.turn_ratio=product"],
            ["algorithm.credit.turn_ratio=product", "algorithm.credit.granularity=turn"],
        ),
        (
            ["algorithm.loss=my_parts:Raising"],
            [
                "algorithm.loss=my_parts:Raising cannot be used: its problems() raised",
                "no_such_setting",
                "my_parts.py:",
            ],
        ),
        (["algorithm.loss=my_parts:Exiting"], ["my_parts:Exiting cannot be used: its problems() raised SystemExit: 3"]),
        (
            ["algorithm.loss=my_parts:Silent"],
            ["algorithm.loss=my_parts:Silent cannot be used: its problems() returned None", "list of sentences"],
        ),
        (
            ["algorithm.credit=my_parts:Worded"],
            ["algorithm.credit=my_parts:Worded cannot be used: its problems() returned 'bad idea'", "list of"],
        ),
        (["algorithm.loss=my_parts:Unasked"], ["class Unasked", "derive it from", "interface.BatchLoss"]),
        (["algorithm.loss=my_parts:Flagged"], ["class Flagged", "derive it from", "interface.BatchLoss"]),
        (["algorithm.loss=my_parts:MyLoss", "algorithm.loss.limit=0"], ["algorithm.loss.limit=0", "at least 1"]),
        (["algorithm.loss=my_parts:MyLoss", "algorithm.loss.lmit=3"], ["algorithm.loss.lmit=3", "loss.limit?"]),
    ],
)
def test_what_cannot_be_chosen_is_refused_with_what_can(own: Path, words: list[str], said: list[str]) -> None:
    with pytest.raises(ConfigError) as caught:
        load(["model=scratch", *words])
    assert len(str(caught.value).splitlines()) == 1
    for word in said:
        assert word in str(caught.value)


@pytest.mark.parametrize("key", ["algorithm.loss", "algorithm.credit", "env", "env.name", "engine.name"])
def test_a_name_that_is_empty_means_none(key: str) -> None:
    with pytest.raises(ConfigError, match=f"^{key}= is not known: choose one of "):
        load(["model=scratch", f"{key}="])
    with pytest.raises(ConfigError, match="^run.metric_writers= is not known: choose one of "):
        load(["model=scratch", "run.metric_writers=['']"])


def test_a_packaged_part_has_its_short_name_under_any_of_its_names(tmp_path: Path) -> None:
    path = f"{VTrace.__module__}:{VTrace.__qualname__}"
    config = load(["model=scratch", "algorithm=vtrace", f"algorithm.credit={path}", "algorithm.credit.discount=0.5"])
    assert config.algorithm.credit == VTrace(name="vtrace", discount=0.5)
    (tmp_path / "saved.yaml").write_text(to_yaml(config))
    words = [f"experiment={tmp_path}/saved.yaml", f"algorithm.credit={path}"]
    assert load(words).algorithm == config.algorithm, "the options in the file are this part's"


def test_ctrl_c_in_problems_of_a_part_ends_the_command(own: Path) -> None:
    with pytest.raises(KeyboardInterrupt):
        load(["model=scratch", "algorithm.loss=my_parts:Interrupted"])


def test_problems_of_a_part_of_the_users_own_are_told_one_by_one(own: Path) -> None:
    with pytest.raises(ConfigError, match="^one sentence\nanother one$"):
        load(["model=scratch", "algorithm.credit=my_parts:Sentences"])


@pytest.mark.system
def test_a_metric_with_two_meanings_ends_the_learner_with_a_sentence(own: Path) -> None:
    """And with the status of what would fail again."""
    words = ["experiment=toy", f"run.name=clash-{own.name}", f"run.dir={own}/run", "algorithm.loss=my_parts:Clashing"]
    command = [sys.executable, "-m", "impala_llm.learner", *words]
    done = subprocess.run(command, cwd=own, capture_output=True, text=True, timeout=100, check=False)
    assert done.returncode == 2, done.stderr
    assert "algorithm.loss=my_parts:Clashing cannot be used: metric 'loss/policy' means" in done.stderr
    assert "Traceback" not in done.stderr
