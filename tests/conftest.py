"""Fixtures of all tests: one thread a process, no network, and a tiny random policy on request."""

import os

# Before torch is imported, and inherited by the processes that system tests start.
os.environ["OMP_NUM_THREADS"] = "1"
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["TOKENIZERS_PARALLELISM"] = "false"
# Where it is set, each process compiles all modules of this package anew.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)

import functools  # noqa: E402
import signal  # noqa: E402
import sys  # noqa: E402
from collections.abc import Iterator, Sequence  # noqa: E402
from pathlib import Path  # noqa: E402

import hydra  # noqa: E402
import pytest  # noqa: E402
from omegaconf import DictConfig  # noqa: E402

_compose, _composed = hydra.compose, functools.cache(lambda name, words: _compose(name, overrides=list(words)))


def _compose_once(name: str, overrides: Sequence[str] = ()) -> DictConfig:
    """`hydra.compose`, which takes a tenth of a second, but what has been composed before is given again. An experiment
    of a user's file is composed anew: the same words stand for another file in the next test."""
    is_of_file = any(word in ("experiment=file", "experiment=presets") for word in overrides)
    return _compose(name, overrides=list(overrides)) if is_of_file else _composed(name, tuple(overrides))


hydra.compose = _compose_once  # before impala_llm.config takes it from there

# A shell that starts this in the background lets it ignore SIGINT, and nohup SIGHUP, and so all processes that tests
# start and send these signals to.
if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)
if signal.getsignal(signal.SIGHUP) == signal.SIG_IGN:
    signal.signal(signal.SIGHUP, signal.SIG_DFL)


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Hugging Face directory: random Qwen3 (hidden 64, 2 layers), tokenizer of 100 characters. Read only."""
    from tests.helpers import make_tiny_model

    return make_tiny_model(tmp_path_factory.mktemp("tiny_model"))


@pytest.fixture
def user_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A user's folder as the current directory; what was imported from it is forgotten afterwards."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    yield tmp_path
    for name, module in list(sys.modules.items()):
        if str(getattr(module, "__file__", None)).startswith(str(tmp_path)):
            del sys.modules[name]
