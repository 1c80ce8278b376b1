"""Ranks as processes that train together: whatever each of them holds, the policy becomes that of one rank."""

import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoConfig, AutoModelForCausalLM

from impala_llm.learning.policy.lora import add_adapters, load_adapters, without_prefix
from impala_llm.learning.policy.model import PolicyModel
from impala_llm.pipeline.weights.board import WeightReader
from impala_llm.settings import LoraConfig
from tests.helpers import needs_a_path_without_spaces
from tests.learning.builders import SHAPE, save_lm
from tests.system.forked_ranks import Start, forked_ranks
from tests.system.runs import Run

ROOT = Path(__file__).parents[2]
STEPS = ("learner.epochs=2", "learner.batch_size=12")
"""Several steps an update: what a pass without gradient gathers must not outlive a step."""
pytestmark = pytest.mark.xdist_group("sharding")


@pytest.fixture(scope="module")
def start() -> Iterator[Start]:
    with forked_ranks("tests.system.training_rank") as of_number:
        yield of_number


def train(start: Start, number: int, policy: Path, output: Path, *words: str) -> dict[str, torch.Tensor]:
    """The parameters, whole, after five updates by so many ranks."""
    output.mkdir()
    result = start(number, [str(policy), str(output), *words])
    assert result.returncode == 0, result.stderr
    return load_file(output / "parameters")


def facts(output: Path, rank: int) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((output / f"facts-{rank}.json").read_text())
    return found


def assert_equal(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor], atol: float = 1e-5) -> None:
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        torch.testing.assert_close(found[name], tensor, atol=atol, rtol=0, msg=name)


@pytest.fixture(scope="module")
def policy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_lm(tmp_path_factory.mktemp("sharding") / "policy")


@pytest.fixture(scope="module")
def alone(start: Start, policy: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Output of the same training by one rank."""
    output = tmp_path_factory.mktemp("sharding") / "alone"
    train(start, 1, policy, output, *STEPS, f"keep={output / 'moments'}")
    return output


@pytest.mark.system
@pytest.mark.parametrize(
    ("number", "words"),
    [
        (2, ["learner.sharding=replicated"]),
        (4, ["learner.sharding=replicated"]),
        (1, ["learner.sharding=fsdp2", "learner.cpu_offload=true"]),
        (3, ["learner.sharding=fsdp2"]),
        (2, ["learner.tensor_parallel=2"]),
        (2, ["learner.sharding=fsdp2", "learner.token_budget=auto"]),
        pytest.param(2, ["learner.sharding=fsdp2", "learner.compile_layers=true"], marks=needs_a_path_without_spaces),
        (4, ["learner.tensor_parallel=2", "learner.token_budget=auto"]),
    ],
)
def test_five_updates_give_the_parameters_of_one_rank(
    start: Start, policy: Path, alone: Path, tmp_path: Path, number: int, words: list[str]
) -> None:
    found = train(start, number, policy, tmp_path / "out", *STEPS, *words)
    assert_equal(found, load_file(alone / "parameters"))
    if "learner.sharding=replicated" not in words:
        waiting = number // 2 - 1 if "learner.tensor_parallel=2" in words else number - 1
        assert_published(tmp_path / "out", number, found, waiting)
    if "learner.sharding=fsdp2" in words:
        assert len({facts(tmp_path / "out", rank)["passes"] for rank in range(number)}) == 1


@pytest.mark.system
@pytest.mark.parametrize(
    ("architecture", "width", "reason"),
    [
        ("mixtral", 2, "parts that its plan divides as "),
        ("qwen3", 4, "num_key_value_heads=2, which it does not divide"),
    ],
)
def test_a_model_that_tensor_parallelism_cannot_divide_is_refused(
    start: Start, tmp_path: Path, architecture: str, width: int, reason: str
) -> None:
    policy = save_lm(tmp_path / "policy", architecture)
    result = start(width, [str(policy), str(tmp_path), f"learner.tensor_parallel={width}"])
    assert result.returncode != 0
    assert f"ModelRefused: learner.tensor_parallel={width} cannot be used" in result.stderr
    assert reason in result.stderr and "learner.tensor_parallel=1" in result.stderr


ENDS_BESIDE_SUMS = """
import sys
import torch
import torch.distributed as dist
from impala_llm.learning.ranks.parallel import exit_process

dist.init_process_group("gloo", init_method="file://" + sys.argv[1], rank=int(sys.argv[2]), world_size=2)
held = dist.group.WORLD  # as a device mesh does
tensors = [torch.ones(1000) for _ in range(2000)]
for tensor in tensors:
    tensor.mark = 1  # to free it takes the interpreter
sums = [dist.all_reduce(tensor, async_op=True) for tensor in tensors]
del tensors, tensor
dist.destroy_process_group()
del sums
print("done")
exit_process(3)
"""


@pytest.mark.system
def test_a_rank_ends_with_its_status_while_the_last_sums_are_freed(tmp_path: Path) -> None:
    """Without `exit_process` about every second pair has a rank that is aborted."""
    command = [sys.executable, "-c", ENDS_BESIDE_SUMS, str(tmp_path / "store")]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    ranks = [
        subprocess.Popen([*command, str(rank)], env=environment, stdout=subprocess.PIPE, text=True) for rank in (0, 1)
    ]
    assert [(rank.communicate(timeout=240)[0], rank.returncode) for rank in ranks] == [("done\n", 3)] * 2


def save_kind(directory: Path, kind: str, **settings: object) -> Path:
    """Write a random causal LM of a kind in transformers, whose settings are its shape and these."""
    torch.manual_seed(0)
    lm = AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **SHAPE, **settings), dtype=torch.float32)
    lm.save_pretrained(directory)
    return directory


@pytest.mark.system
@pytest.mark.parametrize(
    ("kind", "settings", "reason"),
    [
        ("apertus", {}, r"has model\.layers\.0\.mlp\.act_fn\.alpha_p, whose gradient is another once it is divided"),
        ("phi", {"qk_layernorm": True}, r"has model\.layers\.0\.self_attn\.q_layernorm\.weight, whose gradient is "),
        ("cohere", {"use_qk_norm": True}, r"cannot be computed once it is divided \(RuntimeError: "),
    ],
)
def test_a_model_that_computes_or_learns_otherwise_once_it_is_divided_is_refused(
    start: Start, tmp_path: Path, kind: str, settings: dict[str, object], reason: str
) -> None:
    """Parameters between a divided matrix and the next are whole, and a process has only a part of their gradient."""
    policy = save_kind(tmp_path / "policy", kind, **settings)
    result = start(2, [str(policy), str(tmp_path), "learner.tensor_parallel=2"])
    assert result.returncode != 0
    assert re.search(r"ModelRefused: learner\.tensor_parallel=2 cannot be used: .*" + reason, result.stderr)
    assert "learner.tensor_parallel=1" in result.stderr


@pytest.mark.system
def test_a_model_with_biases_in_divided_matrices_learns_as_one_rank(start: Start, tmp_path: Path) -> None:
    policy = save_kind(tmp_path / "policy", "qwen2")
    expected = train(start, 1, policy, tmp_path / "alone")
    # On a CPU with AVX2 one number of a query projection differs by 1.1e-5 after the first step and from then on: its
    # gradient was 8e-8 or 7e-8, by the order of the sums, and AdamW's step is g / (|g| + 1e-8).
    assert_equal(train(start, 2, policy, tmp_path / "out", "learner.tensor_parallel=2"), expected, atol=3e-5)


@pytest.mark.system
def test_ranks_that_share_the_policy_leave_a_step_out_together(start: Start, policy: Path, tmp_path: Path) -> None:
    found = train(start, 2, policy, tmp_path / "out", "learner.batch_size=12", "learner.sharding=fsdp2", "infinite=1")
    assert all(bool(p.isfinite().all()) for p in found.values())
    of_ranks = [facts(tmp_path / "out", rank) for rank in (0, 1)]
    assert [of_rank["skipped"] for of_rank in of_ranks] == [[0, 1, 0, 0, 0]] * 2
    # By the rank that has computed it, which need not be the one that has drawn it.
    assert [sum(counts) for counts in zip(*(of_rank["not_finite"] for of_rank in of_ranks), strict=True)] == [
        0,
        1,
        0,
        0,
        0,
    ]


@pytest.mark.system
def test_five_updates_of_adapters_give_those_of_one_rank(start: Start, policy: Path, tmp_path: Path) -> None:
    """Replicated and in shares; their merged sum on the board and the disk is that of one rank's adapters."""
    words = (*STEPS, "model.lora.rank=4", "learner.learning_rate=0.01")
    expected = train(start, 1, policy, tmp_path / "alone", *words)
    begun = PolicyModel.from_pretrained(policy).state_dict()
    merged = {}
    for name, p in expected.items():
        if ".lora_" not in name:
            stem = name.removesuffix(".base_layer.weight")
            assert name.startswith("value_head") or torch.equal(p, begun[name.replace(".base_layer", "")])
            pair = [expected.get(f"{stem}.lora_{part}.default.weight") for part in "BA"]
            merged[name.replace(".base_layer", "")] = p if pair[0] is None else p + 32 / 4 * pair[0] @ pair[1]
    assert_equal(train(start, 2, policy, tmp_path / "replicated", *words), expected)
    assert_equal(train(start, 2, policy, tmp_path / "fsdp2", *words, "learner.sharding=fsdp2"), expected)
    with WeightReader(tmp_path / "fsdp2" / "board").lease() as lease:
        lease.tensors(verify=True)
        for name, tensor in load_file(lease.path / "model.safetensors").items():
            torch.testing.assert_close(tensor.float(), merged[f"lm.{name}"], atol=1e-4, rtol=2**-8)
        _, of_adapters = without_prefix(lease.extra())
    resumed = PolicyModel.from_pretrained(policy)
    add_adapters(resumed.lm, LoraConfig(rank=4))
    assert load_adapters(resumed.lm, of_adapters)
    assert_equal(dict(resumed.lm.named_parameters(prefix="lm")), {n: p for n, p in expected.items() if "lm." in n})
    saved = PolicyModel.from_pretrained(tmp_path / "fsdp2" / "saved")
    for name, p in saved.named_parameters():
        torch.testing.assert_close(p.detach(), merged[name], atol=1e-4, rtol=0, msg=name)


def assert_published(output: Path, number: int, expected: dict[str, torch.Tensor], waiting: int) -> None:
    """The processes' parts make whole tensors, on the board with the right checksums, and on the disk.

    waiting: the one that asked for the version.
    """
    policy = {name.removeprefix("lm."): p for name, p in expected.items() if name.startswith("lm.")}
    with WeightReader(output / "board").lease() as lease:
        assert lease.version == 1
        lease.tensors(verify=True)
        found = load_file(lease.path / "model.safetensors")
        assert found.keys() == policy.keys()
        assert all(torch.equal(found[name], p.to(torch.bfloat16)) for name, p in policy.items())
    assert [facts(output, rank)["early"] for rank in range(number)] == [
        [1] * (rank == waiting) for rank in range(number)
    ]
    saved = PolicyModel.from_pretrained(output / "saved")
    for name, p in saved.named_parameters():
        assert torch.equal(p, expected[name]), name


@pytest.mark.system
def test_two_ranks_share_memory_and_moments_and_go_on_from_those_of_one(
    start: Start, policy: Path, alone: Path, tmp_path: Path
) -> None:
    shared = (*STEPS, "learner.sharding=fsdp2")
    found = train(start, 2, policy, tmp_path / "two", *shared, f"keep={tmp_path / 'moments'}")
    assert_equal(found, load_file(alone / "parameters"))
    whole = facts(alone, 0)["num_bytes"]
    assert all(facts(tmp_path / "two", rank)["num_bytes"] <= 0.62 * whole for rank in (0, 1))
    of_one, of_two = load_file(alone / "moments"), load_file(tmp_path / "moments")
    assert_equal(of_two, of_one)
    assert of_one["lm.model.norm.weight.step"] == 10
    # The moments of one rank, taken over by two, and the other way round.
    expected = train(start, 1, policy, tmp_path / "one_of_two", *STEPS, f"resume={tmp_path / 'moments'}")
    found = train(start, 2, policy, tmp_path / "two_of_one", *shared, f"resume={alone / 'moments'}")
    assert_equal(found, expected)


@pytest.mark.system
def test_a_learner_whose_ranks_share_the_policy_trains_publishes_and_saves(tmp_path: Path) -> None:
    """With a batch every update that is played by the version before, and actors that read bfloat16 weights."""
    settings = ["experiment=toy", "learner.num_ranks=2", "learner.sharding=fsdp2", "learner.total_updates=6"]
    narrow = ["engine.dtype=bfloat16", "pipeline.weights_dtype=engine", "algorithm.max_staleness=0"]
    with Run(tmp_path, *settings, *narrow, "actor.num_actors=2", "learner.save_every=3") as run:
        assert run.train().wait(240) == 0
        run.assert_gone()
        rows = run.rows()
        assert len(rows) == 6 and all(row["loss/policy"] == row["loss/policy"] for row in rows)
        # What the actors play is what the ranks share: the engine's log-probabilities agree up to its precision.
        assert all(row["mismatch/logprob_mean"] < 0.05 for row in rows)
        policies = [PolicyModel.from_pretrained(tmp_path / name) for name in ("policy-3", "policy-6", "policy")]
        third, sixth, last = ([p.detach() for p in policy.parameters()] for policy in policies)
        assert all(torch.equal(a, b) for a, b in zip(sixth, last, strict=True))
        assert not all(torch.equal(a, b) for a, b in zip(third, sixth, strict=True))
