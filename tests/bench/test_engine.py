import json
import sys
from pathlib import Path

import pytest
from safetensors import safe_open

from impala_llm.bench import engine
from impala_llm.bench._engine_work import (
    MAX_LENGTH,
    NUM_REQUESTS,
    Round,
    Worker,
    save_model,
    uneven_requests,
    workloads,
)
from impala_llm.bench.frame import BenchError
from tests.system.sglang import needs_sglang, sglang_python


@pytest.mark.parametrize(
    "options",
    [
        {"rounds": "x"},
        {"rounds": "0"},
        {"slots": "-1"},
        {"slots": "1.5"},
        {"only": "vllm"},
        {"models": "7b"},
        {"workloads": "even"},
    ],
)
def test_options_that_make_no_sense_are_refused(options: dict[str, str]) -> None:
    with pytest.raises(BenchError, match=f"--{next(iter(options))}"):
        engine.run(options)


def test_the_requests_are_as_uneven_as_announced() -> None:
    requests = uneven_requests()
    lengths = [length for _, length in requests]
    assert len(requests) == NUM_REQUESTS == 48
    assert round(sum(lengths) / 48) == 105
    assert max(lengths) == 384
    assert max(len(prompt) + length for prompt, length in requests) < MAX_LENGTH
    assert requests == uneven_requests()


def test_the_workloads_are_the_uneven_requests_the_same_sorted_and_sixteen_equal_ones() -> None:
    of = workloads()
    assert of["uneven"] == uneven_requests()
    lengths = [length for _, length in of["sorted"]]
    assert lengths == sorted(lengths) and sorted(of["sorted"]) == sorted(of["uneven"])
    assert [length for _, length in of["equal"]] == [105] * 16


@pytest.mark.parametrize(
    ("name", "parameters", "shape"),
    [
        ("5m", 5.25e6, (4, 256, 4096)),
        pytest.param("135m", 134.5e6, (30, 576, 49152), marks=pytest.mark.system),
    ],
)
def test_the_models_have_the_size_announced_and_no_token_that_ends_a_completion(
    tmp_path: Path, name: str, parameters: float, shape: tuple[int, int, int]
) -> None:
    save_model(tmp_path, name)
    total = 0
    with safe_open(tmp_path / "model.safetensors", framework="np") as file:
        for name in file.keys():  # noqa: SIM118
            size = 1
            for extent in file.get_slice(name).get_shape():
                size *= extent
            total += size
    assert total == pytest.approx(parameters, rel=0.002)
    config = json.loads((tmp_path / "config.json").read_text())
    assert (config["num_hidden_layers"], config["hidden_size"], config["vocab_size"]) == shape
    assert config.get("eos_token_id") is None


def test_each_peer_has_a_figure_of_each_workload_and_model() -> None:
    rounds = {"embedded": [Round(1.0, 1.0, 8)], "generate": [Round(4.0, 1.0, 8)], "continuous": [Round(2.0, 1.0, 8)]}
    assert engine.embedded_figures(rounds, "uneven", "5m") == {
        "embedded_vs_generate": 4.0,
        "embedded_vs_continuous": 2.0,
    }
    assert engine.embedded_figures(rounds, "equal", "135m") == {
        "embedded_vs_generate_equal_135m": 4.0,
        "embedded_vs_continuous_equal_135m": 2.0,
    }


def test_figures_and_rows_follow_from_the_rounds() -> None:
    rounds = {
        "ours": [Round(1.0, 0.5, 100), Round(2.0, 2.0, 100), Round(1.0, 1.0, 50)],
        "theirs": [Round(4.0, 1.0, 100), Round(2.0, 1.0, 100), Round(2.0, 1.0, 50)],
    }
    assert engine.ratio(rounds, "ours", "theirs") == 2.0  # of 4, 1 and 2
    first, second = engine.table(rounds, {"ours": "7"})
    assert first == {
        "contender": "ours",
        "version": "7",
        "tokens_per_s": 50.0,
        "min": 50.0,
        "max": 100.0,
        "tokens_per_cpu_s": 50.0,
    }
    assert (second["version"], second["tokens_per_s"]) == (None, 25.0)


@pytest.mark.system
def test_a_python_without_the_module_is_refused_where_it_was_named(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv("IMPALA_LLM_NOWHERE_PYTHON", raising=False)
    assert engine.python_with("json", None) == sys.executable
    assert engine.python_with("nowhere", None) is None
    assert "nowhere is left out: name a Python that has it with --nowhere-python" in capsys.readouterr().err
    with pytest.raises(BenchError, match="has no module nowhere: install it there"):
        engine.python_with("nowhere", sys.executable)
    monkeypatch.setenv("IMPALA_LLM_NOWHERE_PYTHON", "/no/such/python")
    with pytest.raises(BenchError, match="--nowhere-python is /no/such/python, which does not start"):
        engine.python_with("nowhere", None)


CONTENDER = """
import json, sys
print(json.dumps({"version": "1"}), flush=True)
for line in sys.stdin:
    requests = json.loads(line)["requests"]
    if len(requests) == 3:
        sys.exit("three are too many")
    tokens = [min(length, 9) for _, length in requests]
    print(json.dumps({"seconds": 2.0, "cpu_seconds": 1.0, "tokens": tokens}), flush=True)
"""


@pytest.mark.system
def test_a_contender_that_gives_other_tokens_or_dies_ends_the_run() -> None:
    with Worker("theirs", [sys.executable, "-c", CONTENDER]) as worker:
        assert worker.version == "1"
        assert worker.play([([1], 9), ([2], 3)]) == Round(2.0, 1.0, 12)
        with pytest.raises(BenchError, match=r"theirs gave \[9, 3\] tokens and not \[10, 3\]"):
            worker.play([([1], 10), ([2], 3)])
        with pytest.raises(BenchError, match="theirs ended with status 1; its output ends with: three are too many"):
            worker.play([([1], 1)] * 3)
    with pytest.raises(BenchError, match="theirs ended with status 4"):
        Worker("theirs", [sys.executable, "-c", "import sys; sys.exit(4)"])


@pytest.mark.system
def test_a_small_run_of_what_is_always_installed() -> None:
    requests = {"few": [([5, 6, 7], 4), ([8], 9), ([9, 9], 1)]}
    measured, versions = engine.measure_embedded("5m", requests, 2, 2, None)
    assert {name: [round_.tokens for round_ in played] for name, played in measured["few"].items()} == {
        "embedded": [14, 14],
        "generate": [14, 14],
        "continuous": [14, 14],
    }
    assert set(versions) == {"embedded", "generate", "continuous"}
    assert all(round_.seconds > 0 for played in measured["few"].values() for round_ in played)


@pytest.mark.system
@needs_sglang
def test_the_bare_client_gets_the_tokens_that_the_episodes_got() -> None:
    python = sglang_python()
    assert python is not None
    figures, rows = engine.run({"only": "sglang", "rounds": "1", "slots": "2", "sglang_python": python})
    assert set(figures) == {"actor_overhead"}
    assert [row["contender"] for row in rows] == ["actor", "bare"]
