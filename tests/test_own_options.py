"""Mistakes in the options of a part of the user's own are named, also inside of nested ones."""

from pathlib import Path
from typing import Any

import pytest

from impala_llm.config import ConfigError, load, to_yaml
from impala_llm.envs import make_suite

OWN = """
import enum
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from impala_llm.algorithms.losses import Reinforce

@dataclass
class Clip:
    low: float = 0.1

@dataclass
class Counted:
    need: int

@dataclass
class Deep:
    counted: Counted

@dataclass
class Required(Reinforce):
    clip: Clip = field(kw_only=True)
    deep: Deep = field(kw_only=True)

@dataclass
class Table(Reinforce):
    table: dict[tuple[int, int], float] = field(default_factory=dict)

@dataclass
class Complex(Reinforce):
    xs: list[complex] = field(default_factory=list)

@dataclass
class Tagged(Reinforce):
    tags: set[str] = field(default_factory=set)

@dataclass
class Bad:
    x: int = "a"

@dataclass
class Worse:
    bad: Bad = field(default_factory=Bad)

@dataclass
class Odd:
    tags: set[str] = field(default_factory=set)

@dataclass
class OfBad(Reinforce):
    inner: Bad = field(default_factory=Bad)

@dataclass
class OfWorse(Reinforce):
    inner: Worse = field(default_factory=Worse)

@dataclass
class OfBads(Reinforce):
    inners: list[Bad] = field(default_factory=lambda: [Bad()])

@dataclass
class OfOdd(Reinforce):
    inner: Odd = field(default_factory=Odd)

@dataclass
class Listed(Reinforce):
    items: list[Counted] = field(default_factory=list)

class Kind(enum.Enum):
    short = 1
    long = 2

class Suite:
    name, system_prompt = "own", ""
    def tasks(self, split): return range(9)
    def session(self, training): return None
    def signature(self, task_id): return ""

class Nested(Suite):
    @dataclass
    class Options:
        inner: Clip

def tabular(table: dict[tuple[int, int], float] = {}, size: int = 1):
    suite = Suite()
    suite.args = (table, size)
    return suite

@dataclass(frozen=True)
class Fixed:
    x: int = 3

@dataclass
class OfFixed(Reinforce):
    inner: Fixed = field(default_factory=Fixed)

@dataclass
class OfAny(Reinforce):
    kind: Any = Kind.short

@dataclass
class OfList(Reinforce):
    files: list = field(default_factory=lambda: [Path("x")])

class OfUnion(Suite):
    @dataclass
    class Options:
        file: str | Path = Path("y")

def unions(kind: str | Kind = Kind.short, file: str | Path = Path("y"), clip: Clip = Clip(), texts: str | list = "a"):
    suite = Suite()
    suite.args = (kind, file, clip, texts)
    return suite

def lists(files=[Path("a.txt")], kinds={"a": Kind.short}, both=[Path("a"), Kind.long], tags={1}, n=1):
    suite = Suite()
    suite.args = (files, kinds, both, tags)
    return suite

def untyped(kind=Kind.short, kinds=[Kind.short], file=Path("x"), listed: list = [Kind.long], **others):
    suite = Suite()
    suite.args = (kind, kinds, file, listed, others)
    return suite
"""
LOSS = "algorithm.loss=own_options"


@pytest.fixture
def own(user_folder: Path) -> Path:
    """The current directory, with parts of the user's own in it."""
    (user_folder / "own_options.py").write_text(OWN)
    return user_folder


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (
            [f"{LOSS}:Required", "algorithm.loss.clip.low=x"],
            "algorithm.loss.clip.low=x has the wrong type: a number is expected",
        ),
        (
            [f"{LOSS}:Required", "algorithm.loss.clip.lo=1"],
            "algorithm.loss.clip.lo=1 is no option: algorithm.loss.clip has low",
        ),
        (
            [f"{LOSS}:Required", "algorithm.loss.deep.counted.need=x"],
            "algorithm.loss.deep.counted.need=x has the wrong type: a whole number is expected",
        ),
        (
            ["env=own_options:Nested", "env.args.inner={x: q}"],
            "env.args.inner.x=q is no option: env.args.inner has low",
        ),
        (
            [f"{LOSS}:Table"],
            "its option table is dict[tuple[int, int], float], which is no type of a setting: write table: Any, with "
            "Any of typing",
        ),
        (
            [f"{LOSS}:Complex"],
            "its option xs is list[complex], which is no type of a setting: write xs: Any, with Any of typing",
        ),
        ([f"{LOSS}:Tagged"], "write tags: Any, with Any of typing, and a plain default, such as a list"),
        (
            [f"{LOSS}:OfBad"],
            "the default Bad(x='a') of its option inner.x has the wrong type: a whole number is expected",
        ),
        ([f"{LOSS}:OfWorse"], "of its option inner.bad.x has the wrong type: a whole number is expected"),
        ([f"{LOSS}:OfBads"], "of its option inners[0].x has the wrong type: a whole number is expected"),
        ([f"{LOSS}:OfOdd"], "its option inner.tags is set[str], which is no type of a setting: write tags: Any, "),
        ([f"{LOSS}:OfFixed"], "its option inner is frozen, so that its options cannot be set: write @dataclass above"),
        (
            [f"{LOSS}:OfAny"],
            "its option kind is Any and a file of settings does not keep its default <Kind.short: 1>: write kind: Kind",
        ),
        (
            [f"{LOSS}:OfList"],
            "does not keep its default [PosixPath('x')]: write files: list[pathlib.Path], or a plain default",
        ),
        (["env=own_options:OfUnion"], "does not keep its default PosixPath('y'): write file: Path, or a plain"),
        *(
            (
                ["env=own_options:lists", f"env.args.{name}=[b]"],
                f"env.args.{name}=['b'] is no option of env.name=own_options:lists: it is a parameter, and a file of "
                f"settings does not keep its default {default}: give it a plain one",
            )
            for name, default in {"both": "[PosixPath('a'), <Kind.long: 2>]", "tags": "{1}"}.items()
        ),
        (["env=own_options:untyped", "env.args={1: 2}"], "env.args={1: 2}: the name of an option is a text, and 1 is"),
        (["env=own_options:lists", "env.args.tgs=1"], "its options are files, kinds, n"),
        (
            [f"{LOSS}:Listed", "algorithm.loss.items=[{need: x}]"],
            "algorithm.loss.items=[{'need': 'x'}]: need has the wrong type: a whole number is expected",
        ),
        (
            [f"{LOSS}:Listed", "algorithm.loss.items=[{ned: 1}]"],
            "algorithm.loss.items=[{'ned': 1}]: ned is no option: Counted has need",
        ),
    ],
)
def test_what_is_wrong_with_an_option_is_said_of_it(own: Path, words: list[str], said: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load(["model=scratch", *words])
    assert said in str(caught.value) and len(str(caught.value).splitlines()) == 1


def test_a_parameter_with_a_type_that_is_none_of_a_setting_takes_any_value(own: Path) -> None:
    config = load(["model=scratch", "env=own_options:tabular", "env.args.size=2"])
    assert make_suite(config.env).args == ({}, 2)  # type: ignore[attr-defined]


@pytest.mark.system
def test_defaults_that_are_no_plain_values_are_the_same_when_the_settings_are_read_again(own: Path) -> None:
    def arguments(*more: str) -> Any:
        config = load(["model=scratch", *more])
        (own / "saved.yaml").write_text(to_yaml(config))
        assert load(["experiment=saved.yaml"]) == config
        suite = make_suite(load(["experiment=saved.yaml"]).env)
        return suite.args  # type: ignore[attr-defined]

    words = ["env=own_options:untyped", "env.args.depth=3"]
    kind, kinds, file, listed, others = arguments(*words)
    assert (kind.name, [each.name for each in (*kinds, *listed)], file) == ("short", ["short", "long"], Path("x"))
    assert others == {"depth": 3}
    kind, _, file, *_ = arguments(*words, "env.args.kind=long", "env.args.file=y")
    assert (kind.name, file) == ("long", Path("y"))
    kind, file, clip, texts = arguments("env=own_options:unions")
    assert (kind.name, file, clip.low, texts) == ("short", Path("y"), 0.1, "a")
    kind, file, clip, texts = arguments("env=own_options:unions", "env.args.clip.low=1", "env.args.texts=[b]")
    assert (kind.name, file, clip.low, texts) == ("short", Path("y"), 1.0, ["b"])


def test_lists_and_mappings_take_values_of_the_type_of_their_default_s_items(own: Path) -> None:
    config = load(["model=scratch", "env=own_options:lists", "env.args.files=[b.txt]", "env.args.kinds.b=long"])
    files, kinds, both, _ = make_suite(config.env).args  # type: ignore[attr-defined]
    assert (files, {name: kind.name for name, kind in kinds.items()}) == ([Path("b.txt")], {"a": "short", "b": "long"})
    assert both[0] == Path("a")
