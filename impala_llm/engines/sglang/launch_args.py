"""Launch of an SGLang server: settings, checks of them, command line and variables.

Invariant: settings that `check_model` and `check_python` accept can only fail for reasons that only SGLang can find.
"""

import asyncio
import importlib.util
import json
import os
import re
import secrets
import shutil
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from impala_llm.checks.known_models import num_positions
from impala_llm.engines.base import EngineError, ServerUnfit
from impala_llm.engines.sglang.guard import KEY_VARIABLE
from impala_llm.settings import PACKAGE

HOST = "127.0.0.1"
PROBE_S = 60.0
"""Seconds for an interpreter to report its version of SGLang."""
OLDEST = (0, 5, 21)
"""Oldest version of SGLang: token spans came with 0.5.19, begin_weight_update with 0.5.21."""
SPARE_POSITIONS = 7
"""Positions of the context length that SGLang keeps free: 7 after a prompt, 2 after prompt and completion."""
INSTALL = "engine.python names the interpreter; tools/install_sglang_cpu.sh makes one that has SGLang for a CPU"


class ServerError(EngineError):
    """SGLang server that cannot start, or that is dead. The message says which, why, and has its last output."""


class BadServerSettings(ServerError, ServerUnfit):
    """Settings with which no server can start."""


@dataclass(frozen=True, kw_only=True)
class ServerSettings:
    """Settings of a server."""

    model: Path
    """Hugging Face directory with configuration, tokenizer and weights."""
    log: Path
    """File to which the server's output is appended."""
    python: str = sys.executable
    """Interpreter that has SGLang; a path, or a name on PATH."""
    device: Literal["cpu", "cuda"] = "cpu"
    dtype: str = "float32"
    tensor_parallel: int = 1
    """GPUs that share the model."""
    max_length: int = 2048
    """Longest token history including the completion."""
    max_running: int = 64
    """Requests that are decoded together; further ones wait."""
    memory_fraction: float | None = None
    """Share of the device's memory for weights and KV cache; None: 0.2 on a CPU, SGLang's choice on a GPU."""
    max_total_tokens: int | None = None
    """Room of the KV cache, in tokens; None: `max_running` full histories on a CPU, what fits on a GPU."""
    radix_cache: bool = False
    """Keep keys and values of ended requests for later ones with the same prefix. A change of weights must flush it."""
    stream_interval: int = 16
    """Tokens between two messages of a streamed completion."""
    extra_arguments: tuple[str, ...] = ()
    """Further arguments of SGLang's command line; they come last and override others."""
    environment: Mapping[str, str] = field(default_factory=dict)
    """Environment variables, such as CUDA_VISIBLE_DEVICES; they override the owner's and ours."""
    key: str = field(default_factory=lambda: secrets.token_hex(16), repr=False)
    """API key, without which the server answers only probes; see docs/engines.md."""
    start_timeout_s: float = 300.0


def find_python() -> str:
    """Find an interpreter: this one, or, where it lacks SGLang, that of tools/install_sglang_cpu.sh."""
    made = PACKAGE.parent / ".venv-sglang" / "bin" / "python"
    if importlib.util.find_spec("sglang") is None and made.is_file():
        return str(made)
    return sys.executable


def command(settings: ServerSettings, port: int) -> list[str]:
    """Make SGLang's command line. Its streams are incremental: every message has only new tokens."""
    context = settings.max_length + SPARE_POSITIONS
    words: list[object] = [
        *(
            settings.python,
            "-m",
            "sglang.launch_server",
            "--model-path",
            settings.model,
            "--host",
            HOST,
            "--port",
            port,
        ),
        *("--device", settings.device, "--dtype", settings.dtype, "--context-length", context),
        *("--max-running-requests", settings.max_running, "--weight-version", 0),
        *("--incremental-streaming-output", "--stream-interval", settings.stream_interval),
        # Without the first, an idle scheduler uses a whole core; without the second, every request writes a line.
        *("--sleep-on-idle", "--log-level-http", "warning"),
    ]
    max_total_tokens, memory_fraction = settings.max_total_tokens, settings.memory_fraction
    if settings.device == "cpu":
        words += ["--attention-backend", "torch_native", "--sampling-backend", "pytorch", "--skip-server-warmup"]
        # The "device memory" of a CPU is the host's, which other processes use too.
        max_total_tokens = max_total_tokens or settings.max_running * context
        memory_fraction = memory_fraction or 0.2
    if settings.tensor_parallel > 1:
        words += ["--tp", settings.tensor_parallel]
    if memory_fraction is not None:
        words += ["--mem-fraction-static", memory_fraction]
    if max_total_tokens is not None:
        words += ["--max-total-tokens", max_total_tokens]
    if not settings.radix_cache:
        words.append("--disable-radix-cache")
    return [*map(str, words), *settings.extra_arguments]


def environment(settings: ServerSettings, inherited: Mapping[str, str]) -> dict[str, str]:
    """Make the server's variables: the inherited ones, overridden by ours, overridden by those of the settings."""
    # The key is not on the command line, which every user of this host can read.
    ours = {"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false", KEY_VARIABLE: settings.key}
    if settings.device == "cpu":
        # One thread: with two, each token of a small model costs ten times as long on two cores.
        ours |= {"SGLANG_USE_CPU_ENGINE": "1", "OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
    return {**inherited, **ours, **settings.environment}


def check_model(settings: ServerSettings) -> None:
    """Check a model directory. Raises BadServerSettings unless it has configuration, weights and enough positions."""
    model = settings.model
    if not model.is_dir():
        raise BadServerSettings(f"model directory {model} does not exist: model.path names a Hugging Face directory")
    if not (model / "config.json").is_file():
        raise BadServerSettings(
            f"model directory {model} has no config.json: model.path names a Hugging Face directory"
        )
    if not any(model.glob("*.safetensors")) and not any(model.glob("*.bin")):
        raise BadServerSettings(f"model directory {model} has no weights (*.safetensors or *.bin)")
    check_positions(model, settings.max_length)


def check_positions(model: Path, max_length: int) -> None:
    """Check the configuration of a model. Raises BadServerSettings unless it has positions for such histories."""
    try:
        positions = num_positions(json.loads((model / "config.json").read_bytes()))
    except (OSError, ValueError, AttributeError, TypeError) as error:
        raise BadServerSettings(f"{model / 'config.json'} is not a model's configuration: {error}") from error
    if positions is not None and positions < max_length + SPARE_POSITIONS:
        raise BadServerSettings(
            f"engine.max_length={max_length}: {model} has {positions} positions, of which SGLang keeps "
            f"{SPARE_POSITIONS} free; set it to at most {positions - SPARE_POSITIONS}"
        )


async def check_python(python: str) -> None:
    """Check an interpreter. Raises BadServerSettings unless it exists and has a recent SGLang."""
    if shutil.which(python) is None:
        raise BadServerSettings(f"engine.python={python}: there is no such program. {INSTALL}")
    clean = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    question = "from importlib.metadata import version; print(version('sglang'))"
    probe = await asyncio.create_subprocess_exec(
        *(python, "-c", question), stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE, env=clean
    )
    try:
        async with asyncio.timeout(PROBE_S):
            answer, errors = await probe.communicate()
    except TimeoutError:
        raise BadServerSettings(
            f"engine.python={python} did not answer within {PROBE_S:.0f} s: is it a Python?"
        ) from None
    finally:
        if probe.returncode is None:
            probe.kill()
            await probe.wait()
    words = answer.decode(errors="replace").strip()
    if probe.returncode != 0:
        if b"PackageNotFoundError" in errors:
            raise BadServerSettings(f"engine.python={python} has no sglang installed. {INSTALL}")
        said = errors.decode(errors="replace").strip().splitlines()[-1:]
        raise BadServerSettings(f"engine.python={python} cannot tell its SGLang: {' '.join(said)}. {INSTALL}")
    if not words:
        raise BadServerSettings(f"engine.python={python} does not tell its SGLang: is it a Python? {INSTALL}")
    # A build from source may report 0.0.0: its version is unknown.
    if (0, 0, 0) < _version(words) < OLDEST:
        raise BadServerSettings(
            f"engine.python={python} has SGLang {words}, which lacks calls that are needed: install "
            f"{'.'.join(map(str, OLDEST))} or newer. {INSTALL}"
        )


def _version(text: str) -> tuple[int, ...]:
    """Parse the leading numbers of a version: (0, 5, 21) of "0.5.21.post1"."""
    start = re.match(r"\d+(\.\d+)*", text)
    return tuple(int(part) for part in start.group().split("."))[:3] if start else ()
