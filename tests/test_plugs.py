"""Parts of installed packages are found by short names of their own, and the docs say so."""

import re
from pathlib import Path

import pytest

from impala_llm import plugs
from impala_llm.algorithms.registry import PARTS
from impala_llm.config import ConfigError, load
from impala_llm.plugs import PartKind

OWN = """
from impala_llm.algorithms.losses import Reinforce as Loss
from impala_llm.algorithms.vtrace import VTrace as Credit

def function(*given, **options):
    pass
"""
KINDS = [*PARTS.values(), *(each for each in vars(plugs).values() if isinstance(each, PartKind))]
DOCS = Path(__file__).parents[1] / "docs"


@pytest.mark.parametrize("kind", KINDS, ids=[kind.group for kind in KINDS])
def test_an_entry_point_gives_a_part_of_each_kind_a_short_name(
    kind: PartKind, user_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (user_folder / "installed_parts.py").write_text(OWN)
    info = user_folder / "parts-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: parts\nVersion: 1.0\n")
    part = kind.base.__name__ if kind.base else "function"
    (info / "entry_points.txt").write_text(f"[{kind.group}]\nmine-own = installed_parts:{part}\n")
    monkeypatch.syspath_prepend(user_folder)
    assert plugs.load(kind, "mine-own") is plugs.load(kind, f"installed_parts:{part}")
    with pytest.raises(ValueError, match="did you mean mine-own"):
        plugs.load(kind, "mine-onw")
    if kind.key in ("env.name", "engine.name"):  # which are chosen as presets are
        word = kind.key.partition(".")[0]
        with pytest.raises(ConfigError, match=f"did you mean {word}=mine-own"):
            load([f"{word}=mine-onw"])
    assert re.search(rf'[`"]{kind.group}[`"]', "".join(page.read_text() for page in DOCS.glob("*.md")))
