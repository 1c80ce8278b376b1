import json

import pytest

from impala_llm.bench import frame, webshop
from impala_llm.envs.webshop import WebShopEnv, synthetic_catalogue
from impala_llm.envs.webshop.synthetic import make_records


def test_rows_account_for_all_steps():
    steps_per_s, rows = webshop.measure_steps(webshop.record_episodes(60, 30), 60, "text_rich")
    assert steps_per_s > 0
    actions = {row["action"]: row for row in rows}
    kinds = {"search", "product", "option", "sub page", "next or prev", "back to search", "buy"}
    assert set(actions) == kinds | {"reset"}
    assert sum(actions[kind]["per_step"] for kind in kinds) == pytest.approx(1.0, abs=0.01)
    assert all(row["us_each"] > 0 for row in rows)


def test_an_unknown_observation_mode_is_refused_before_anything_is_measured(capsys):
    assert frame.main(["webshop", "--json", "--mode", "html"]) == 2
    assert "--mode is 'html': it takes text or text_rich" in capsys.readouterr().err


def test_what_a_sitecustomize_prints_is_no_figure(tmp_path, monkeypatch):
    (tmp_path / "sitecustomize.py").write_text("print('welcome')")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    figures, rows = webshop.run({"products": "60", "episodes": "5", "load": "50"})
    assert figures["steps_per_s"] > 0 and figures["load_50_s"] > 0 and rows


def test_recorded_episodes_repeat_and_have_meaning():
    episodes = webshop.record_episodes(60, 10)
    assert episodes == webshop.record_episodes(60, 10)
    env = WebShopEnv(synthetic_catalogue(60))
    for task_id, actions in episodes:
        env.reset(task_id=task_id)
        assert not any(env.step(action)[-1]["invalid"] for _, action in actions)


def test_load_measures_seconds_and_memory(tmp_path):
    for name, records in zip(webshop.FILES, make_records(50, seed=0), strict=True):
        (tmp_path / f"{name}.json").write_text(json.dumps(records))
    seconds, gigabytes = webshop.measure_load(tmp_path)
    assert seconds > 0
    assert 0 < gigabytes < 100
