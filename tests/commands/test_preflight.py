"""Runs that are refused before any process exists: through the command line, with exit code 2 and a sentence or two."""

import json
import os
import shutil
import socket
import subprocess
import sys
import uuid
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from impala_llm import cli
from impala_llm.commands import doctor, host_space, preflight
from impala_llm.commands.evaluated_policy import unfit_policy
from impala_llm.commands.preflight import actors_checks, training_checks
from impala_llm.config import ConfigError, load, to_yaml
from impala_llm.learning.policy.model_files import float32_bytes
from impala_llm.pipeline.network.keys import make_keys
from impala_llm.pipeline.shm import run_directory
from impala_llm.pipeline.shm.run_directory import RunDirectory
from impala_llm.processes import child_processes
from impala_llm.settings import ASSETS


@pytest.fixture(autouse=True)
def no_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(subprocess, "Popen", None)
    monkeypatch.setattr(child_processes.Child, "start", None)


@pytest.fixture
def refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Callable[..., str]:
    """Calls a command with settings and returns what it said on its way out with status 2."""

    def call(*settings: str, command: str = "train") -> str:
        name = f"run.name=test-{uuid.uuid4().hex[:12]}"
        assert cli.main([command, "experiment=quickstart", name, f"run.dir={tmp_path / 'out'}", *settings]) == 2
        said = capsys.readouterr().err
        assert said.startswith("impala-llm: ") and len(said.splitlines()) <= 3, said
        return said

    return call


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return Path(shutil.copytree(ASSETS / "tiny_shopper", tmp_path / "model"))


def test_a_folder_that_holds_a_run_is_refused_with_the_ways_out(refused: Callable[..., str], tmp_path: Path) -> None:
    curve = tmp_path / "out" / "tensorboard" / "metrics.jsonl"
    curve.parent.mkdir(parents=True)
    curve.write_text('{"step": 1}\n')
    said = refused()
    assert f"run.dir={tmp_path / 'out'}" in said and "run.name" in said and "remove the folder" in said
    assert "model.path" not in said
    shutil.copytree(ASSETS / "tiny_shopper", tmp_path / "out" / "policy")
    assert f"model.path={tmp_path}/out/policy goes on from its policy" in refused()


def test_a_run_that_left_nothing_cannot_be_resumed(refused: Callable[..., str], tmp_path: Path) -> None:
    (tmp_path / "out" / "policy").mkdir(parents=True)
    said = refused("run.resume=true")
    assert "run.resume=true" in said and f"model.path={tmp_path / 'out' / 'policy'}" in said


def test_a_file_is_no_folder_of_a_run(refused: Callable[..., str], tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    assert f"run.dir={tmp_path / 'file'} is a file" in refused(f"run.dir={tmp_path / 'file'}")


def test_a_living_run_of_the_same_name_is_refused(refused: Callable[..., str]) -> None:
    name = f"test-{uuid.uuid4().hex[:12]}"
    with RunDirectory.create(name):
        said = refused(f"run.name={name}")
    assert f"run.name={name} is in use" in said and "choose another run name" in said
    [line] = [line for line in said.splitlines() if "is in use" in line]
    assert line.count(name) == 2, "once as the setting, once in the path"


def test_a_policy_that_was_made_for_other_tasks_is_named_where_that_can_be_known(model: Path, tmp_path: Path) -> None:
    def said(*settings: str) -> str | None:
        return unfit_policy(load(list(settings)))

    assert "env=corridor" in str(said("env=corridor", "model.path=tiny_shopper"))
    assert said("env=webshop", "env.webshop.observation_mode=compact", "model.path=tiny_shopper") is None
    assert said("env=corridor", f"model.path={model}") is None, "it may be anything"
    run = tmp_path / "run"
    shutil.copytree(model, run / "policy")
    (run / "config.yaml").write_text(to_yaml(load(["experiment=toy"])))
    assert said("env=parrot", f"model.path={run}/policy") is None
    for_another = str(said("env=corridor", f"model.path={run}/policy"))
    assert "trained with env=parrot" in for_another and "env=corridor" in for_another
    assert said("env=corridor", f"model.path={run}/policy", "agent.command=python agent.py") is None, "no env is played"
    (run / "config.yaml").write_text("{")
    assert said("env=corridor", f"model.path={run}/policy") is None


def test_of_a_policy_that_was_trained_with_an_agent_nothing_is_said(model: Path, tmp_path: Path) -> None:
    """Its tasks were the agent's, whatever environment the settings name."""
    run = tmp_path / "run"
    shutil.copytree(model, run / "policy")
    written = to_yaml(load(["agent.command=ls"]))
    for agent in ("command: ls\n", "name: my_agent:agent\n"):
        assert "  command: ls\n" in written
        (run / "config.yaml").write_text(written.replace("command: ls\n", agent))
        path = f"model.path={run}/policy"
        assert unfit_policy(load(["env=parrot", path])) is None
        assert unfit_policy(load([path, "env.webshop.catalogue_seed=3", "evaluation.unseen_seed=0"])) is None


@pytest.mark.parametrize("command", ["train", "actors", "evaluate"])
def test_a_model_without_chat_template_is_refused(
    command: str, refused: Callable[..., str], model: Path, tmp_path: Path
) -> None:
    (model / "chat_template.jinja").unlink(missing_ok=True)
    tokenizer = json.loads((model / "tokenizer_config.json").read_text())
    tokenizer.pop("chat_template", None)
    (model / "tokenizer_config.json").write_text(json.dumps(tokenizer))
    said = refused(f"model.path={model}", command=command)
    assert f"model.path={model}" in said and "chat template" in said


def test_a_model_without_tokenizer_is_refused(refused: Callable[..., str], model: Path) -> None:
    (model / "tokenizer.json").unlink()
    assert "has no tokenizer" in refused(f"model.path={model}")


@pytest.mark.parametrize(
    ("metrics", "said"),
    [
        ('{"policy": "mine"}', "metric 'loss/policy' means 'policy part of the loss"),
        ('["steep_share"]', "write a dict of names and their meanings"),
        ('{"explained_variance": "mine"}', "metric 'explained_variance' is formed of four numbers"),
    ],
)
def test_metrics_of_an_own_loss_that_cannot_be_logged_are_refused(
    refused: Callable[..., str], user_folder: Path, metrics: str, said: str
) -> None:
    lines = ["from impala_llm.algorithms.losses import Reinforce", "class Mine(Reinforce):", f"    metrics = {metrics}"]
    (user_folder / "my_metrics.py").write_text("\n".join(lines))
    message = refused("algorithm.loss=my_metrics:Mine")
    assert "algorithm.loss=my_metrics:Mine cannot be used: " in message and said in message


def test_a_metric_that_means_something_else_in_the_credit_and_in_the_loss_is_refused(
    refused: Callable[..., str], user_folder: Path
) -> None:
    (user_folder / "my_metrics.py").write_text(
        "from impala_llm.algorithms.losses import Reinforce\n"
        "from impala_llm.algorithms.vtrace import GAE\n"
        "class Credit(GAE):\n    metrics = {**GAE.metrics, 'mine/x': 'of the credit'}\n"
        "class Loss(Reinforce):\n    metrics = {'mine/x': 'of the loss'}\n"
    )
    said = refused("algorithm.credit=my_metrics:Credit", "algorithm.loss=my_metrics:Loss")
    assert "algorithm.loss=my_metrics:Loss cannot be used: metric 'mine/x' means 'of the credit' already" in said


def test_a_file_of_tasks_that_is_missing_is_refused(refused: Callable[..., str]) -> None:
    assert "env.args.file=sum.jsonl is no file" in refused("env=tasks", "env.args.file=sum.jsonl", "model=scratch")


def test_a_folder_that_cannot_be_made_is_refused(refused: Callable[..., str]) -> None:
    assert "run.dir=/proc/none cannot be made" in refused("run.dir=/proc/none")


def test_a_longer_context_than_the_model_has_positions_is_refused(refused: Callable[..., str]) -> None:
    said = refused("engine.max_length=4097")
    assert "engine.max_length=4097" in said and "4096" in said


def test_weights_that_were_cut_short_are_refused(refused: Callable[..., str], model: Path) -> None:
    weights = model / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-100])
    said = refused(f"model.path={model}")
    assert "model.safetensors" in said and "copy the model again" in said
    weights.unlink()
    assert "model.safetensors is missing" in refused(f"model.path={model}")


def test_a_port_in_use_is_refused(refused: Callable[..., str], tmp_path: Path) -> None:
    make_keys(tmp_path / "keys", ["actor"])
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        said = refused(
            f"pipeline.bind=tcp://127.0.0.1:{port - 1}", f"pipeline.keys={tmp_path / 'keys'}"
        )  # the weight server is one above rank 0
    assert f"port {port} cannot be listened at" in said


def test_keys_that_others_may_read_are_refused(refused: Callable[..., str], tmp_path: Path) -> None:
    make_keys(tmp_path / "keys", ["actor"])
    (tmp_path / "keys").chmod(0o755)
    (tmp_path / "keys" / "learner.secret.json").chmod(0o644)
    said = refused("pipeline.bind=tcp://127.0.0.1:7400", f"pipeline.keys={tmp_path / 'keys'}")
    assert f"pipeline.keys={tmp_path / 'keys'}" in said


def test_cuda_without_a_gpu_is_refused(refused: Callable[..., str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    said = refused("model.device=cuda")
    assert "model.device=cuda" in said and "model.device=auto" in said


def test_compiled_layers_without_a_compiler_are_refused(
    refused: Callable[..., str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CXX", "no-compiler")
    said = refused("learner.compile_layers=true", "model.device=cpu")
    assert "'no-compiler'" in said and "learner.compile_layers=false" in said
    config = load(["experiment=quickstart", "model.device=cpu"])
    assert [said for check in preflight.training_checks()["compiler"] for said in check(config)] == []


def test_compiled_layers_are_refused_where_torch_cannot_link_them(
    refused: Callable[..., str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CXX", sys.executable)  # a program that is there
    monkeypatch.setattr(preflight, "torch_folder", lambda: "/opt/my projects/torch")
    said = refused("learner.compile_layers=true", "model.device=cpu")
    assert "/opt/my projects/torch: install" in said and "learner.compile_layers=false" in said
    monkeypatch.setattr(preflight, "torch_folder", lambda: "/opt/torch")
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", "/opt/my projects/compiled")
    said = refused("learner.compile_layers=true", "model.device=cpu")
    assert "/opt/my projects/compiled: name one without in TORCHINDUCTOR_CACHE_DIR" in said


def test_sglang_that_is_not_there_is_refused(refused: Callable[..., str], monkeypatch: pytest.MonkeyPatch) -> None:
    async def none_there(python: str) -> None:
        raise preflight.BadServerSettings(f"engine.python={python} has no sglang installed")

    monkeypatch.setattr(preflight, "check_python", none_there)
    assert "has no sglang installed" in refused("engine=sglang")


def test_a_context_that_leaves_an_sglang_server_no_positions_is_refused(
    refused: Callable[..., str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It keeps 7 of the 4,096 of tiny_shopper free; a server at a URL is asked when it is there."""

    async def there(python: str) -> None: ...

    monkeypatch.setattr(preflight, "check_python", there)
    said = refused("engine=sglang", "engine.max_length=4090")
    assert "engine.max_length=4090" in said and "set it to at most 4089" in said
    for fits in (["engine.max_length=4089"], ["engine.max_length=4090", "engine.urls=['http://127.0.0.1:9']"]):
        config = load(["experiment=quickstart", "engine=sglang", *fits])
        assert [said for check in preflight.training_checks()["engine"] for said in check(config)] == []


def test_shared_memory_that_is_too_small_is_refused(refused: Callable[..., str]) -> None:
    said = refused("replay.capacity_mb=1000000")
    # 5/4 of it, and 64 MiB beside
    assert "1,250,064 MiB for replay.capacity_mb" in said and "--shm-size" in said


def test_doctor_says_how_much_shared_memory_the_settings_reserve() -> None:
    """The weights of a model from scratch are not counted."""
    words = ["experiment=toy", "replay.capacity_mb=8000", "pipeline.arena_mb=1000", "actor.num_actors=2"]
    state, problems = doctor.memory(load([*words, "learner.num_ranks=2"]))
    reserved = (2 * (8000 * 5 / 4 + 64) + 2 * 1000) * 2**20
    assert f"these settings reserve {reserved / 1e9:.1f} GB" in state and problems == []


def test_an_actors_arenas_share_its_memory_however_many_ranks_there_are(
    refused: Callable[..., str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=0))
    said = refused("learner.num_ranks=2", "actor.num_actors=3", "pipeline.arena_mb=100")
    assert "(300 MiB for pipeline.arena_mb" in said or " 300 MiB for pipeline.arena_mb" in said


def test_arenas_of_actors_beside_a_learner_must_fit_into_shared_memory(
    refused: Callable[..., str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=299 << 20))
    said = refused("actor.num_actors=3", "pipeline.arena_mb=100", command="actors")
    assert "has 299 MiB free" in said and "(300 MiB for pipeline.arena_mb)" in said and "replay" not in said
    config = load(["experiment=quickstart", f"run.name={uuid.uuid4().hex}", "actor.num_actors=2"])
    config.pipeline.arena_mb = 149
    assert [said for check in preflight.actors_checks()["shared memory"] for said in check(config)] == []


@pytest.mark.parametrize(("words", "share"), [([], 1), (["engine.dtype=bfloat16", "pipeline.weights_dtype=engine"], 2)])
def test_the_weights_that_a_host_of_actors_fetches_must_fit_into_its_shared_memory(
    words: list[str], share: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The relay's three slots, and what arrives; arenas are private memory of the actors there."""
    words = ["experiment=quickstart", f"run.name={uuid.uuid4().hex}", "pipeline.connect=tcp://127.0.0.1:7400", *words]
    make_keys(tmp_path / "keys")
    config = load([*words, f"pipeline.keys={tmp_path / 'keys'}", "pipeline.arena_mb=1000"])
    monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=free))
    (check,) = preflight.actors_checks()["shared memory"]
    needed = 4 * float32_bytes(config.model.path) // share
    free = needed
    assert needed > 0 and check(config) == []
    free = needed - 1
    (said,) = check(config)
    assert "model.path=tiny_shopper" in said and "arena_mb" not in said


@pytest.mark.parametrize(
    ("words", "num_parts"),
    [
        ([], 3),  # the weights and their two moments
        (["learner.sharding=fsdp2", "learner.num_ranks=2"], 4),  # and each rank's share of the weights
        (["learner.tensor_parallel=2"], 4),
        (["model.lora.rank=4"], 1),
    ],
)
def test_checkpoints_take_disk_space_for_all_of_their_parts(
    words: list[str], num_parts: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=0))

    def needed_mb(kept: int) -> int:
        settings = ["experiment=quickstart", f"run.dir={tmp_path}", f"learner.checkpoints_kept={kept}", *words]
        (said,) = [said for check in preflight.training_checks()["disk"] for said in check(load(settings))]
        return int(said.split("logs take ")[1].split(" MiB")[0].replace(",", ""))

    config, weights_mb = load(["experiment=quickstart"]), float32_bytes("tiny_shopper") / 2**20
    assert needed_mb(101) - needed_mb(1) == pytest.approx(100 * num_parts * weights_mb, abs=2)
    policies_mb = 3 if config.evaluation.inside_run else 1
    assert needed_mb(0) == pytest.approx(host_space.DISK_SPARE / 2**20 + policies_mb * weights_mb, abs=2)


def test_checkpoints_and_policies_of_the_run_count_as_free(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=0))
    config = load(["experiment=quickstart", f"run.dir={tmp_path}"])

    def needed_mb() -> int:
        (said,) = [said for check in preflight.training_checks()["disk"] for said in check(config)]
        return int(said.split("logs take ")[1].split(" MiB")[0].replace(",", ""))

    without = needed_mb()
    for name in ("checkpoints/update-7/rank-0.safetensors", "policy/model.safetensors"):
        (tmp_path / name).parent.mkdir(parents=True)
        (tmp_path / name).write_bytes(bytes(4 << 20))
    assert needed_mb() == without - 8
    (tmp_path / "policy-50").mkdir()
    (tmp_path / "policy-50" / "model.safetensors").write_bytes(bytes(4 << 20))
    assert needed_mb() == without - 8, "what learner.save_every writes stays"
    (tmp_path / "policy" / "large.safetensors").write_bytes(bytes(64 << 20))
    assert 32 < needed_mb() < without - 8, "a checkpoint is written before another goes"


@pytest.mark.parametrize(
    ("setting", "limit"), [("num_products=2000", "1250"), ("catalogue_seed=200000", "below 100000")]
)
def test_a_hard_catalogue_that_cannot_be_is_refused(refused: Callable[..., str], setting: str, limit: str) -> None:
    said = refused("env.webshop.catalogue=hard", f"env.webshop.{setting}")
    assert f"env.webshop.{setting}: " in said and limit in said


@pytest.mark.parametrize("command", ["train", "evaluate"])
def test_an_unseen_catalogue_that_cannot_be_is_refused_before_it_is_played(
    refused: Callable[..., str], tmp_path: Path, command: str
) -> None:
    said = refused("evaluation.unseen_seed=100000", command=command)
    assert "evaluation.unseen_seed=100000: " in said and "below 100000" in said
    (tmp_path / "records.json").touch()
    of_files = [f"env.webshop.{key}={tmp_path / 'records.json'}" for key in ("items", "attributes")]
    said = refused(*of_files, "env.webshop.num_products=5000", command=command)
    assert "env.webshop.num_products=5000: " in said and "or evaluation.unseen_seed=null" in said


def test_an_unseen_catalogue_that_cannot_be_is_none_of_a_run_that_does_not_play_it(tmp_path: Path) -> None:
    words = ["experiment=quickstart", f"run.dir={tmp_path / 'out'}", "evaluation.unseen_seed=100000"]
    with pytest.raises(ConfigError, match="evaluation.unseen_seed=100000"):
        preflight.check_training(load([*words, "evaluation.before_and_after=true"]))
    preflight.check_training(load([*words, "evaluation.before_and_after=false"]))
    demonstrations = [f"demonstrations.dir={tmp_path / 'new'}", "demonstrations.player=script"]
    preflight.check_recording(load([*words, *demonstrations]))


@pytest.mark.parametrize(
    ("setting", "named"),
    [
        ("env.webshop.num_products=2000", "env.webshop.num_products=2000: set 1 to 1250"),
        ("env.webshop.catalogue_seed=100000", "env.webshop.catalogue_seed=100000: set one below 100000"),
        ("env.webshop.catalogue_seed=99998", "num_catalogues=3 ends at env.webshop.catalogue_seed=100000: set"),
    ],
)
def test_a_catalogue_of_a_recording_that_cannot_be_is_refused(
    refused: Callable[..., str], tmp_path: Path, setting: str, named: str
) -> None:
    given = (setting, "demonstrations.num_catalogues=3", f"demonstrations.dir={tmp_path / 'new'}")
    assert named in refused(*given, command="demonstrate") and not (tmp_path / "new").exists()


def test_a_hard_catalogue_that_cannot_be_waits_beside_an_agent(tmp_path: Path) -> None:
    file = tmp_path / "settings.yaml"
    file.write_text("env: {webshop: {catalogue: hard, num_products: 2000}}\n")
    words = [f"experiment={file}", f"run.dir={tmp_path / 'out'}"]
    with pytest.raises(ConfigError, match="num_products=2000"):
        preflight.check_training(load(words))
    preflight.check_training(load([*words, "agent.command=echo"]))


@pytest.mark.parametrize("command", ["demonstrate", "sft"])
def test_a_catalogue_that_is_learned_from_is_refused_as_the_unseen_one(
    refused: Callable[..., str], tmp_path: Path, command: str
) -> None:
    words = ["demonstrations.num_catalogues=8", f"demonstrations.dir={tmp_path / 'new'}", f"sft.dir={tmp_path / 'sft'}"]
    said = refused(*words, command=command)
    assert "evaluation.unseen_seed=7 is a catalogue that is learned from" in said
    assert "demonstrations.num_catalogues=8" in said and not (tmp_path / "new").exists()


def test_the_catalogue_of_training_is_refused_as_the_unseen_one(refused: Callable[..., str]) -> None:
    said = refused("env.webshop.catalogue_seed=7")
    assert "evaluation.unseen_seed=7" in said and "env.webshop.catalogue_seed=7;" in said


@pytest.mark.parametrize("command", ["train", "actors"])
def test_an_adapter_without_its_package_is_refused(
    refused: Callable[..., str], monkeypatch: pytest.MonkeyPatch, command: str
) -> None:
    monkeypatch.setitem(sys.modules, "reasoning_gym", None)
    words = ["env=reasoning_gym", "model=scratch", "evaluation.unseen_seed=null"]
    said = refused(*words, command=command)
    assert "env.name=reasoning_gym needs the package reasoning_gym, which is not installed" in said
    assert "pip install 'impala-llm[reasoning-gym]'" in said


def test_what_a_dead_owner_has_left_of_the_run_counts_as_free(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    name = f"test-{uuid.uuid4().hex[:12]}"
    owner = (
        "import os; from pathlib import Path; from impala_llm.pipeline.shm.run_directory import RunDirectory as R; "
        f"base = Path({str(tmp_path)!r}); run = R.create({name!r}, base, output=base / 'out'); "
        "file = run.replay_path().open('wb'); "
        "os.posix_fallocate(file.fileno(), 0, 64 << 20); os._exit(0)"
    )
    assert os.spawnv(os.P_WAIT, sys.executable, [sys.executable, "-c", owner]) == 0
    monkeypatch.setattr(run_directory, "shared_memory", lambda: tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=free))
    config = load(["experiment=quickstart", f"run.name={name}", "run.resume=true", f"run.dir={tmp_path / 'out'}"])
    free = 0
    with pytest.raises(ConfigError) as refusal:
        preflight.check_training(config)
    needed = int(str(refusal.value).split("reserves ")[1].split(" MiB")[0].replace(",", "")) << 20
    free = needed - (32 << 20)
    preflight.check_training(config)
    free = needed - (128 << 20)
    with pytest.raises(ConfigError, match="reserves"):
        preflight.check_training(config)


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("config.json", "[]"),
        ("config.json", "{"),
        ("tokenizer_config.json", "[]"),
        ("model.safetensors.index.json", "{}"),
        ("model.safetensors.index.json", "{"),
    ],
)
def test_malformed_configuration_files_are_refused(
    name: str, content: str, refused: Callable[..., str], model: Path
) -> None:
    (model / name).write_text(content)
    said = refused(f"model.path={model}")
    assert f"model.path={model}" in said and "copy the model again" in said


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        (["env=corridor"], ["model.path=tiny_shopper", "env=corridor", "model=scratch"]),
        (["model=scratch"], ["model.path=scratch", "env=webshop", "model=tiny_shopper"]),
        (
            ["env.webshop.row_numbers=false"],
            ["env.webshop.row_numbers=false", "by their numbers", "set env.webshop.row_numbers=true"],
        ),
        (["env.webshop.observation_mode=text_rich"], ["observation_mode=text_rich", "compact", "model=pretrained"]),
    ],
)
def test_a_starting_policy_that_never_scores_is_refused(
    settings: list[str], words: list[str], refused: Callable[..., str]
) -> None:
    said = refused(*settings)
    for word in words:
        assert word in said


def test_an_agents_tasks_are_for_any_starting_policy(tmp_path: Path) -> None:
    preflight.check_training(load(["agent.command=echo", "model=scratch", f"run.dir={tmp_path / 'out'}"]))


@pytest.mark.parametrize(
    ("words", "num_bytes_each"),
    [
        ([], 3 * 4),
        (["engine.dtype=bfloat16", "pipeline.weights_dtype=engine"], 3 * 2),
        (["engine.dtype=bfloat16"], 3 * 4),
        (["engine.dtype=bfloat16", "pipeline.weights_dtype=engine", "learner.sync_interval=2"], 3 * 2 + 2 * 4),
    ],
)
def test_weights_count_in_the_dtype_in_which_they_are_published(
    refused: Callable[..., str], model: Path, words: list[str], num_bytes_each: int
) -> None:
    """And what is kept beside them for a later learner in float32."""
    num_parameters = sum(tensor.size for tensor in load_file(model / "model.safetensors").values())
    said = refused(f"model.path={model}", "replay.capacity_mb=1000000", *words)
    assert f"{num_bytes_each * num_parameters / (1 << 20):,.0f} MiB for pipeline.weight_slots" in said


def test_weights_count_as_the_float32_that_the_board_holds(refused: Callable[..., str], model: Path) -> None:
    weights = load_file(model / "model.safetensors")
    num_bytes = 4 * sum(tensor.size for tensor in weights.values())
    save_file({name: tensor.astype(np.float16) for name, tensor in weights.items()}, model / "model.safetensors")
    said = refused(f"model.path={model}", "replay.capacity_mb=1000000")
    assert f"{3 * num_bytes / (1 << 20):,.0f} MiB for pipeline.weight_slots" in said


def test_weights_that_stand_in_a_folder_twice_count_once(model: Path) -> None:
    """Mistral's own format beside shards that an index names."""
    weights = load_file(model / "model.safetensors")
    num_bytes = 4 * sum(tensor.size for tensor in weights.values())
    save_file(weights, model / "consolidated.safetensors")
    assert float32_bytes(str(model)) == num_bytes
    (model / "model.safetensors").unlink()
    names = sorted(weights)
    shards = {"1.safetensors": names[:5], "2.safetensors": names[5:]}
    for file, own in shards.items():
        save_file({name: weights[name] for name in own}, model / file)
    files = {name: file for file, own in shards.items() for name in own}
    (model / "model.safetensors.index.json").write_text(json.dumps({"weight_map": files}))
    assert float32_bytes(str(model)) == num_bytes


@pytest.mark.parametrize("key", ["model.path", "algorithm.reference", "algorithm.credit.teacher"])
def test_a_model_with_an_adapter_beside_its_weights_is_refused(
    refused: Callable[..., str], model: Path, key: str
) -> None:
    """transformers would load both, and the policy that is saved would have the names of neither."""
    (model / "adapter_config.json").write_text("{}")
    words = {
        "algorithm.reference": ["algorithm.kl_coef=0.1"],
        "algorithm.credit.teacher": ["algorithm.credit=distillation"],
    }
    said = refused(*words.get(key, []), f"{key}={model}")
    assert f"{key}={model}" in said and "adapter_config.json" in said and "merge the adapter" in said


def test_weights_without_a_layer_are_refused(refused: Callable[..., str], model: Path) -> None:
    weights = load_file(model / "model.safetensors")
    save_file({n: t for n, t in weights.items() if ".layers.0." not in n}, model / "model.safetensors")
    said = refused(f"model.path={model}")
    assert (
        f"model.path={model}: the weights lack 1 of the layers" in said
        and "is layer 0" in said
        and "copy the model again" in said
    )


def test_a_target_of_adapters_that_the_model_does_not_have_is_refused(refused: Callable[..., str], model: Path) -> None:
    said = refused(f"model.path={model}", "model.lora.rank=4", "model.lora.targets=[q_proj,v_porj]")
    assert "model.lora.targets=['q_proj', 'v_porj']" in said and "is named v_porj: choose from " in said
    offered = said.split("choose from")[1]
    assert "q_proj" in offered and "all-linear" in offered and "embed_tokens" not in offered


def test_an_agent_that_cannot_be_imported_is_refused(refused: Callable[..., str]) -> None:
    assert "agent.name=no_module:agent cannot be imported" in refused("agent.name=no_module:agent", "--dry-run")


def test_every_part_that_is_looked_at_before_a_start_has_a_line() -> None:
    assert {*training_checks(), *actors_checks()} <= set(doctor.DETAILS)
