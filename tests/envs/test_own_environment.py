"""An environment of the user's own: named by its import path or by an entry point, with options of its own."""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from impala_llm.cli import main
from impala_llm.config import ConfigError, load, to_yaml
from impala_llm.envs import make_suite
from impala_llm.envs.contract import EnvironmentFault
from impala_llm.settings import EnvConfig
from tests.helpers import files_of_at_most
from tests.system.forked_command import forked_command

RECIPE = Path(__file__).parents[2] / "docs" / "environments.md"
OWN = ["model=scratch", "env=my_env:NextLetter"]
NESTED = ["env=odd:Nested", "env.args.seed=1"]

ODD = """
import enum
import functools
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

class Empty:
    name, system_prompt = "empty", ""
    def tasks(self, split): return range(1)
    def session(self, training): return None
    def signature(self, task_id): return ""

class Suite(Empty):
    @dataclass
    class Options:
        name: str
        size: int = 1

        def __post_init__(self):
            if self.size == 0:
                raise ValueError("size=0 is no size")

class Plain(Empty):
    class Options:
        size = 1

class Delegating:
    name, system_prompt = "delegating", ""
    def __init__(self, size: int = 1):
        for method in ("tasks", "session", "signature"):
            setattr(self, method, getattr(Empty(), method))

def cached(function):
    @functools.wraps(function)
    def call(self, *given): return function(self, *given, {})
    return call

class Decorated(Empty):
    @cached
    def tasks(self, split, cache): return range(1)

class Postponed(Empty):
    @dataclass
    class Options:
        limit: "float | None" = None
        other: "Absent" = 1

class Still(Empty):
    def session(self): return None

class Chosen(Empty):
    @dataclass
    class Options:
        side: Literal["left", "right"] = "left"

class Vague(Empty):
    @dataclass
    class Options:
        limit: float = None

class Objects(Empty):
    @dataclass
    class Options:
        thing: object = None

@dataclass
class Inner:
    x: int = 1
    price: str = "${price}"

class Nested(Empty):
    @dataclass
    class Options:
        seed: int
        prompt: str = "Price: ${price}"
        mark: str = "${"
        inner: Inner = field(default_factory=Inner)
        items: list[int] = field(default_factory=lambda: [1])
        thing: Any = None

def priced(price: str = "Price: ${price}", mark: str = "${", marks: list[str] = ["${a}"]):
    suite = Empty()
    suite.args = {"price": price, "mark": mark, "marks": marks}
    return suite

class Typed(Empty):
    def __init__(self, thing: "Absent | None" = None, names: set = {"a"}, size: "int" = 1):
        self.names, self.size = names, size

class Kind(enum.Enum):
    short = 1
    long = 2

class Spoken:
    def reset(self, task_id): return "say a", {}
    def step(self, action): return "", 0.0, True, False, {"score": 0.0, "success": False}

class Files(Empty):
    def __init__(self, file: Path = Path("tasks.txt"), files: list[Path] = [], kind: Kind = Kind.short):
        self.file, self.files, self.kind = file, files, kind
    def session(self, training): return Spoken()

def make(folder: str, size: int = 1, extra: dict = {}, weights: list[float] = [0.5], other: "object" = None):
    suite = Empty()
    suite.args = {"folder": folder, "size": size, "extra": extra, "weights": weights, "other": other}
    return suite

def make_any(size: int = 1, **others):
    suite = Empty()
    suite.args = {"size": size, **others}
    return suite
"""


@pytest.fixture
def own(user_folder: Path) -> Path:
    """The current directory, with the environment of the documentation in it."""
    [code] = re.findall(r"```python\n(.*?)```", RECIPE.read_text(), re.DOTALL)
    (user_folder / "my_env.py").write_text(code)
    (user_folder / "odd.py").write_text(ODD)
    (user_folder / "broken.py").write_text("import nothing_of_this_name\n")
    (user_folder / "wrong.py").write_text("def suite(:\n")
    return user_folder


def test_its_options_reach_it(own: Path) -> None:
    suite = make_suite(load([*OWN, "env.args.num_turns=3", "env.args.num_letters=2"]).env)
    session = suite.session(training=False)
    observation, _ = session.reset(suite.tasks("train")[0])
    for turn in range(3):
        assert observation in ("a", "b")
        answer = {"a": "b", "b": "c"}[observation]
        observation, reward, terminated, _, info = session.step(answer)
        assert terminated == (turn == 2)
    assert (reward, info["score"], info["success"]) == (1.0, 1.0, True)


def test_options_that_are_not_given_have_their_defaults(own: Path) -> None:
    config = load(OWN)
    assert (config.env.args.num_letters, config.env.args.num_turns) == (4, 2)
    assert "num_letters: 4" in to_yaml(config)


def test_an_option_may_be_called_name(own: Path) -> None:
    config = load(["model=scratch", "env.name=odd:Suite", "env.args.name=mine"])
    assert (config.env.name, config.env.args.name) == ("odd:Suite", "mine")


def test_options_may_come_together(own: Path) -> None:
    options = load([*OWN, "env.args={num_turns: 3, num_letters: 5}"]).env.args
    assert (options.num_turns, options.num_letters) == (3, 5)


def test_without_options_the_parameters_are_its_settings(own: Path) -> None:
    words = ["model=scratch", "env=odd:make", "env.args.folder=x", "env.args.extra.side.left=2", "env.args.other=[1]"]
    config = load(words)
    args = {"folder": "x", "size": 1, "extra": {"side": {"left": 2}}, "weights": [0.5], "other": [1]}
    assert config.env.args == make_suite(config.env).args == args  # type: ignore[attr-defined]
    (own / "saved.yaml").write_text(to_yaml(config))
    assert load(["experiment=saved.yaml"]) == config
    changed = load(["experiment=saved.yaml", "env.args.extra.side.right=3", "env.args.size=2"]).env.args
    assert changed == args | {"extra": {"side": {"left": 2, "right": 3}}, "size": 2}


def test_its_methods_may_be_set_when_it_is_made(own: Path) -> None:
    assert load(["model=scratch", "env=odd:Delegating", "env.args.size=3"]).env.args == {"size": 3}
    assert load(["model=scratch", "env=odd:Decorated"]).env.name == "odd:Decorated", "a decorator may give the rest"


def test_who_takes_arguments_of_any_name_gets_them(own: Path) -> None:
    words = ["model=scratch", "env=odd:make_any", "env.args.size=2", "env.args.depth=3", "env.args.nested.key=a"]
    found = load(words)
    args = {"size": 2, "depth": 3, "nested": {"key": "a"}}
    assert make_suite(found.env).args == args  # type: ignore[attr-defined]
    (own / "saved.yaml").write_text(to_yaml(found))
    assert load(["experiment=saved.yaml"]) == found
    with pytest.raises(ConfigError, match="env.args.size=many has the wrong type"):
        load([*words, "env.args.size=many"])


@pytest.mark.parametrize(
    ("option", "value", "expected"),
    [("size", "${run.seed}", 7), ("depth", "${run.seed}", 7), ("depth", r"\${run.seed}", "${run.seed}")],
)
def test_a_word_for_an_option_refers_to_other_settings_as_a_file_does(
    own: Path, option: str, value: str, expected: object
) -> None:
    (own / "mine.yaml").write_text(f"env: {{name: 'odd:make_any', args: {{{option}: '{value}'}}}}")
    for word in (f"env.args.{option}='{value}'", f"env.args={{{option}: '{value}'}}", "experiment=mine.yaml"):
        config = load(["model=scratch", "env=odd:make_any", "run.seed=7", word])
        assert config.env.args[option] == expected  # type: ignore[index]


@pytest.mark.parametrize("option", ["size", "depth"])
@pytest.mark.parametrize(("value", "reason"), [("${nope}", "'nope' not found"), ("${", "it is no reference")])
def test_an_option_that_refers_to_nothing_is_named(own: Path, option: str, value: str, reason: str) -> None:
    (own / "mine.yaml").write_text(f"env: {{name: 'odd:make_any', args: {{{option}: '{value}'}}}}")
    for word in (f"env.args.{option}='{value}'", "experiment=mine.yaml"):
        with pytest.raises(ConfigError, match=rf"env\.args\.{option}.* cannot be resolved .*{reason}") as caught:
            load(["model=scratch", "env=odd:make_any", word])
        assert len(str(caught.value).splitlines()) == 1


def test_a_default_may_have_the_signs_of_a_reference_in_it(own: Path) -> None:
    suite = make_suite(load(["model=scratch", "env=odd:priced"]).env)
    expected = {"price": "Price: ${price}", "mark": "${", "marks": ["${a}"]}
    assert suite.args == expected  # type: ignore[attr-defined]
    config = load(["model=scratch", *NESTED, "env.args.thing={a: [1]}"])
    options = config.env.args
    assert (options.prompt, options.mark, options.inner.price) == ("Price: ${price}", "${", "${price}")
    assert options.thing == {"a": [1]}
    (own / "saved.yaml").write_text(to_yaml(config))
    assert load(["experiment=saved.yaml"]) == config


def test_parameters_whose_types_or_defaults_are_no_settings_harm_no_others(own: Path) -> None:
    suite = make_suite(load(["model=scratch", "env=odd:Typed", "env.args.size=3"]).env)
    assert (suite.size, suite.names) == (3, {"a"})


def test_parameters_may_be_paths_and_enumerations(own: Path) -> None:
    words = ["model=scratch", "env=odd:Files", "env.args.files=[a,b]", "env.args.kind=long"]
    config = load(words)
    suite = make_suite(config.env)
    assert (suite.file, suite.files, suite.kind.name) == (Path("tasks.txt"), [Path("a"), Path("b")], "long")  # type: ignore[attr-defined]
    (own / "saved.yaml").write_text(to_yaml(config))
    assert load(["experiment=saved.yaml"]) == config
    recording = ["demonstrations.player=policy", "demonstrations.num_episodes=1", "engine.max_new_tokens=2"]
    for _ in range(2):  # the second finds the folder of its own settings
        assert main(["demonstrate", *words, *recording, "demonstrations.dir=recorded", "run.dir=run"]) == 0
    settings = json.loads((own / "recorded/demonstrations.json").read_text())["settings"]
    assert settings["env"]["args"] == {"file": "tasks.txt", "files": ["a", "b"], "kind": "long"}


def test_a_toy_has_settings_too() -> None:
    assert len(make_suite(load(["experiment=toy", "env.args.num_words=7"]).env).words) == 7


def test_what_was_saved_loads_again(own: Path) -> None:
    config = load([*OWN, "env.args.num_turns=3", "run.dir=x"])
    (own / "saved.yaml").write_text(to_yaml(config))
    assert load(["experiment=saved.yaml"]) == config
    assert load(["experiment=saved.yaml", "env.args.num_letters=9"]).env.args.num_turns == 3
    assert load(["experiment=saved.yaml", "env.name=webshop"]).env.args is None


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["env.name=chess"], ["env.name=chess is not known", "webshop, parrot, corridor", "module:Class"]),
        (["env.name=corrider"], ["env.name=corrider", "did you mean corridor?"]),
        (["env=chess"], ["env=chess", "corridor", "module:Class"]),
        (["env.name=nowhere:Suite"], ["env.name=nowhere:Suite", "nowhere", "PYTHONPATH"]),
        (["env.name=broken:Suite"], ["env.name=broken:Suite", "broken: ", "'nothing_of_this_name'", "correct it"]),
        (["env.name=broken:Suite"], ["in ", "broken.py:1)"]),
        (["env.name=odd:Still"], ["env.name=odd:Still", "its session takes (), and is called with (training)"]),
        (["env.name=odd:Chosen"], ["its option side is a Literal", 'side: str = one_of("left", "right")']),
        (["env.name=odd:Postponed"], ["odd:Postponed refuses its options", "'Absent' is not defined"]),
        (["env.name=odd:Vague", "env.args.limit=3"], ["limit is float and its default is None", "limit: float | None"]),
        (
            ["env.name=odd:Objects"],
            ["its option thing is object, which is no type of a setting: write thing: Any, with Any of typing"],
        ),
        ([*NESTED, "env.args.seed=x"], ["env.args.seed=x has the wrong type: a whole number is expected"]),
        (
            [*NESTED, "env.args.inner.x=q"],
            ["env.args.inner.x=q has the wrong type: a whole number is expected; the default is 1"],
        ),
        (
            [*NESTED, "env.args.inner=3"],
            ["env.args.inner=3 has the wrong type: a mapping of its options is expected; the default is {'x': 1, "],
        ),
        ([*NESTED, "env.args.inner.y=3"], ["env.args.inner.y=3 is no option: env.args.inner has x, price"]),
        (
            [*NESTED, "env.args.items=3"],
            ["env.args.items=3 has the wrong type: a list is expected; the default is [1]"],
        ),
        ([*NESTED, "env.args.items=[a]"], ["env.args.items[0]=a has the wrong type: a whole number is expected"]),
        ([*NESTED, "env.args.seed=1,2"], ["env.args.seed=1,2 has several values"]),
        (["env.name=wrong:suite"], ["env.name=wrong:suite", "wrong: SyntaxError", "correct it"]),
        (["env=my_env:nextleter"], ["my_env has no nextleter", "did you mean my_env:NextLetter?"]),
        (["env.name=my_env:Chess"], ["env.name=my_env:Chess", "my_env has no Chess"]),
        (["env.name=my_env:"], ["env.name=my_env: is no import path", "module:Class"]),
        ([*OWN, "env.args=3"], ["env.args=3", "env.args.NAME=value"]),
        (
            ["env.name=odd:Suite", "env.args.name=x", "env.args.size=0"],
            ["env.name=odd:Suite refuses its options", "size=0 is no size"],
        ),
        (["env.name=odd:Suite"], ["env.args.name is not set"]),
        (["env.name=odd:Plain"], ["env.name=odd:Plain cannot be used", "Options is no dataclass"]),
        (["env.name=my_env:ALPHABET"], ["env.name=my_env:ALPHABET", "is a str"]),
        ([*OWN, "env.args.num_leters=3"], ["env.args.num_leters=3", "env.args.num_letters?"]),
        ([*OWN, "env.args.num_turns=0"], ["env.args.num_turns=0", "at least 1"]),
        ([*OWN, "env.args.num_turns=some"], ["env.args.num_turns=some", "wrong type", "default is 2"]),
        (["env.name=parrot", "env.args.size=3"], ["env.args.size=3", "env.name=parrot", "num_words, num_tasks"]),
        (
            ["env.name=odd:make", "env.args.size=x"],
            ["env.args.size=x has the wrong type: a whole number is expected; the default is 1"],
        ),
        (["env.name=odd:make", "env.args.size=null"], ["env.args.size=None has the wrong type: it needs a value; "]),
        (["env.name=odd:make"], ["env.args.folder is not set"]),
        (["env.name=odd:make", "env.args.folder=x", "env.args.side=3"], ["env.args.side=3", "env.args.size?"]),
        (["env.name=odd:make", "env.args.extra=1", "env.args.extra.a=1"], ["env.args.extra.a=1", "leave one out"]),
        (["env.args.goals=human"], ["env.args.goals=human", "env.webshop.*"]),
        ([*OWN, "env.option.num_turns=3"], ["env.option.num_turns=3", "unknown key"]),
    ],
)
def test_what_does_not_exist_is_refused_with_what_does(own: Path, words: list[str], said: list[str]) -> None:
    with pytest.raises(ConfigError) as caught:
        load(["model=scratch", *words])
    assert len(str(caught.value).splitlines()) == 1
    for word in said:
        assert word in str(caught.value)


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("Empt.signature", "odd has no Empt.signature: did you mean odd:Empty.signature?"),
        ("Empt.other", "odd has no Empt.other"),
        ("Nested.Nest", "odd has no Nested.Nest: did you mean odd:Nested.Nester?"),
    ],
)
def test_a_name_that_is_suggested_exists(own: Path, name: str, said: str) -> None:
    with (own / "odd.py").open("a") as file:
        file.write("Nested.Nester = Empty\n")
    with pytest.raises(ConfigError) as caught:
        load(["model=scratch", f"env.name=odd:{name}"])
    assert str(caught.value) == f"env.name=odd:{name} is not there: {said}"


def test_an_installed_package_gives_it_a_short_name(own: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    info = own / "next_letter-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: next-letter\nVersion: 1.0\n")
    shop = "impala_llm.envs.webshop.suite:suite_from_config"
    points = f"next-letter = my_env:NextLetter\nwith-extras = my_env : NextLetter [fast]\nwebshop2 = {shop}\n"
    (info / "entry_points.txt").write_text(f"[impala_llm.envs]\n{points}")
    monkeypatch.syspath_prepend(own)
    config = load(["model=scratch", "env=next-letter", "env.args.num_turns=5"])
    assert config == load(["model=scratch", "env.name=next-letter", "env.args.num_turns=5"])
    assert make_suite(config.env).name == "next-letter" and config.env.args.num_turns == 5
    with pytest.raises(ConfigError, match="did you mean next-letter"):
        load(["model=scratch", "env.name=next-leter"])
    assert make_suite(load(["model=scratch", "env=with-extras"]).env).name == "next-letter"
    for name in ("webshop2", shop):
        products = ["env.webshop.num_products=100", "env.webshop.results_per_page=9"]
        assert load(["model=scratch", f"env={name}", *products]).env == load(["model=scratch", *products]).env
        with pytest.raises(ConfigError, match=r"env\.args\.size=3 is no option .* env\.webshop\.\*"):
            load(["model=scratch", f"env={name}", "env.args.size=3"])
        mixture = f"env.args.parts={{a: {{name: '{name}', args: {{num_products: 100}}}}, b: {{name: parrot}}}}"
        assert len(make_suite(load(["model=scratch", "env=mixture", mixture]).env).suites) == 2  # type: ignore[attr-defined]


@pytest.mark.system
def test_what_new_env_writes_passes_its_test_and_trains(user_folder: Path) -> None:
    assert forked_command(["new-env", "guess"], user_folder).returncode == 0
    assert len([line for line in (user_folder / "guess.py").read_text().splitlines() if line]) <= 25
    pytest_command = [sys.executable, "-m", "pytest", "-q", "test_guess.py"]
    tested = subprocess.run(pytest_command, cwd=user_folder, capture_output=True, text=True, timeout=200)
    assert tested.returncode == 0 and "2 passed" in tested.stdout, tested.stdout
    words = [
        *("model=scratch", "env=guess:Suite", "env.args.num_letters=2", f"run.name=new-{user_folder.name}"),
        *("run.terminal=false", "learner.total_updates=2", "learner.batch_size=16", "engine.max_new_tokens=2"),
        *("engine.max_length=64", "run.dir=run"),
    ]
    done = forked_command(["train", *words], user_folder)
    assert done.returncode == 0, done.stderr
    assert len((user_folder / "run/tensorboard/metrics.jsonl").read_text().splitlines()) == 2


def test_an_environment_that_raises_when_it_is_made_is_named_with_file_and_line(user_folder: Path) -> None:
    (user_folder / "raising.py").write_text("def suite():\n    raise RuntimeError('no data')\n")
    with pytest.raises(
        EnvironmentFault, match=r"raising:suite cannot be made: RuntimeError: no data, in .*ing\.py:2: "
    ):
        make_suite(EnvConfig(name="raising:suite"))
    others = (load(["model=scratch", "env=tasks", "env.args.file=none"]).env, EnvConfig(name="raising:absent"))
    for other in others:
        with pytest.raises(EnvironmentFault, match="cannot be made") as caught:
            make_suite(other)
        assert ".py" not in str(caught.value), "our code helps nobody"


def test_new_env_writes_both_files_or_none(user_folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with files_of_at_most(0):
        assert main(["new-env", "guess"]) == 2
    assert "new-env guess: guess.py cannot be written (File too large): " in capsys.readouterr().err
    (user_folder / "test_guess.py").symlink_to("missing/test_guess.py")
    assert main(["new-env", "guess"]) == 2
    assert "new-env guess: test_guess.py is there already: " in capsys.readouterr().err
    assert [path.name for path in user_folder.iterdir()] == ["test_guess.py"]


def test_new_env_writes_over_nothing(user_folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (user_folder / "test_guess.py").write_text("mine")
    assert main(["new-env", "guess"]) == 2 and "test_guess.py is there already" in capsys.readouterr().err
    assert [path.name for path in user_folder.iterdir()] == ["test_guess.py"]
    for name, rule in (("my-env", "letters, digits and _"), ("class", "a keyword of Python"), ("", "letters, digits")):
        assert main(["new-env", name]) == 2 and rule in capsys.readouterr().err
    for name, there in (
        ("numpy", "there is"),
        ("impala_llm", "there is"),
        ("json", "Python has"),
        ("__main__", "Python has"),
    ):
        assert main(["new-env", name]) == 2
        assert f"new-env {name}: {there} a package or module {name} already" in capsys.readouterr().err
        assert not Path(f"{name}.py").exists()
