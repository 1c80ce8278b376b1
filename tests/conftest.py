"""Fixtures of all tests: one thread a process, no network, and a tiny random policy on request."""

import os

# Before torch is imported, and inherited by the processes that system tests start.
os.environ["OMP_NUM_THREADS"] = "1"
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["TOKENIZERS_PARALLELISM"] = "false"
# Where it is set, each process compiles all modules of this package anew.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)

import gc  # noqa: E402
import signal  # noqa: E402
import sys  # noqa: E402
from collections.abc import Iterator  # noqa: E402
from pathlib import Path  # noqa: E402

import pytest  # noqa: E402

from tests import compositions  # noqa: E402

compositions.install()

# A shell that starts this in the background lets it ignore SIGINT, and nohup SIGHUP, and so all processes that tests
# start and send these signals to.
if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)
if signal.getsignal(signal.SIGHUP) == signal.SIG_IGN:
    signal.signal(signal.SIGHUP, signal.SIG_DFL)


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Iterator[None]:
    """Imports are not searched for garbage: there is none, and it takes a fifth of their time. Nor are they later."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Sort tests by their time limit, the longest first, and those that start processes before others of the same
    limit: a long test that began last would keep one worker busy while the others have nothing to do. Let system tests
    be run once more when they fail: a busy machine can be late for a deadline. Write an item's `xdist_group` at the end
    of its id, behind an `@`, where the scheduler of pytest-xdist looks for it.

    Since pytest 9.2 an id is of a type of its own, in another attribute: pytest-xdist 3.8 writes to the one before, the
    groups have no effect, and each worker starts the servers that the tests of a group share (its issue 1386).
    """
    if not getattr(config.option, "loadgroup", False):
        return  # no worker, or one that takes tests in another way

    def order(item: pytest.Item) -> tuple[float, bool]:
        return -next((mark.args[0] for mark in item.iter_markers("timeout")), 0), "system" not in item.keywords

    items.sort(key=order)
    for item in items:
        if "system" in item.keywords:
            item.add_marker(pytest.mark.flaky(reruns=1))
        group = "_".join(sorted({mark.args[0] for mark in item.iter_markers("xdist_group")}))
        if group and not item.nodeid.endswith(f"@{group}") and hasattr(item, "_id"):
            item._id = type(item._id).parse(f"{item.nodeid}@{group}")


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
