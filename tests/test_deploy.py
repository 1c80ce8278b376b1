"""The files in deploy/: well-formed, and with no word that the command line or `config.load` refuses."""

import json
import os
import re
import shutil
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from impala_llm.commands import parser as commands
from impala_llm.config import load
from impala_llm.pipeline.network.keys import make_keys
from impala_llm.settings import ASSETS, Config
from tests.helpers import write_program

ROOT = Path(__file__).parents[1]
DEPLOY = ROOT / "deploy"
SCRIPTS = sorted((DEPLOY / "slurm").glob("*.sh"))
SBATCH_OPTIONS = {
    "cpus-per-task": r"\d+",
    "exclusive": "",
    "gpus-per-node": r"\d+",
    "job-name": r"[\w-]+",
    "no-kill": "",
    "nodes": r"\d+",
    "ntasks-per-node": "1",
    "open-mode": "append|truncate",
    "output": r"[\w%.-]+",
    "requeue": "",
    "signal": r"(B:)?[A-Z0-9]+@\d+",
    "time": r"\d+:\d\d:\d\d",
}
"""Options of sbatch(1), with the values that each takes."""


@pytest.fixture
def mounts(tmp_path: Path) -> dict[str, Path]:
    """Paths here that stand for those in containers."""
    learner, actor = tmp_path / "learner-keys", tmp_path / "actor-keys"
    make_keys(learner)
    actor.mkdir(mode=0o700)
    for name in ("actor.secret.json", "learner.public.json"):
        shutil.copy2(learner / name, actor / name)
    settings = tmp_path / "run.yaml"
    settings.write_text((DEPLOY / "run.yaml").read_text().replace("/models/policy", str(ASSETS / "tiny_shopper")))
    return {"settings": settings, "learner": learner, "actor": actor}


def load_words(words: list[str], mounts: dict[str, Path]) -> Config:
    """The settings of a container's command of impala-llm."""
    command, *rest = words
    keys = mounts["learner" if command == "train" else "actor"]
    here = [word.replace("/settings/run.yaml", str(mounts["settings"])).replace("=/keys", f"={keys}") for word in rest]
    flagged, overrides = commands.options(command, here)
    assert not flagged
    return load(overrides)


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.name)
def test_slurm_scripts_are_shell_with_directives_that_sbatch_takes(script: Path) -> None:
    subprocess.run(["bash", "-n", str(script)], check=True)
    if shellcheck := shutil.which("shellcheck"):
        subprocess.run([shellcheck, str(script)], check=True)
    lines = script.read_text().splitlines()
    commands = [number for number, line in enumerate(lines) if line and not line.startswith("#")]
    found = [(number, line) for number, line in enumerate(lines) if line.startswith("#SBATCH")]
    assert found and max(number for number, _ in found) < min(commands)  # sbatch reads no further
    assert "#SBATCH --exclusive" in lines, "the shared memory of a node takes one job of a run"
    for _, line in found:
        option = re.fullmatch(r"#SBATCH --([a-z-]+)(?:=(\S+))?", line)
        assert option and re.fullmatch(SBATCH_OPTIONS[option[1]], option[2] or ""), line


def test_actors_outlive_a_node_that_fails() -> None:
    """The option of srun is for its step alone: without that of sbatch, Slurm ends the job."""
    text = (DEPLOY / "slurm/actors.sh").read_text()
    assert "#SBATCH --no-kill" in text.splitlines() and re.search(r"\bsrun .*--no-kill\b", text)


@pytest.mark.system
def test_both_sides_of_a_slurm_run_are_given_settings_that_fit(tmp_path: Path, mounts: dict[str, Path]) -> None:
    for folder in ("bin", "node"):
        (tmp_path / folder).mkdir()
    write_program(tmp_path / "node" / "impala-llm", "import json, sys; print(json.dumps(sys.argv[1:]))")
    runs = tmp_path / "jürgen" / "my runs (2) [a, b]"
    srun = "import json, os, sys; given = [sys.argv[1:], os.environ.get('SRUN_CPUS_PER_TASK')]; "
    srun += "json.dump(given, open(os.environ['WORDS'], 'w'))"
    write_program(tmp_path / "bin" / "srun", srun)
    words = [f"experiment={mounts['settings']}", "run.name=shop", "learner.num_ranks=4"]
    called: dict[str, list[str]] = {}
    cores = {}
    for script in sorted(SCRIPTS, reverse=True):  # the learner makes the keys
        environment = {
            **os.environ,
            "PATH": f"{tmp_path / 'bin'}:{Path(sys.executable).parent}:{os.environ['PATH']}",
            "PYTHONPATH": str(ROOT),
            "RUNS": str(runs),
            "WORDS": str(tmp_path / script.stem),
            # The job asked for 4, and has all of an exclusive node.
            "SLURM_GPUS_PER_NODE": "h100:4",
            "SLURM_GPUS_ON_NODE": "8",
            "SLURM_CPUS_PER_TASK": "32",
            "LEARNER_ADDRESS": "node-7",
        }
        subprocess.run(["bash", str(script), *words], cwd=ROOT, env=environment, check=True, timeout=120)
        called[script.stem], cores[script.stem] = yaml.safe_load((tmp_path / script.stem).read_text())
    assert cores == {"learner": "32", "actors": "32"}
    assert (runs / "shop/learner").read_text() == "tcp://node-7:7400\n"
    learner, actors = called["learner"], called["actors"]
    assert "torchrun --standalone --nproc-per-node 4 " in " ".join(learner)
    config = load(learner[learner.index("impala_llm.learner") + 1 :])
    assert (config.learner.num_ranks, config.actor.num_actors, config.run.dir) == (4, 0, f"{runs}/shop")
    node = {**os.environ, "PATH": f"{tmp_path / 'node'}:{os.environ['PATH']}"}
    printed = subprocess.run(actors[actors.index("bash") :], env=node, stdout=subprocess.PIPE, check=True).stdout
    command, *words = json.loads(printed)
    away = load(words)
    assert (command, away.run.dir) == ("actors", f"{runs}/shop/actors/{socket.gethostname()}")
    assert away.pipeline.connect == f"@{runs}/shop/learner"
    assert (away.learner.num_ranks, away.run.name) == (config.learner.num_ranks, config.run.name)


def learner_job(tmp_path: Path, *words: str, **environment: str) -> tuple[int, list[str]]:
    """Run learner.sh with an `srun` that ends with status CODE. Returns its status and the words given to srun."""
    (tmp_path / "bin").mkdir(exist_ok=True)
    keeps = "import json, os, sys; json.dump(sys.argv[1:], open(os.environ['WORDS'], 'w')); "
    keeps += "os.system(os.environ.get('MEANWHILE', '')); "
    write_program(tmp_path / "bin" / "srun", f"{keeps}sys.exit(int(os.environ['CODE']))")
    here = {
        "PATH": f"{tmp_path / 'bin'}:{Path(sys.executable).parent}:{os.environ['PATH']}",
        "PYTHONPATH": str(ROOT),
        "RUNS": str(tmp_path / "runs"),
        "WORDS": str(tmp_path / "words"),
        "SLURM_GPUS_PER_NODE": "4",
        "CODE": "0",
    }
    done = subprocess.run(
        ["bash", str(DEPLOY / "slurm/learner.sh"), *words],
        cwd=ROOT,
        env={**os.environ, **here, **environment},
        timeout=120,
    )
    return done.returncode, yaml.safe_load((tmp_path / "words").read_text())


@pytest.mark.system
@pytest.mark.parametrize(("ranks", "processes"), [({}, 4), ({"RANKS": "1"}, 2)], ids=["all GPUs", "RANKS"])
def test_a_slurm_learner_whose_ranks_are_several_processes_has_them_all(
    tmp_path: Path, mounts: dict[str, Path], ranks: dict[str, str], processes: int
) -> None:
    """The name of the run's folder is that of the settings file."""
    settings = mounts["settings"]
    settings.write_text(settings.read_text().replace("sharding: fsdp2", "tensor_parallel: 2"))
    code, learner = learner_job(tmp_path, f"experiment={settings}", LEARNER_ADDRESS="node-7", **ranks)
    assert code == 0
    config = load(learner[learner.index("impala_llm.learner") + 1 :])
    assert learner[learner.index("--nproc-per-node") + 1] == str(config.learner.num_processes) == str(processes)
    assert config.run.dir == str(tmp_path / "runs" / "shop")


@pytest.mark.system
def test_a_slurm_learner_that_is_refused_leaves_actors_the_address_of_the_one_that_lives(tmp_path: Path) -> None:
    words = ("experiment=toy", "run.name=toy")
    assert learner_job(tmp_path, *words, LEARNER_ADDRESS="node-7")[0] == 0
    assert learner_job(tmp_path, *words, LEARNER_ADDRESS="node-8", CODE="1")[0] == 1
    assert (tmp_path / "runs/toy/learner").read_text() == "tcp://node-7:7400\n"


@pytest.mark.system
def test_a_slurm_learner_that_ends_leaves_the_address_of_its_successor(tmp_path: Path) -> None:
    """As a job that reaches its time limit while it saves."""
    words = ("experiment=toy", "run.name=toy")
    learner_job(tmp_path, *words, LEARNER_ADDRESS="node-6")
    successor = f"echo tcp://node-8:7400 >{tmp_path}/runs/toy/learner"
    assert learner_job(tmp_path, *words, LEARNER_ADDRESS="node-7", CODE="143", MEANWHILE=successor)[0] == 143
    assert (tmp_path / "runs/toy/learner").read_text() == "tcp://node-8:7400\n"


@pytest.mark.system
@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.name)
def test_a_folder_of_a_slurm_run_that_cannot_be_quoted_is_refused(tmp_path: Path, script: Path) -> None:
    own = {"PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}", "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        ["bash", str(script), "experiment=toy", "run.name=toy"],
        env={**os.environ, **own, "RUNS": str(tmp_path / "jürgen's")},
        cwd=ROOT,
        stderr=subprocess.PIPE,
        text=True,
        timeout=120,
    )
    assert done.returncode == 2 and "jürgen's/toy has an apostrophe" in done.stderr and "set RUNS" in done.stderr
    assert list(tmp_path.iterdir()) == []


def test_a_slurm_job_with_fewer_gpus_than_a_rank_needs_is_told(tmp_path: Path) -> None:
    script = (DEPLOY / "slurm/learner.sh").read_text()
    check = script[script.index("ranks=${RANKS") : script.index("mkdir -p")]
    done = subprocess.run(["bash", "-c", f"gpus=h100:1 width=2\n{check}"], capture_output=True, text=True)
    assert done.returncode == 2 and "learner.tensor_parallel=2 needs 2 GPUs, and this job has 1" in done.stderr


def test_kubernetes_manifests_start_both_sides_with_settings_that_fit(mounts: dict[str, Path]) -> None:
    text = (DEPLOY / "kubernetes/run.yaml").read_text()
    objects: dict[tuple[str, str], Any] = {
        (each["kind"], each["metadata"]["name"]): each for each in yaml.safe_load_all(text)
    }
    service, learner_job = objects["Service", "impala-learner"]["spec"], objects["Job", "impala-learner"]["spec"]
    actors_job = objects["Job", "impala-actors"]["spec"]
    assert service["clusterIP"] == "None"
    assert service["selector"].items() <= learner_job["template"]["metadata"]["labels"].items()
    configs = []
    for job in (learner_job, actors_job):
        pod = job["template"]["spec"]
        volumes = {volume["name"]: volume for volume in pod["volumes"]}
        for container in (*pod["initContainers"], *pod["containers"]):
            assert container["image"] == "impala_llm:gpu"
            assert {mount["name"] for mount in container["volumeMounts"]} <= volumes.keys()
        [container] = pod["containers"]
        [shm] = [mount["name"] for mount in container["volumeMounts"] if mount["mountPath"] == "/dev/shm"]
        assert volumes[shm]["emptyDir"]["medium"] == "Memory"
        # The files that an init container copies are those of the secret that the head of the file tells how to make.
        secret = volumes["secret"]["secret"]["secretName"]
        made = re.search(rf"generic {secret} ((?:.|\n)*?)\n#\s*(?:kubectl|\n)", text + "\n#\n")
        assert made is not None
        named = {(k or Path(p).name) for k, p in re.findall(r"--from-file=(?:([\w.]+)=)?(\S+)", made[1])}
        assert set(re.findall(r"/secret/(\S+)", pod["initContainers"][0]["command"][-1])) == named
        configs.append(load_words(container["args"], mounts))
        wanted = configs[-1].learner.num_ranks if container["args"][0] == "train" else 1
        assert container["resources"]["limits"]["nvidia.com/gpu"] >= wanted
    learner, away = configs
    assert away.pipeline.connect == f"tcp://impala-learner:{service['ports'][0]['port']}"
    assert learner.pipeline.bind == f"tcp://0.0.0.0:{service['ports'][0]['port']}"
    assert (learner.run.name, learner.learner) == (away.run.name, away.learner)
    assert learner.run.dir.startswith("/runs/")  # on the volume that stays
    assert actors_job["completionMode"] == "Indexed" and actors_job["completions"] == actors_job["parallelism"]
    # Each relay can fetch a version of its own.
    assert learner.pipeline.weight_slots >= actors_job["parallelism"] + 2


def kubernetes_job(name: str) -> dict[str, Any]:
    """The `spec` of a Job."""
    text = (DEPLOY / "kubernetes/run.yaml").read_text()
    [found] = [
        each["spec"] for each in yaml.safe_load_all(text) if (each["kind"], each["metadata"]["name"]) == ("Job", name)
    ]
    return found


def test_actors_give_their_gpus_back_when_their_learner_does_not_come_back(mounts: dict[str, Path]) -> None:
    """Long enough for a learner that is started again, on another node too: it may wait for that."""
    settings = load([f"experiment={mounts['settings']}"])
    patience_s = settings.pipeline.learner_timeout_s
    assert patience_s is not None and 3600 <= patience_s <= 6 * 3600
    job = kubernetes_job("impala-actors")
    [wait] = re.findall(r"timeout (\d+) sh -c", job["template"]["spec"]["initContainers"][0]["command"][-1])
    assert int(wait) == patience_s
    # They end with 1 then, and with 2 for settings that will fail again: neither is begun anew.
    assert job["template"]["spec"]["restartPolicy"] == "Never"  # which a policy of failures is for
    [disrupted, final] = job["podFailurePolicy"]["rules"]
    assert final["action"] == "FailIndex" and {1, 2, 124} == set(final["onExitCodes"]["values"])
    assert disrupted == {"action": "Ignore", "onPodConditions": [{"type": "DisruptionTarget"}]}
    composed = yaml.safe_load((DEPLOY / "compose.yaml").read_text())
    assert composed["services"]["actors"]["restart"] == "on-failure:1"  # each time they wait anew


def test_a_pod_of_actors_waits_for_the_learner_s_name_and_not_for_ever(tmp_path: Path) -> None:
    script = kubernetes_job("impala-actors")["template"]["spec"]["initContainers"][0]["command"][-1]
    waiting = script[script.index("exec timeout") :]
    write_program(tmp_path / "getent", "import os, sys; sys.exit(int(os.environ['FOUND'] != '1'))")
    for found, limit_s, status in (("0", "0.1", 124), ("1", "60", 0)):
        environment = {**os.environ, "PATH": f"{tmp_path}:{os.environ['PATH']}", "FOUND": found}
        command = re.sub(r"timeout \d+", f"timeout {limit_s}", waiting)
        assert subprocess.run(["sh", "-c", command], env=environment, timeout=60).returncode == status


def test_several_pods_read_the_volume_of_the_models() -> None:
    for name in ("impala-learner", "impala-actors"):
        [claim] = [v for v in kubernetes_job(name)["template"]["spec"]["volumes"] if v["name"] == "models"]
        assert claim["persistentVolumeClaim"]["readOnly"]
    assert "ReadOnlyMany" in (DEPLOY / "kubernetes/run.yaml").read_text()


def test_the_first_process_of_each_image_is_an_init() -> None:
    """As process 1 a program without handlers ignores SIGTERM, and its orphans' children stay as zombies."""
    stages = re.split(r"^FROM ", (ROOT / "Dockerfile").read_text(), flags=re.MULTILINE)[1:]
    assert len(stages) == 2
    for stage in stages:
        assert re.search(r"apt-get install .*\btini\b", stage)
        assert re.findall(r"^ENTRYPOINT (.*)$", stage, re.MULTILINE) == ['["tini", "--", "impala-llm"]']
    for name in ("impala-learner", "impala-actors"):
        [container] = kubernetes_job(name)["template"]["spec"]["containers"]
        assert "command" not in container  # which would take the place of the entry point
    composed = yaml.safe_load((DEPLOY / "compose.yaml").read_text())
    assert not any("entrypoint" in service for service in composed["services"].values())


def test_compose_starts_both_sides_with_settings_that_fit(mounts: dict[str, Path]) -> None:
    composed = yaml.safe_load((DEPLOY / "compose.yaml").read_text())
    services = composed["services"]
    learner, actors = (load_words(services[name]["command"], mounts) for name in ("learner", "actors"))
    assert learner.actor.num_actors == 0 and learner.learner == actors.learner
    assert learner.pipeline.bind is None and actors.pipeline.connect is None
    for service in services.values():
        assert service["ipc"] == "host" and service["image"] == "impala_llm:gpu"
        # A start that is refused, as that of a run that has finished, is not tried without end.
        assert re.fullmatch(r"on-failure:\d+", service["restart"])
        for volume in service["volumes"]:
            here = re.sub(r"\$\{.*?\}", "MODEL", volume).split(":")[0]
            assert here == "MODEL" or here == "../outputs" or (DEPLOY / here).is_file()
