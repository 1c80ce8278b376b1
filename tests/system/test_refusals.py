"""Refusals of what cannot work: through the real command, with its exit code, in at most three lines that name the
key, the value and the fix, and with nothing left behind. Nothing is started, which the folder of the logs shows. The
command begins with its modules imported, see forked_command.py."""

import contextlib
import json
import os
import shlex
import shutil
import socket
import subprocess
import sys
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest

from impala_llm.pipeline.network.keys import make_keys
from impala_llm.pipeline.shm.run_directory import RunDirectory
from impala_llm.settings import ASSETS
from tests.system.forked_command import forked_command
from tests.system.runs import ROOT, START_S, Run

KINDS = {
    "GPT-2 with too few positions": (
        {"model_type": "gpt2", "n_positions": 256},
        ["engine.max_length=1024", "256 positions", "lower it to 256"],
    ),
    "Gemma 2": (
        {"model_type": "gemma2", "attn_logit_softcapping": 50.0},
        ["attn_logit_softcapping=50", "docs/engines.md"],
    ),
    "a state": ({"model_type": "mamba"}, ["kind mamba", "docs/engines.md"]),
    "its own attention": ({"model_type": "bloom"}, ["kind bloom", "docs/engines.md"]),
    "layers of a kind that nobody tried": ({"layer_types": ["conv"]}, ["conv", "docs/engines.md"]),
    "too few positions": (
        {"max_position_embeddings": 512},
        ["engine.max_length=1024", "512 positions", "lower it to 512"],
    ),
}


@dataclass
class Refusal:
    """A command that is refused.

    words: settings. says: what the sentence must contain; {path} stands for the test's folder. command: that is called.
    prepare: makes in the test's folder what the words name.
    """

    words: list[str]
    says: list[str]
    command: str = "train"
    prepare: Callable[[Path], object] = lambda path: None


def copied_model(change: Callable[[Path], object]) -> Callable[[Path], object]:
    """Makes a copy of the shipped model in the folder `model`, and spoils it."""

    def prepare(path: Path) -> None:
        shutil.copytree(ASSETS / "tiny_shopper", path / "model")
        change(path / "model")

    return prepare


def without_template(model: Path) -> None:
    (model / "chat_template.jinja").unlink(missing_ok=True)
    kept = json.loads((model / "tokenizer_config.json").read_text())
    kept.pop("chat_template", None)
    (model / "tokenizer_config.json").write_text(json.dumps(kept))


def cut_short(name: str) -> Callable[[Path], object]:
    return lambda model: (model / name).write_bytes((model / name).read_bytes()[:-100])


def written(name: str, text: str) -> Callable[[Path], object]:
    return lambda path: (path / name).write_text(text)


def open_keys(path: Path) -> None:
    make_keys(path / "keys", ["actor"])
    (path / "keys").chmod(0o755)


def interpreter_without_packages(path: Path) -> None:
    (path / "python").write_text(f'#!/bin/sh\nexec {shlex.quote(sys.executable)} -S "$@"\n')
    (path / "python").chmod(0o755)


def finished_run(path: Path) -> None:
    (path / "run" / "tensorboard").mkdir(parents=True)
    (path / "run" / "tensorboard" / "metrics.jsonl").write_text('{"step": 1}\n')


MODEL = "model.path={path}/model"
BIND = "pipeline.bind=tcp://127.0.0.1:7400"
KEYS = "pipeline.keys={path}/keys"
REFUSALS = {
    # What would be lost or mixed.
    "a second run of a finished name": Refusal(
        [], ["run.dir={path}/run holds a run already", "another run.name"], prepare=finished_run
    ),
    "resuming what has left nothing": Refusal(["run.resume=true"], ["run.resume=true", "leave run.resume out"]),
    "a file as run.dir": Refusal(
        ["run.dir={path}/file"], ["run.dir={path}/file is a file", "name a folder"], prepare=written("file", "")
    ),
    "a folder that cannot be made": Refusal(
        ["run.dir=/proc/none"], ["run.dir=/proc/none cannot be made", "name another folder"]
    ),
    "logs that are a file": Refusal(
        ["run.dir={path}"], ["run.dir={path} cannot be made", "name another folder"], prepare=written("logs", "")
    ),
    # Keys and values.
    "an unknown key": Refusal(["learner.lr=1"], ["learner.lr=1", "did you mean learner.learning_rate?"]),
    "an unknown key with a plus": Refusal(["+learner.lr=1"], ["learner.lr=1", "did you mean learner.learning_rate?"]),
    "an unknown group with a plus": Refusal(["+foo.bar=1"], ["foo.bar=1 is an unknown key", "--help"]),
    "an unknown key with two": Refusal(["++foo.bar=1"], ["foo.bar=1 is an unknown key", "--help"]),
    "a key that is taken away": Refusal(["~learner.batch_size"], ["~learner.batch_size", "key=value"]),
    "a word without a value": Refusal(["quickstart"], ["quickstart is no setting", "key=value"]),
    "a wrong type": Refusal(
        ["learner.batch_size=abc"], ["learner.batch_size=abc", "a whole number", "the default is 64"]
    ),
    "a part of a number": Refusal(["learner.batch_size=1.5"], ["learner.batch_size=1.5", "a whole number"]),
    "no value where one is needed": Refusal(["run.name=null"], ["run.name=null", "the default is impala"]),
    "a group as a value": Refusal(["learner=5"], ["learner=5", "group of settings", "learner."]),
    "no group": Refusal(["algorithm=null"], ["algorithm=null", "choose one of", "vtrace"]),
    "an unknown group": Refusal(["experiment=nope"], ["experiment=nope", "choose one of", "toy"]),
    "a value that refers to nothing": Refusal(["run.dir=${nope}"], ["run.dir=${nope}", "does not exist"]),
    "a value that needs quotes": Refusal(["run.name=a=b"], ["run.name=a=b cannot be read", "quote"]),
    "a negative number": Refusal(["run.seed=-1"], ["run.seed=-1", "between 0 and 2147483647"]),
    "nan": Refusal(["learner.learning_rate=nan"], ["learner.learning_rate=nan", "between 0 and 1"]),
    "an infinite weight": Refusal(["algorithm.kl_coef=inf"], ["algorithm.kl_coef=inf", "between 0 and 1000"]),
    "a name with a slash": Refusal(["run.name=a/b"], ["run.name='a/b'", "rename"]),
    "a name that begins with a dash": Refusal(["run.name=-a"], ["run.name='-a'", "rename"]),
    "a name that is too long": Refusal([f"run.name={'a' * 60}"], ["1 to 40 letters", "rename"]),
    "an unknown option": Refusal(["--fast"], ["--fast is no option", "--help"]),
    "an empty folder name": Refusal(["run.dir="], ["run.dir= is empty", "name a folder"]),
    "more than can be told at once": Refusal(
        ["learner.batch_size=-1", "learner.adam_beta1=2", "run.seed=-1", "engine.temperature=0", "replay.capacity=0"],
        ["=-1 is out of range", "and 3 more problems"],
    ),
    "a seed that is none": Refusal(["env.webshop.catalogue_seed=-1"], ["env.webshop.catalogue_seed=-1", "between 0"]),
    # Files of settings.
    "a file that is not there": Refusal(
        ["--config={path}/my.yaml"], ["settings file {path}/my.yaml cannot be read", "correct the path"]
    ),
    "a file that is no YAML": Refusal(
        ["--config={path}/my.yaml"],
        ["settings file {path}/my.yaml, line 3", "not YAML"],
        prepare=written("my.yaml", "learner:\n  batch_size: [\n"),
    ),
    "a file with a wrong type": Refusal(
        ["--config={path}/my.yaml"],
        ["settings file {path}/my.yaml: learner.batch_size=abc", "a whole number"],
        prepare=written("my.yaml", "learner:\n  batch_size: abc\n"),
    ),
    "a file with an unknown key": Refusal(
        ["--config={path}/my.yaml"],
        ["settings file {path}/my.yaml: learner.lr is an unknown key", "learner.learning_rate"],
        prepare=written("my.yaml", "learner:\n  lr: 1.0\n"),
    ),
    "a file that holds a number": Refusal(
        ["--config={path}/my.yaml"], ["my.yaml holds no settings"], prepare=written("my.yaml", "5\n")
    ),
    "a file that holds nothing": Refusal(
        ["--config={path}/my.yaml"], ["my.yaml holds no settings"], prepare=written("my.yaml", "# learner: later\n")
    ),
    "a file that holds a list": Refusal(
        ["--config={path}/my.yaml"], ["my.yaml holds no settings"], prepare=written("my.yaml", "- 1\n")
    ),
    # Models.
    **{
        f"a model with {name}": Refusal(
            ["experiment=quickstart", MODEL],
            ["model.path={path}/model", *says],
            prepare=lambda path, entries=entries: (
                (path / "model").mkdir(),
                (path / "model" / "config.json").write_text(json.dumps({"model_type": "llama"} | entries)),
            ),
        )
        for name, (entries, says) in KINDS.items()
    },
    "a model that is not there": Refusal(["model.path={path}/model"], [MODEL, "does not exist"]),
    "a name on a hub": Refusal(["model.path=Qwen/Qwen3-0.6B"], ["model.path=Qwen/Qwen3-0.6B", "hf download"]),
    "a folder without a model": Refusal(
        [MODEL], [MODEL, "no config.json"], prepare=lambda path: (path / "model").mkdir()
    ),
    "a policy that reads other pages": Refusal(
        ["env.webshop.observation_mode=text_rich"],
        ["env.webshop.observation_mode=text_rich", "compact", "model=pretrained"],
    ),
    "a policy that shops in another environment": Refusal(
        ["env=corridor"], ["model.path=tiny_shopper", "env=corridor", "model=scratch"]
    ),
    "a random policy in the shop": Refusal(
        ["model=scratch"], ["model.path=scratch", "env=webshop", "model=tiny_shopper"]
    ),
    "no chat template": Refusal(
        [MODEL], [MODEL, "no chat template", "chat_template.jinja"], prepare=copied_model(without_template)
    ),
    "no tokenizer": Refusal(
        [MODEL],
        [MODEL, "no tokenizer", "copy the model again"],
        prepare=copied_model(lambda m: (m / "tokenizer.json").unlink()),
    ),
    "a tokenizer that was cut short": Refusal(
        [MODEL],
        [MODEL, "tokenizer.json is no JSON", "copy the model again"],
        prepare=copied_model(cut_short("tokenizer.json")),
    ),
    "weights that were cut short": Refusal(
        [MODEL],
        [MODEL, "model.safetensors", "copy the model again"],
        prepare=copied_model(cut_short("model.safetensors")),
    ),
    "no weights": Refusal(
        [MODEL],
        [MODEL, "model.safetensors is missing"],
        prepare=copied_model(lambda m: (m / "model.safetensors").unlink()),
    ),
    "an empty configuration": Refusal(
        [MODEL], [MODEL, "config.json is no JSON"], prepare=copied_model(written("config.json", ""))
    ),
    "a configuration without a kind": Refusal(
        [MODEL], [MODEL, "config.json has no model_type"], prepare=copied_model(written("config.json", "{}"))
    ),
    "a configuration with wrong types": Refusal(
        [MODEL],
        [MODEL, "config.json has a value of a wrong type"],
        prepare=copied_model(written("config.json", '{"model_type": "llama", "layer_types": 5}')),
    ),
    "a reference without weights": Refusal(
        ["algorithm.kl_coef=0.1", "algorithm.reference={path}/model"],
        ["algorithm.reference={path}/model", "model.safetensors is missing"],
        prepare=copied_model(lambda m: (m / "model.safetensors").unlink()),
    ),
    # This host.
    "no GPU": Refusal(["model.device=cuda"], ["model.device=cuda", "model.device=auto or cpu"]),
    "too little shared memory": Refusal(
        ["replay.capacity_mb=1000000"], ["1,250,064 MiB for replay.capacity_mb", "--shm-size"]
    ),
    "no SGLang": Refusal(
        ["engine=sglang", "engine.python={path}/python"],
        ["engine.python={path}/python", "no sglang installed"],
        prepare=interpreter_without_packages,
    ),
    "a folder of keys that others may read": Refusal([BIND, KEYS], [KEYS, "mode 0755", "chmod 700"], prepare=open_keys),
    "no keys": Refusal(["pipeline.bind=tcp://0.0.0.0:7400"], ["pipeline.bind=tcp://0.0.0.0:7400", "impala-llm keys"]),
    "an address of another host": Refusal(
        ["pipeline.bind=tcp://192.0.2.1:7400", KEYS],
        ["pipeline.bind=tcp://192.0.2.1:7400", "an address of this host"],
        prepare=lambda path: make_keys(path / "keys", ["actor"]),
    ),
    "an endpoint with a wrong scheme": Refusal(
        ["pipeline.bind=http://0.0.0.0:7400"], ["pipeline.bind=http://0.0.0.0:7400", "tcp://ADDRESS:PORT"]
    ),
    "a learner that nobody knows": Refusal(
        ["pipeline.connect=tcp://no-such-host.invalid:7400", KEYS],
        ["pipeline.connect=tcp://no-such-host.invalid:7400", "does not know 'no-such-host.invalid'"],
        command="actors",
        prepare=lambda path: make_keys(path / "keys", ["actor"]),
    ),
    "a file with a learner's endpoint in no folder": Refusal(
        ["pipeline.connect=@{path}/none/learner", KEYS],
        ["pipeline.connect=@{path}/none/learner", "no folder {path}/none"],
        command="actors",
        prepare=lambda path: make_keys(path / "keys", ["actor"]),
    ),
    "a file that holds no endpoint": Refusal(
        ["pipeline.connect=@{path}/learner", KEYS],
        ["pipeline.connect=@{path}/learner", "tcp://ADDRESS:PORT"],
        command="actors",
        prepare=lambda path: (make_keys(path / "keys", ["actor"]), (path / "learner").write_text("learner-7")),
    ),
    "a program that is no Python": Refusal(
        ["engine=sglang", "engine.python=/bin/true"], ["engine.python=/bin/true", "is it a Python?"]
    ),
    "a learner elsewhere under train": Refusal(
        ["pipeline.connect=tcp://127.0.0.1:7400", KEYS],
        ["pipeline.connect=tcp://127.0.0.1:7400", "impala-llm actors"],
        prepare=lambda path: make_keys(path / "keys", ["actor"]),
    ),
    "a server without a port": Refusal(
        ["engine=sglang", "engine.urls=['http://a:bc']"], ["engine.urls has 'http://a:bc'", "http://host:port"]
    ),
    "a server that nobody knows": Refusal(
        ["engine=sglang", "engine.urls=['http://no-such-host.invalid:1']"],
        ["engine.urls=http://no-such-host.invalid:1", "does not know 'no-such-host.invalid'"],
    ),
    "no actors to start": Refusal(["actor.num_actors=0"], ["actor.num_actors=0", "1 or more"], command="actors"),
    "a model for actors": Refusal([MODEL], [MODEL, "does not exist"], command="actors"),
    "a model to evaluate": Refusal([MODEL], [MODEL, "does not exist"], command="evaluate"),
}


ENVIRONMENT = {**os.environ, "PYTHONPATH": str(ROOT), "CUDA_VISIBLE_DEVICES": ""}


def refused(command: str, words: list[str], path: Path) -> str:
    """Call the command, which must refuse, and return what it says."""
    name = f"test-{uuid.uuid4().hex[:12]}"
    own = [f"run.name={name}", f"run.dir={path}/run"]
    given = [key for key in ("run.name", "run.dir") if any(word.startswith(f"{key}=") for word in words)]
    own = [word for word in own if word.partition("=")[0] not in given]
    ended = forked_command([command, *own, *words], path, ENVIRONMENT)
    assert ended.returncode == 2, ended
    assert ended.stdout == "" and 1 <= len(ended.stderr.splitlines()) <= 3, ended
    assert ended.stderr.startswith("impala-llm: ") and "Traceback" not in ended.stderr
    assert list(Path("/dev/shm").glob(f"*{name}*")) == []
    assert not (path / "run" / "logs").exists()
    return ended.stderr


@pytest.mark.system
@pytest.mark.xdist_group("refusals")
@pytest.mark.parametrize("name", REFUSALS)
def test_what_cannot_work_is_refused_in_a_sentence(name: str, tmp_path: Path) -> None:
    refusal = REFUSALS[name]
    refusal.prepare(tmp_path)
    words = [word.replace("{path}", str(tmp_path)) for word in refusal.words]
    said = refused(refusal.command, words, tmp_path)
    for word in refusal.says:
        assert word.replace("{path}", str(tmp_path)) in said


@pytest.mark.system
@pytest.mark.xdist_group("refusals")
def test_a_port_in_use_is_refused(tmp_path: Path) -> None:
    make_keys(tmp_path / "keys", ["actor"])
    with socket.create_server(("127.0.0.1", 0)) as server:
        bind = f"pipeline.bind=tcp://127.0.0.1:{server.getsockname()[1]}"
        said = refused("train", [bind, f"pipeline.keys={tmp_path}/keys"], tmp_path)
    assert bind in said and "take other ports" in said


@pytest.mark.system
@pytest.mark.xdist_group("refusals")
@pytest.mark.parametrize("is_resumed", ["true", "false"])
def test_a_living_run_of_the_same_name_is_refused(is_resumed: str, tmp_path: Path) -> None:
    name = f"test-{uuid.uuid4().hex[:12]}"
    with RunDirectory.create(name):
        said = refused("train", [f"run.name={name}", f"run.resume={is_resumed}"], tmp_path)
    assert f"run.name={name}" in said and f"process {os.getpid()}" in said and "choose another run name" in said


@contextmanager
def small_disk(path: Path, size_mb: int = 1) -> Iterator[Path]:
    """A file system of so many megabytes."""
    path.mkdir()
    size = f"size={size_mb}m"
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", size, "tmpfs", path], capture_output=True, check=False)
    if mounted.returncode:
        pytest.skip("this user may not mount a file system")
    try:
        yield path
    finally:
        subprocess.run(["umount", path], check=True)


@pytest.mark.system
@pytest.mark.xdist_group("refusals")
def test_a_disk_without_room_is_refused(tmp_path: Path) -> None:
    with small_disk(tmp_path / "disk") as disk:
        said = refused("train", [f"run.dir={disk}/run"], tmp_path)
    assert f"run.dir={disk}/run has 1 MiB of free disk space" in said and "make room" in said


@pytest.mark.system
def test_a_run_whose_disk_fills_up_goes_on_and_its_policy_is_saved_when_there_is_room(tmp_path: Path) -> None:
    with small_disk(tmp_path / "disk", 40) as disk:
        settings = ("experiment=toy", "actor.num_actors=1", "learner.batch_size=16", "learner.total_updates=100")
        with Run(tmp_path / "shown", *settings) as run:
            run.settings[1] = f"run.dir={disk}/run"
            train = run.train()
            # Not while a checkpoint is being written: one that finds no room is removed, and leaves its room to others.
            run.wait_for((disk / "run" / "checkpoints" / "update-000001").exists, "the first checkpoint")
            fill(disk / "much")
            assert train.wait(START_S) == 4
            said = run.log.read_text()
            assert said.count("is full: metric writer") == 1 and f"the disk of {disk}/run/tensorboard is full" in said
            assert f"cannot be saved on the disk of {disk}/run/policy" in said and "No space left on device" in said
            assert "the policy of update 100 stays in /dev/shm/" in said and "same command goes on from there" in said
            assert "died" not in said and "Traceback" not in said
            (disk / "much").unlink()
            assert run.train().wait(START_S) == 0, run.printed()
            assert (disk / "run" / "policy" / "model.safetensors").is_file()
            run.assert_gone()


def fill(path: Path) -> None:
    """Write a file until the disk is full."""
    with path.open("wb", buffering=0) as file, contextlib.suppress(OSError):
        while file.write(bytes(4096)):
            continue


@pytest.mark.system
def test_a_learner_by_hand_mixes_no_two_runs(tmp_path: Path) -> None:
    finished_run(tmp_path)
    name = f"test-{uuid.uuid4().hex[:12]}"
    ended = subprocess.run(
        [sys.executable, str(ROOT / "impala_llm/learner.py"), f"run.name={name}", f"run.dir={tmp_path}/run"],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert ended.returncode == 2 and len(ended.stderr.splitlines()) == 1
    assert f"run.dir={tmp_path}/run holds a run already" in ended.stderr and "without a checkpoint" in ended.stderr


@pytest.mark.system
def test_torchruns_report_ends_with_why_the_learner_was_refused(tmp_path: Path) -> None:
    """It is forty lines, and what a rank has said stands above them."""
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "1"]
    words = ["learner.num_ranks=2", "learner.batch_size=7", f"run.dir={tmp_path}/run"]
    ended = subprocess.run(
        [*torchrun, str(ROOT / "impala_llm" / "learner.py"), *words],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    [line] = [line for line in ended.stderr.splitlines()[-3:] if "learner.batch_size=7" in line]
    assert ended.returncode == 1 and line.startswith("  traceback : learner: ") and "set it to a multiple of 2" in line


@pytest.mark.system
def test_what_nobody_reads_ends_without_a_traceback() -> None:
    """As before `| head`: the reader has gone when the text comes."""
    command = [sys.executable, "-m", "impala_llm.cli", "train", "--help"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=environment) as shown:
        assert shown.stdout is not None and shown.stderr is not None
        shown.stdout.close()
        assert shown.stderr.read() == b"" and shown.wait(60) == 141
