import json
import sys
from pathlib import Path

import pytest

import impala_llm.bench
from impala_llm.bench.frame import BenchError, bench_names, main, run_bench

TOY = '''
"""A benchmark for tests."""

OPTIONS = {"size": "how much; default 2", "with_nan": "yes: a broken figure"}
PEERS = ("numpy", "a_module_that_nobody_installs")


def run(options):
    size = int(options.get("size", "2"))
    figures = {"things_per_s": 10 * size}
    if options.get("with_nan") == "yes":
        figures["broken"] = float("nan")
    print("noise on standard output")
    return figures, [{"peer": "ours", "ms": 1.5}, {"peer": "numpy", "ms": 2.0, "remark": "slow"}]
'''


@pytest.fixture(autouse=True)
def toy_bench(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "toy.py").write_text(TOY)
    (tmp_path / "_shared.py").write_text("")
    monkeypatch.setattr(impala_llm.bench, "__path__", [*impala_llm.bench.__path__, str(tmp_path)])
    monkeypatch.delitem(sys.modules, "impala_llm.bench.toy", raising=False)


def test_benchmarks_are_found_by_module_name() -> None:
    names = bench_names()
    assert "toy" in names
    assert "frame" not in names
    assert "_shared" not in names


def test_the_result_has_every_part() -> None:
    result = run_bench("toy", {"size": "3"})
    assert list(result) == ["bench", "machine", "versions", "figures", "rows", "left_out"]
    assert result["figures"] == {"things_per_s": 30.0}
    assert result["left_out"] == ["a_module_that_nobody_installs"]
    assert {"python", "impala_llm", "numpy"} <= set(result["versions"])  # type: ignore[call-overload]
    assert set(result["machine"]) == {"system", "cpu", "cores", "memory_gb", "gpus"}  # type: ignore[call-overload]


@pytest.mark.parametrize("arguments", [["--size", "4"], ["--size=4"]])
def test_the_last_line_is_one_json_object(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["toy", "--json", *arguments]) == 0
    last = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert last["bench"] == "toy"
    assert last["figures"] == {"things_per_s": 40.0}
    assert last["rows"][1] == {"peer": "numpy", "ms": 2.0, "remark": "slow"}


def test_without_json_a_table_comes_first(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["toy"]) == 0
    out = capsys.readouterr().out
    assert "things_per_s" in out.splitlines()[-1]
    assert "remark" in "\n".join(out.splitlines()[:-1])
    assert "a_module_that_nobody_installs" in out


def test_an_unknown_benchmark_lists_the_known_ones(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["toyy", "--json"]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert "unknown benchmark 'toyy'" in captured.err
    assert "toy" in captured.err.partition("benchmarks:")[2]


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["--sise", "4"], "does not know --sise: it takes --size (how much; default 2)"),
        (["--size"], "--size has no value"),
        (["--size", "--json"], "--size has no value"),
        (["size"], "unexpected argument 'size'"),
        (["--with-nan", "yes"], "'broken' is nan"),
    ],
)
def test_bad_arguments_and_results_are_named(
    arguments: list[str], sentence: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["toy", *arguments]) == 2
    assert sentence in capsys.readouterr().err


def test_run_bench_raises_what_main_prints() -> None:
    with pytest.raises(BenchError, match="unknown benchmark"):
        run_bench("nothing", {})


def test_no_name_prints_the_usage(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == 2
    assert "usage" in capsys.readouterr().err
    assert main(["--help"]) == 0
    assert "toy" in capsys.readouterr().out
