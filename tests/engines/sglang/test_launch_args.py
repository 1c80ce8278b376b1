"""A server before it starts: its command line, its environment variables, and settings that are refused."""

import asyncio
import json
from dataclasses import replace
from pathlib import Path

import pytest

from impala_llm.engines.base import EngineError
from impala_llm.engines.sglang.launch_args import (
    BadServerSettings,
    ServerSettings,
    check_model,
    check_python,
    command,
    environment,
)
from impala_llm.engines.sglang.server import SGLangServer
from tests.helpers import write_program


def value(words: list[str], option: str) -> str:
    assert words.count(option) == 1, words
    return words[words.index(option) + 1]


@pytest.fixture
def settings(tiny_model: Path, tmp_path: Path) -> ServerSettings:
    return ServerSettings(model=tiny_model, log=tmp_path / "log", python="some-python", max_length=100, max_running=8)


def test_the_command_line_on_a_cpu(settings: ServerSettings) -> None:
    words = command(settings, 4321)
    assert words[:3] == ["some-python", "-m", "sglang.launch_server"]
    assert all(isinstance(word, str) for word in words)
    assert value(words, "--model-path") == str(settings.model)
    assert (value(words, "--host"), value(words, "--port")) == ("127.0.0.1", "4321")
    assert (value(words, "--device"), value(words, "--dtype")) == ("cpu", "float32")
    assert value(words, "--attention-backend") == "torch_native"
    assert value(words, "--sampling-backend") == "pytorch"
    assert value(words, "--weight-version") == "0"
    assert value(words, "--mem-fraction-static") == "0.2"
    # A prompt must be 7 shorter than the context length: 100 tokens fit into 107 positions, and 8 histories into 856.
    assert value(words, "--context-length") == "107"
    assert value(words, "--max-total-tokens") == "856"
    assert value(words, "--max-running-requests") == "8"
    assert {"--disable-radix-cache", "--sleep-on-idle", "--incremental-streaming-output"} <= set(words)
    assert "--tp" not in words


def test_the_command_line_on_gpus_leaves_memory_and_kernels_to_sglang(settings: ServerSettings) -> None:
    words = command(replace(settings, device="cuda", dtype="bfloat16", tensor_parallel=2), 1)
    assert (value(words, "--device"), value(words, "--dtype"), value(words, "--tp")) == ("cuda", "bfloat16", "2")
    absent = {"--attention-backend", "--sampling-backend", "--mem-fraction-static", "--max-total-tokens"}
    assert not absent & set(words)
    assert "--skip-server-warmup" not in words


def test_the_settings_reach_the_command_line_and_extra_arguments_come_last(settings: ServerSettings) -> None:
    changed = replace(
        settings,
        radix_cache=True,
        memory_fraction=0.5,
        max_total_tokens=1000,
        stream_interval=3,
        extra_arguments=("--dtype", "bfloat16"),
    )
    words = command(changed, 1)
    assert "--disable-radix-cache" not in words
    assert value(words, "--mem-fraction-static") == "0.5"
    assert value(words, "--max-total-tokens") == "1000"
    assert value(words, "--stream-interval") == "3"
    assert words[-2:] == ["--dtype", "bfloat16"]


def test_variables(settings: ServerSettings) -> None:
    inherited = {"HOME": "/nowhere", "OMP_NUM_THREADS": "16", "CUDA_VISIBLE_DEVICES": "0,1"}
    on_cpu = environment(replace(settings, environment={"MKL_NUM_THREADS": "3"}), inherited)
    assert on_cpu["HOME"] == "/nowhere"
    assert (on_cpu["SGLANG_USE_CPU_ENGINE"], on_cpu["OMP_NUM_THREADS"], on_cpu["HF_HUB_OFFLINE"]) == ("1", "1", "1")
    assert on_cpu["MKL_NUM_THREADS"] == "3"
    on_gpu = environment(replace(settings, device="cuda", environment={"CUDA_VISIBLE_DEVICES": "1"}), inherited)
    assert "SGLANG_USE_CPU_ENGINE" not in on_gpu
    assert (on_gpu["CUDA_VISIBLE_DEVICES"], on_gpu["OMP_NUM_THREADS"]) == ("1", "16")


def test_the_key_is_no_word_that_others_can_read(settings: ServerSettings) -> None:
    assert len(settings.key) == 32 and replace(settings).key == settings.key
    assert settings.key in environment(settings, {}).values()
    assert settings.key not in " ".join(command(settings, 1)) and settings.key not in repr(settings)


def test_a_wrong_model_directory_is_named_before_anything_starts(settings: ServerSettings, tmp_path: Path) -> None:
    check_model(settings)
    missing = replace(settings, model=tmp_path / "missing")
    with pytest.raises(BadServerSettings, match="missing does not exist: model.path"):
        asyncio.run(SGLangServer(missing).start())
    empty = tmp_path / "empty"
    empty.mkdir()
    with pytest.raises(BadServerSettings, match="empty has no config.json"):
        check_model(replace(settings, model=empty))
    (empty / "config.json").write_text("{}")
    with pytest.raises(BadServerSettings, match="empty has no weights"):
        check_model(replace(settings, model=empty))
    (empty / "model.safetensors").write_bytes(b"")
    check_model(replace(settings, model=empty))
    (empty / "config.json").write_text("[broken")
    with pytest.raises(BadServerSettings, match="config.json is not a model's configuration"):
        check_model(replace(settings, model=empty))


def test_a_history_longer_than_the_model_is_refused_with_the_longest_that_fits(
    settings: ServerSettings, tmp_path: Path
) -> None:
    (tmp_path / "model.safetensors").write_bytes(b"")
    for name in ("max_position_embeddings", "n_positions"):
        for whole in ({name: 128}, {"text_config": {name: 128}}):
            (tmp_path / "config.json").write_text(json.dumps(whole))
            check_model(replace(settings, model=tmp_path, max_length=121))
            with pytest.raises(BadServerSettings, match="engine.max_length=122: .* 128 positions.* at most 121"):
                check_model(replace(settings, model=tmp_path, max_length=122))


def interpreter(path: Path, code: str) -> str:
    """A program that runs this code, whatever it is asked."""
    return str(write_program(path, code))


@pytest.mark.parametrize(
    ("code", "said"),
    [
        ("raise ModuleNotFoundError('importlib.metadata.PackageNotFoundError: sglang')", "has no sglang installed"),
        ("print('0.5.20')", "has SGLang 0.5.20.*install 0.5.21 or newer"),
        ("print('0.5')", "has SGLang 0.5,"),
        ("raise SystemExit('nonsense')", "cannot tell its SGLang: nonsense"),
    ],
)
def test_an_interpreter_without_a_fitting_sglang_is_named_with_the_remedy(code: str, said: str, tmp_path: Path) -> None:
    python = interpreter(tmp_path / "python", code)
    with pytest.raises(BadServerSettings, match=f"engine.python={python} {said}") as caught:
        asyncio.run(check_python(python))
    assert "tools/install_sglang_cpu.sh" in str(caught.value)


def test_a_missing_interpreter_is_named_with_the_remedy() -> None:
    with pytest.raises(EngineError, match="engine.python=/no/such/python: there is no such program.*install_sglang"):
        asyncio.run(check_python("/no/such/python"))


@pytest.mark.parametrize("version", ["0.5.21", "0.5.21.post1", "0.5.22rc1", "0.6.0.dev3+g12ab", "1.0", "0.0.0.dev0"])
def test_newer_versions_and_unknown_ones_are_welcome(version: str, tmp_path: Path) -> None:
    asyncio.run(check_python(interpreter(tmp_path / "python", f"print({version!r})")))


def test_what_was_never_started_is_dead_and_can_be_closed(settings: ServerSettings) -> None:
    async def scenario() -> None:
        server = SGLangServer(settings)
        assert "not started" in await server.wait_dead()
        await server.close()

    asyncio.run(scenario())
