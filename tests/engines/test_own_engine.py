"""An engine of the user's own, named by its import path, with options of its own."""

import json
import re
from pathlib import Path

import pytest

from impala_llm.config import ConfigError, load, to_yaml
from impala_llm.engines import make_engine
from impala_llm.engines.base import EngineError
from tests.system.forked_command import forked_command

RECIPE = Path(__file__).parents[2] / "docs" / "engines.md"
OWN = ["experiment=toy", "engine.name=my_engine:Echo"]

UNFINISHED = """
from my_engine import Echo

class NoSetup(Echo):
    def __init__(self): pass

class NoStats:
    def __init__(self, setup): pass
    async def start(self): pass

class Made:
    Options = Echo.Options
    def __new__(cls, setup): return Echo(setup)
"""


@pytest.fixture
def own(user_folder: Path) -> Path:
    """The current directory, with the engine of the documentation in it."""
    [code] = re.findall(r"```python\n(.*?)```", RECIPE.read_text(), re.DOTALL)
    (user_folder / "my_engine.py").write_text(code)
    (user_folder / "unfinished.py").write_text(UNFINISHED)
    return user_folder


def test_its_options_are_settings(own: Path) -> None:
    config = load([*OWN, "engine.options.wrong_share=0.5", "run.dir=x"])
    assert config.engine.options.wrong_share == 0.5 and config.engine.max_new_tokens == 2
    (own / "saved.yaml").write_text(to_yaml(config))
    assert load(["experiment=saved.yaml"]) == config
    assert load(["experiment=saved.yaml", "engine.name=torch"]).engine.options is None


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["engine.name=torhc"], ["engine.name=torhc is not known", "did you mean torch?", "sglang", "module:Class"]),
        (["engine.name=vllm"], ["engine.name=vllm is not known", "torch, sglang"]),
        (["engine=vllm"], ["engine=vllm is not known: here it is engine=sglang"]),
        (["engine=embedded"], ["engine=embedded is not known: here it is engine=torch"]),
        (["engine.name=nowhere:Engine"], ["engine.name=nowhere:Engine", "nowhere", "PYTHONPATH"]),
        (["engine.name=my_engine:Bell"], ["engine.name=my_engine:Bell", "my_engine has no Bell"]),
        (["engine.name=unfinished:NoSetup"], ["unfinished:NoSetup", "it takes (), and is called with (setup)"]),
        ([*OWN, "engine.options.wrong=1"], ["engine.options.wrong=1", "engine.options.wrong_share?"]),
        ([*OWN, "engine.options.wrong_share=2"], ["engine.options.wrong_share=2", "between 0 and 1"]),
        (["engine.options.dtype=float32"], ["engine.options.dtype=float32", "engine.name=torch", "engine.*"]),
    ],
)
def test_what_does_not_exist_is_refused_with_what_does(own: Path, words: list[str], said: list[str]) -> None:
    with pytest.raises(ConfigError) as caught:
        load(["experiment=toy", *words])
    assert len(str(caught.value).splitlines()) == 1
    for word in said:
        assert word in str(caught.value)


def test_one_that_lacks_methods_is_refused_when_it_is_made(own: Path, tiny_model: Path) -> None:
    config = load(["experiment=toy", "engine.name=unfinished:NoStats"])
    with pytest.raises(EngineError, match=r"engine.name=unfinished:NoStats has no method abort and .*stats: add what"):
        make_engine(config, tiny_model, 0)
    made = make_engine(load(["experiment=toy", "engine.name=unfinished:Made"]), tiny_model, 0)
    assert type(made).__name__ == "Echo", "whatever makes it"


@pytest.mark.system
def test_it_plays_without_a_line_of_ours(own: Path) -> None:
    """The actor's engine is the one that was named: it answers rightly from the start, as no new model does."""
    words = [*OWN, "engine.options.wrong_share=0.5", f"run.name=own-{own.name}", f"run.dir={own}/run"]
    few = ["run.terminal=false", "learner.total_updates=3", "learner.batch_size=16"]
    done = forked_command(["train", *words, *few], own)
    assert done.returncode == 0, done.stderr
    assert len((own / "run/tensorboard/metrics.jsonl").read_text().splitlines()) == 3
    again = ["evaluate", "--json", "--config", "run/config.yaml", "evaluation.num_tasks=8"]
    played = forked_command(again, own)
    assert played.returncode == 0, played.stderr
    assert json.loads(played.stdout)[0]["score"] == 1.0
