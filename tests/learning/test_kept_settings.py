"""config.yaml in a run's folder: whole at any moment, the old one or the new one."""

import resource
import signal
from pathlib import Path

import pytest

from impala_llm.config import ConfigError, load
from impala_llm.learning.checkpoints.kept_settings import keep_settings


@pytest.fixture
def settings(tmp_path: Path) -> list[str]:
    return ["experiment=toy", "run.name=kept", f"run.dir={tmp_path}"]


def test_settings_that_cannot_be_written_leave_those_before_as_they_were(settings: list[str], tmp_path: Path) -> None:
    keep_settings(load(settings))
    before = (tmp_path / "config.yaml").read_text()
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    ignored = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100, limits[1]))
    try:
        with pytest.raises(ConfigError, match="File too large"):
            keep_settings(load([*settings, "run.seed=7"]))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        signal.signal(signal.SIGXFSZ, ignored)
    assert (tmp_path / "config.yaml").read_text() == before
    keep_settings(load([*settings, "run.seed=7"]))
    assert load([f"experiment={tmp_path}/config.yaml"]).run.seed == 7
    assert [path.name for path in tmp_path.iterdir()] == ["config.yaml"]


def test_a_full_disk_is_named_with_what_helps(settings: list[str], tmp_path: Path) -> None:
    for name in ("config.yaml", "config.yaml.new"):
        (tmp_path / name).symlink_to("/dev/full")
    with pytest.raises(ConfigError, match="No space left on device.*make room") as caught:
        keep_settings(load(settings))
    assert "name another folder" not in str(caught.value)
