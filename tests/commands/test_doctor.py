"""`impala-llm doctor`: real probes of this host, and what is said of one on which something is wrong."""

import copy
import json
import os
import shutil
import socket
import sys
import uuid
from collections.abc import Callable
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
from safetensors.numpy import load_file, save_file

from impala_llm import cli
from impala_llm.commands import doctor, model_memory
from impala_llm.config import load
from impala_llm.pipeline.network.keys import make_keys
from impala_llm.settings import ASSETS
from tests.helpers import write_program

pytestmark = [pytest.mark.system, pytest.mark.xdist_group("doctor")]  # which share what the processes said

Examine = Callable[..., tuple[int, dict[str, Any]]]
SAID: dict[Any, dict[str, Any]] = {}
"""Answers of the processes that import torch or transformers, by what they were asked: each takes seconds."""


@pytest.fixture(autouse=True)
def probes_that_run_once(monkeypatch: pytest.MonkeyPatch) -> None:
    run_probe = doctor.run_probe

    def probed(code: str, *arguments: str, python: str = sys.executable, as_json: bool = True) -> dict[str, Any]:
        if code not in (doctor.TORCH_PROBE, doctor.CONFIG_PROBE):
            return run_probe(code, *arguments, python=python, as_json=as_json)
        key = (code, arguments, python, as_json, os.environ.get("CUDA_VISIBLE_DEVICES"))
        if key not in SAID:
            SAID[key] = run_probe(code, *arguments, python=python, as_json=as_json)
        return copy.deepcopy(SAID[key])

    monkeypatch.setattr(doctor, "run_probe", probed)


@pytest.fixture
def without_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    """No two ranks are started, which takes seconds, where the test is of something else."""
    monkeypatch.setattr(doctor, "process_group", lambda *_: doctor.Finding("process group", "not tried"))


@pytest.fixture
def examine(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Examine:
    """Calls the command with settings; returns its status and its findings by part."""

    def call(*settings: str) -> tuple[int, dict[str, Any]]:
        name = f"test-{uuid.uuid4().hex[:12]}"
        words = ["experiment=toy", f"run.name={name}", f"run.dir={tmp_path / 'out'}", *settings]
        code = cli.main(["doctor", "--json", *words])
        printed = json.loads(capsys.readouterr().out)
        assert printed["ok"] == (code == 0) == (not any(each["problems"] for each in printed["findings"]))
        assert not (tmp_path / "out").exists() and not list(Path("/dev/shm").glob(f"*{name}*"))
        return code, {each["part"]: each for each in printed["findings"]}

    return call


def test_a_host_on_which_nothing_is_wrong(examine: Examine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    code, found = examine("actor.num_actors=0", "learner.num_ranks=2")
    assert code == 0, found
    assert "python 3." in found["versions"]["state"] and "torch 2." in found["versions"]["state"]
    assert f"{shutil.disk_usage('/dev/shm').total / 1e9:.1f} GB" in found["shared memory"]["state"]
    assert "gloo, a sum over 2 ranks" in found["process group"]["state"]
    assert found["environment"]["state"] == "parrot, tasks: train 600, validation 200, test 200"
    assert found.keys() >= {"GPUs", "model", "device", "engine", "keys", "ports", "disk", "open files", "model memory"}


@pytest.mark.usefixtures("without_ranks")
def test_a_source_folder_that_is_not_installed_is_named(examine: Examine, monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> str:
        raise PackageNotFoundError(name)

    monkeypatch.setattr(doctor, "version", lambda name: missing(name) if name == "impala_llm" else version(name))
    code, found = examine("actor.num_actors=0")
    assert code == 1
    assert "impala_llm from its source folder" in found["versions"]["state"]
    assert "pip install -e ." in found["versions"]["problems"][0]


def test_each_thing_that_is_wrong_is_named_with_what_to_do(
    examine: Examine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = Path(shutil.copytree(ASSETS / "tiny_shopper", tmp_path / "model"))
    (model / "tokenizer.json").write_text("{")
    make_keys(tmp_path / "keys")
    # A GPU that this CPU build of torch cannot use.
    (tmp_path / "bin").mkdir()
    gpu = "import sys; print('0' if '--query-gpu=index' in sys.argv else 'Tesla T4, 15360 MiB, 535.1, 7.5')"
    write_program(tmp_path / "bin" / "nvidia-smi", gpu)
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}:{os.environ['PATH']}")
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "nosuch0")
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        code, found = examine(
            f"model.path={model}",
            "env=webshop",
            "engine=sglang",
            f"engine.python={shutil.which('python3')}",
            f"pipeline.bind=tcp://127.0.0.1:{port}",
            f"pipeline.keys={tmp_path / 'keys'}",
            "replay.capacity_mb=1000000",
        )
    assert code == 1
    assert "Tesla T4" in found["GPUs"]["state"]
    for part, words in {
        "GPUs": ["CPU build", "install its CUDA build"],
        "model": ["tokenizer.json", "copy the model again"],
        "device": ["actor.num_actors=1 servers", "lower one of these settings"],
        "engine": ["has no sglang installed"],
        "ports": [f"port {port} cannot be listened at"],
        "shared memory": ["lower what these settings take"],
    }.items():
        for word in words:
            assert word in found[part]["problems"][0], found[part]
    assert found["keys"]["problems"] == []


def test_a_process_group_without_a_network_is_wrong(examine: Examine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "nosuch0")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    code, found = examine("learner.num_ranks=2")
    assert code == 1
    [problem] = found["process group"]["problems"]
    assert "GLOO_SOCKET_IFNAME" in problem and "nosuch0" in problem
    _, found = examine()
    assert found["process group"]["problems"] == []
    assert "not tried: a learner of one process needs none" in found["process group"]["state"]


def test_the_memory_of_a_small_model_is_in_megabytes() -> None:
    state, _ = model_memory.look(load(["model=tiny_shopper", "actor.num_actors=1"]), [])
    assert state.startswith("12 MB for weights, gradients and optimizer of a process") and " 0.0 GB" not in state
    assert model_memory.look(load(["experiment=toy"]), [])[0].startswith("not counted: ")


@pytest.mark.usefixtures("without_ranks")
def test_a_model_that_memory_cannot_hold_is_wrong_and_sharding_is_named(
    examine: Examine, monkeypatch: pytest.MonkeyPatch
) -> None:
    parameters = sum(t.size for t in load_file(ASSETS / "tiny_shopper" / "model.safetensors").values())
    # Two ranks with four float32 numbers a parameter each, an engine with one, and a checkpoint's copy of three, in
    # memory for eight: too little where each rank holds all of it, enough where they share it.
    memory = psutil.virtual_memory()._replace(total=8 * 4 * parameters)
    monkeypatch.setattr(psutil, "virtual_memory", lambda: memory)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    settings = ["model=tiny_shopper", "env=webshop", "learner.num_ranks=2", "actor.num_actors=1"]
    _, found = examine(*settings)
    [problem] = found["model memory"]["problems"]
    assert "learner.num_ranks=2 and actor.num_actors=1" in problem and "learner.sharding=fsdp2" in problem
    _, found = examine(*settings, "learner.sharding=fsdp2")
    assert found["model memory"]["problems"] == []


def test_a_host_of_actors_that_cannot_hold_their_engines_is_wrong(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Four bytes a parameter of each; a GPU that two of four engines share has room for one and a half."""
    parameters = sum(t.size for t in load_file(ASSETS / "tiny_shopper" / "model.safetensors").values())
    memory = psutil.virtual_memory()._replace(total=10 * parameters)
    monkeypatch.setattr(psutil, "virtual_memory", lambda: memory)
    make_keys(tmp_path / "keys")
    settings = ["model=tiny_shopper", "env=webshop", "pipeline.connect=tcp://host:1", f"pipeline.keys={tmp_path}/keys"]
    one, four = (load([*settings, f"actor.num_actors={number}"]) for number in (1, 4))
    assert model_memory.look_at_engines(one, [])[1] == []
    [problem] = model_memory.look_at_engines(four, [])[1]
    assert (
        "the engines of 4 actors take" in problem and "lower actor.num_actors, or set engine.dtype=bfloat16" in problem
    )
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1")
    [problem] = model_memory.look_at_engines(four, 2 * [{"gb": 6e-9 * parameters}])[1]
    assert problem.startswith("GPU 0 has ") and "the engines of 2 actors take" in problem
    [problem] = model_memory.look_at_engines(four, 4 * [{"gb": 3e-9 * parameters}])[1]
    assert "the engines of 2 actors" in problem and "lower" not in problem, "one does not fit either"
    assert model_memory.look_at_engines(load([*settings, "engine=sglang"]), []) == (
        "not counted: no embedded engines",
        [],
    )


@pytest.mark.usefixtures("without_ranks")
@pytest.mark.parametrize(
    ("words", "offered", "useless"),
    [
        ([], ["model.lora.rank=16"], ["fsdp2", "num_ranks, ", "num_actors,"]),
        (["learner.num_ranks=2"], ["learner.sharding=fsdp2", "model.lora.rank=16"], ["more ranks"]),
        (["learner.num_ranks=2", "learner.sharding=fsdp2"], ["model.lora.rank=16"], ["set learner.sharding"]),
        (["actor.num_actors=3"], ["lower actor.num_actors", "model.lora.rank=16"], ["fsdp2"]),
    ],
)
def test_only_what_lowers_the_memory_of_the_host_is_offered(
    monkeypatch: pytest.MonkeyPatch, words: list[str], offered: list[str], useless: list[str]
) -> None:
    """More ranks on one host share what a single one holds: the sum stays."""
    memory = psutil.virtual_memory()._replace(total=1000)
    monkeypatch.setattr(psutil, "virtual_memory", lambda: memory)
    config = load(["model=tiny_shopper", "env=webshop", "actor.num_actors=1", *words])
    [problem] = doctor.learner_memory(config, {"gpus": []}).problems
    fix = problem.rpartition(": ")[2]
    assert all(word in fix for word in [*offered, "smaller model or more memory"]), problem
    assert not any(word in fix for word in useless), problem


def test_a_single_rank_is_not_told_to_be_fewer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    memory = psutil.virtual_memory()._replace(total=3 * (LAYERS + WHOLE))
    monkeypatch.setattr(psutil, "virtual_memory", lambda: memory)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    path = save_shapes(tmp_path / "model")
    words = ["model=pretrained", f"model.path={path}", "actor.num_actors=1", "learner.checkpoints_kept=0"]
    [problem] = doctor.learner_memory(load(words), {"gpus": [{"name": "a GPU", "gb": 1e3, "error": ""}]}).problems
    assert "at its start" in problem and "lower learner.num_ranks" not in problem


@pytest.mark.parametrize("key", ["algorithm.reference", "algorithm.credit.teacher"])
def test_a_model_that_the_host_cannot_read_for_its_gpus_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, key: str
) -> None:
    memory = psutil.virtual_memory()._replace(total=3 * (LAYERS + WHOLE))
    monkeypatch.setattr(psutil, "virtual_memory", lambda: memory)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    method = "algorithm.kl_coef=0.1" if key == "algorithm.reference" else "algorithm.credit=distillation"
    words = [
        "model.path=tiny_shopper",
        method,
        f"{key}={save_shapes(tmp_path / 'other')}",
        "learner.checkpoints_kept=0",
    ]
    config = load(["experiment=toy", "actor.num_actors=1", *words])
    [problem] = doctor.learner_memory(config, {"gpus": [{"name": "a GPU", "gb": 1e3, "error": ""}]}).problems
    assert f"where a process reads {key}: set {key} to a smaller model, or take more memory" in problem


LAYERS, WHOLE = 2 * 1000 * 1000, 2 * 1000 * 500 + 1000
"""Parameters of `save_shapes`: of the layers' matrices, and all others."""
TINY = sum(t.size for t in load_file(ASSETS / "tiny_shopper" / "model.safetensors").values())


def save_shapes(folder: Path, vocab_size: int = 500) -> Path:
    """Write the weights of a model, alone."""
    shapes = {
        "model.embed_tokens.weight": (vocab_size, 1000),
        "lm_head.weight": (vocab_size, 1000),
        "model.layers.0.mlp.up_proj.weight": (1000, 1000),
        "model.layers.1.mlp.up_proj.weight": (1000, 1000),
        "model.norm.weight": (1000,),
    }
    folder.mkdir()
    save_file({name: np.zeros(shape, np.float16) for name, shape in shapes.items()}, folder / "model.safetensors")
    (folder / "config.json").write_text("{}")
    return folder


FSDP2, KL = ["learner.num_ranks=2", "learner.sharding=fsdp2"], ["algorithm.kl_coef=0.1"]


@pytest.mark.parametrize(
    ("words", "gpu", "host", "said"),
    [
        # Four processes of a rank: a quarter of the layers' matrices, and all else.
        (["learner.tensor_parallel=4"], 16 * (LAYERS / 4 + WHOLE) + 1000, 16, None),
        (["learner.tensor_parallel=4"], 16 * (LAYERS / 4 + WHOLE) - 1000, 16, ["GPU 0 ", "tensor_parallel=4"]),
        # An engine in bfloat16 on the GPU of the only rank.
        (["engine.dtype=bfloat16"], 18 * (LAYERS + WHOLE) + 1000, 12, None),
        (["engine.dtype=bfloat16"], 18 * (LAYERS + WHOLE) - 1000, 12, ["GPU 0 ", "1 engine "]),
        # The processes of a rank read the whole policy and keep it until the last has read it.
        (["learner.tensor_parallel=4"], 1e12, 15, ["where 4 processes read the whole policy each: take a smaller"]),
        (["learner.tensor_parallel=2", "learner.num_ranks=2"], 1e12, 16, None),
        (["learner.tensor_parallel=2", "learner.num_ranks=2"], 1e12, 15, ["4 processes ", "lower learner.num_ranks"]),
        # Ranks read it one after another; a checkpoint copies weights and moments.
        (["learner.num_ranks=4"], 1e12, 12, None),
        (["learner.num_ranks=4"], 1e12, 11, ["copy for a checkpoint", "checkpoints_kept=0"]),
        (["learner.num_ranks=4", "learner.checkpoints_kept=0"], 1e12, 4, None),
        (["learner.num_ranks=4", "learner.checkpoints_kept=0"], 1e12, 3, ["where a process reads the whole policy"]),
        (["learner.num_ranks=4", "learner.sharding=fsdp2"], 1e12, 12, None),
        (["learner.num_ranks=4", "learner.sharding=fsdp2"], 1e12, 11, ["copy for a checkpoint", "checkpoints_kept=0"]),
        (["learner.num_ranks=4", "learner.sharding=fsdp2", "learner.checkpoints_kept=0"], 1e12, 4, None),
        (["learner.num_ranks=4", "learner.sharding=fsdp2", "learner.checkpoints_kept=0"], 1e12, 3, ["at its start"]),
        (["learner.num_ranks=2", "learner.sharding=fsdp2", "learner.cpu_offload=true"], 1e6, 28, None),
        (["learner.num_ranks=2", "learner.sharding=fsdp2", "learner.cpu_offload=true"], 1e6, 27, ["checkpoint"]),
        # The policy that training began with as the reference: whole on every rank, whatever these share.
        ([*FSDP2, *KL], (8 + 4) * (LAYERS + WHOLE) + 1000, 12, None),
        ([*FSDP2, *KL], (8 + 4) * (LAYERS + WHOLE) - 1000, 12, ["GPU 0 ", "GB for algorithm.reference, whole in each"]),
        ([*FSDP2, *KL, "learner.cpu_offload=true"], 4 * (LAYERS + WHOLE) + 1000, 28, None),
        ([*FSDP2, *KL, "learner.cpu_offload=true"], 4 * (LAYERS + WHOLE) - 1000, 28, ["GPU 0 "]),
        # They read it one after another.
        ([*FSDP2, *KL, "learner.checkpoints_kept=0"], 1e12, 4, None),
        ([*FSDP2, *KL, "learner.checkpoints_kept=0"], 1e12, 3, ["at its start"]),
        # With LoRA it is the policy without its adapters.
        ([*FSDP2, *KL, "model.lora.rank=4"], 2 * (LAYERS + WHOLE) + 1000, 4, None),
    ],
)
def test_memory_counts_what_each_gpu_and_the_host_must_hold(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    words: list[str],
    gpu: float,
    host: float,
    said: list[str] | None,
) -> None:
    """gpu: bytes of a GPU. host: of this host, a parameter. said: words of the problem; None: there is none."""
    memory = psutil.virtual_memory()._replace(total=int(host * (LAYERS + WHOLE)))
    monkeypatch.setattr(psutil, "virtual_memory", lambda: memory)
    config = load(["model=pretrained", f"model.path={save_shapes(tmp_path / 'model')}", "actor.num_actors=1", *words])
    num_gpus = config.learner.num_processes
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", ",".join(map(str, range(num_gpus))))
    if num_gpus > 1:  # only a single one is shared with the engine
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", ",".join(map(str, range(num_gpus + 1))))
    gpus = [{"name": "a GPU", "gb": gpu / 1e9, "error": ""} for _ in range(num_gpus)] + [{"gb": 1e3}]
    problems = doctor.learner_memory(config, {"gpus": gpus}).problems
    if said is None:
        assert problems == []
    else:
        assert len(problems) == 1 and all(word in problems[0] for word in said), problems


@pytest.mark.parametrize(
    "words",
    [["algorithm.kl_coef=0.1", "algorithm.reference"], ["algorithm.credit=distillation", "algorithm.credit.teacher"]],
)
def test_memory_counts_other_models_by_their_own_size(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, words: list[str]
) -> None:
    """On a CPU: of each of two ranks weights, gradients, moments and the other model, and the engine's weights."""
    held = 2 * (16 * TINY + 4 * (LAYERS + WHOLE)) + 4 * TINY
    path, key = save_shapes(tmp_path / "other"), words[-1]
    settings = ["model.path=tiny_shopper", "learner.num_ranks=2", "actor.num_actors=1", "learner.checkpoints_kept=0"]
    config = load(["experiment=toy", *settings, *words[:-1], f"{key}={path}"])
    for spare, is_enough in ((1000, True), (-1000, False)):
        memory = psutil.virtual_memory()._replace(total=held + spare)
        monkeypatch.setattr(psutil, "virtual_memory", lambda memory=memory: memory)
        found = doctor.learner_memory(config, {"gpus": []})
        assert f"for {key}" in found.state and (found.problems == []) is is_enough, found


@pytest.mark.parametrize(
    ("words", "gpu", "fix"),
    [
        # Of a host: the reference alone is larger than it; it has room, and the policy does not beside it.
        (["algorithm.reference="], None, "set algorithm.reference to a smaller model, or take more memory"),
        (["algorithm.reference=", "host"], None, "set algorithm.reference to a smaller model, or set model.lora.rank="),
        (["algorithm.credit=distillation", "algorithm.credit.teacher="], None, "set algorithm.credit.teacher to a "),
        # Of a GPU.
        (["algorithm.reference="], 30, "set algorithm.reference to a smaller model, or take a larger GPU"),
        (
            ["algorithm.reference=", "learner.tensor_parallel=2"],
            50,
            "set algorithm.reference to a smaller model, or set learner.sharding=fsdp2 and learner.tensor_parallel=1, "
            "with more ranks, or take a smaller model or a larger GPU",
        ),
        # The policy that training began with, which LoRA makes unnecessary.
        (
            ["algorithm.reference=null", "learner.num_ranks=8", "learner.sharding=fsdp2"],
            2,
            "set model.lora.rank=16, whose policy without adapters serves as it, or set algorithm.reference to a sm",
        ),
    ],
)
def test_another_model_that_takes_the_larger_part_is_named_and_a_smaller_one_is_offered(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, words: list[str], gpu: int | None, fix: str
) -> None:
    """Neither sharding nor LoRA makes one that a setting names smaller.

    Args:
        gpu: MB of each; None: there is none.
    """
    other = 4 * (LAYERS + 2 * 5000 * 1000 + 1000)
    memory = psutil.virtual_memory()._replace(total=10**12 if gpu else other + 1000 if "host" in words else other - 1)
    monkeypatch.setattr(psutil, "virtual_memory", lambda: memory)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", ",".join(map(str, range(9))))
    path = save_shapes(tmp_path / "other", vocab_size=5000)
    words = [f"{word}{path}" if word.endswith("=") else word for word in words if word != "host"]
    config = load(["experiment=toy", "model.path=tiny_shopper", "actor.num_actors=1", "algorithm.kl_coef=0.1", *words])
    gpus = [{"name": "a GPU", "gb": gpu / 1e3, "error": ""}] * 9 if gpu else []
    [problem] = doctor.learner_memory(config, {"gpus": gpus}).problems
    key = "algorithm.credit.teacher" if "credit.teacher" in str(words) else "algorithm.reference"
    assert f" for {key}, whole in each process" in problem and problem.partition(": ")[2].startswith(fix), problem


@pytest.mark.parametrize(
    ("words", "offered"),
    [
        (["actor.num_actors=0", "learner.num_ranks=2"], "lower learner.num_ranks=2"),
        (
            ["actor.num_actors=0", "learner.num_ranks=2", "learner.tensor_parallel=2"],
            "lower learner.num_ranks=2 or learner.tensor_parallel=2",
        ),
        (["actor.num_actors=3"], "lower actor.num_actors=3 (one plays"),
        (["actor.num_actors=1", "learner.tensor_parallel=2"], "actor.max_episodes) or learner.tensor_parallel=2"),
    ],
)
def test_more_processes_than_cores_are_named_by_the_settings_that_can_be_lowered(
    monkeypatch: pytest.MonkeyPatch, words: list[str], offered: str
) -> None:
    monkeypatch.setattr(doctor, "num_cores", lambda: 1)
    [problem] = doctor.processes(load(["experiment=toy", *words])).problems
    said = problem.partition("share 1 cores: ")[2]
    assert offered in said and ("num_actors" in said) == ("actor.num_actors=0" not in words), problem
    assert ("num_ranks" in said) == ("learner.num_ranks=2" in words), problem


@pytest.mark.usefixtures("without_ranks")
def test_settings_that_are_refused_leave_the_checks_of_the_host(examine: Examine) -> None:
    code, found = examine("learner.batch_size=-1", "replay.capacity_mb=-2")
    assert code == 1
    first, second = found["settings"]["problems"]
    assert "learner.batch_size=-1" in first and "replay.capacity_mb=-2" in second
    others = ["versions", "GPUs", "compiler", "shared memory", "disk", "open files", "process group"]
    assert [part for part in others if found[part]["problems"]] == [] and "model" not in found


@pytest.mark.usefixtures("without_ranks")
def test_tasks_that_cannot_be_made_are_named(examine: Examine, user_folder: Path) -> None:
    """Also by an environment that prints, between which and the JSON nobody could tell."""
    lines = ["from impala_llm.envs.toy import ParrotSuite", "class Suite(ParrotSuite):"]
    lines += ["    def __init__(self, options):", "        print('hello')", "        raise SystemExit('no data')"]
    (user_folder / "greeting.py").write_text("\n".join(lines))
    code, found = examine("env=greeting:Suite")
    assert code == 1
    [problem] = found["environment"]["problems"]
    assert "env.name=greeting:Suite cannot be made: SystemExit: no data" in problem


@pytest.mark.usefixtures("without_ranks")
def test_a_split_that_shares_tasks_with_training_is_named(examine: Examine, user_folder: Path) -> None:
    (user_folder / "overlap.py").write_text(
        "class Suite:\n"
        "    name, system_prompt = 'overlap', ''\n"
        "    def tasks(self, split): return range(10)\n"
        "    def session(self, training): return self\n"
        "    def signature(self, task_id): return 'one'\n"
        "    def reset(self, task_id): return 'page'\n"
        "    def step(self, action): return 'page', 0.0, True, False, {}\n"
    )
    code, found = examine("env=overlap:Suite", "evaluation.split=test", "evaluation.before_and_after=true")
    assert code == 1
    [problem] = found["environment"]["problems"]
    assert "has 10 tasks of the split 'test' in 'train' too, such as 0" in problem
    code, found = examine("env=overlap:Suite", "evaluation.before_and_after=false", "evaluation.every_updates=null")
    assert (code, found["environment"]["problems"]) == (0, [])


@pytest.mark.usefixtures("without_ranks")
def test_servers_that_do_not_answer_are_named(examine: Examine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "SERVER_S", 0.2)
    urls = ["http://127.0.0.1:9", "http://127.0.0.1:10"]
    code, found = examine("engine=sglang", f"engine.urls=[{','.join(urls)}]")
    assert code == 1
    fix = "start the server, or correct the URL"
    assert found["engine"]["problems"] == [f"engine.urls: {url} did not answer for 0.2 s: {fix}" for url in urls]


def test_a_host_of_actors_must_reach_every_port_of_its_learner(examine: Examine, tmp_path: Path) -> None:
    make_keys(tmp_path / "keys")
    for path in (tmp_path / "keys").glob("learner.secret*"):
        path.unlink()
    with socket.create_server(("127.0.0.1", 0)) as rank:
        port = rank.getsockname()[1]
        address = tmp_path / "learner"
        settings = [f"pipeline.connect=@{address}", f"pipeline.keys={tmp_path / 'keys'}"]
        code, found = examine(*settings)
        assert code == 1 and "there is no endpoint yet" in found["ports"]["problems"][0]
        address.write_text(f"tcp://127.0.0.1:{port}")
        code, found = examine(*settings)
        assert code == 1
        [problem] = found["ports"]["problems"]
        assert f"port {port + 1}, of the weight server, cannot be reached" in problem
        assert f"open ports {port} to {port + 1}, or set learner.num_ranks to that of the learner" in problem
        assert "process group" not in found and "disk" not in found
        with socket.create_server(("127.0.0.1", port + 1)):
            code, found = examine(*settings)
            assert (code, found["ports"]["problems"]) == (0, []), found


@pytest.mark.usefixtures("without_ranks")
def test_people_get_a_line_a_part_and_the_fixes_below(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert cli.main(["doctor", "learner.batch_size=-1", "replay.capacity_mb=-2"]) == 1
    *rows, summary = capsys.readouterr().out.splitlines()
    assert [row.split()[0] for row in rows] == [*["ok"] * 3, "WRONG", "->", "->", *["ok"] * 5]
    assert "learner.batch_size=-1" in rows[4] and "replay.capacity_mb=-2" in rows[5] and summary == "1 part is wrong"


@pytest.mark.usefixtures("without_ranks")
def test_without_settings_an_earlier_run_is_no_fault_of_the_host(user_folder: Path) -> None:
    metrics = user_folder / "outputs" / "impala" / "tensorboard" / "metrics.jsonl"
    metrics.parent.mkdir(parents=True)
    metrics.write_text('{"step": 1}\n')
    found = {each.part: each.problems for each in doctor.examine([])}
    assert "run folder" not in found and "environment" in found
    named = {each.part: each.problems for each in doctor.examine(["run.name=impala"])}
    assert "outputs/impala" in named["run folder"][0]


def test_what_a_sitecustomize_prints_is_no_answer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "sitecustomize.py").write_text("print('welcome')")
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}:{os.environ.get('PYTHONPATH', '')}")
    assert doctor.run_probe("import json; print(json.dumps({'version': '2.0'}))") == {"version": "2.0"}
    assert doctor.run_probe("print('0.5.9')", as_json=False) == {"said": "0.5.9"}
    assert "'welcome' is no JSON object" in doctor.run_probe("")["error"]
    assert doctor.run_probe(r"import sys; sys.stdout.flush(); sys.stdout.buffer.write(b'\xff\n{}')") == {}
