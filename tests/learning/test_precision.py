"""bfloat16 and activation checkpointing: what they leave as it is, and what they change."""

import dataclasses
from pathlib import Path

import pytest
import torch

from impala_llm.learning.batch_source import Batch
from impala_llm.learning.policy.model import PolicyModel
from impala_llm.learning.ranks.parallel import Ranks
from impala_llm.trainer import Trainer
from tests.helpers import needs_a_path_without_spaces
from tests.learning.builders import make_batch, make_config, save_lm

ROWS = [5, 33, 1, 64, 140, 32]
"""On both sides of the length from which a CPU's attention takes another path."""


def trained(directory: Path, version: int = 3, **learner: object) -> tuple[Trainer, dict[str, float]]:
    config = make_config(entropy_coef=0.01)
    config.learner = dataclasses.replace(config.learner, warmup_updates=0, **learner)  # type: ignore[arg-type]
    model = PolicyModel.from_pretrained(directory, value_trunk_gradient=True)
    trainer = Trainer(config, Ranks("cpu"), model)
    for _ in range(2):
        trainer.update(Batch(tuple(make_batch()), (1.0,) * 6, tuple(range(6)), 1.0), version, progress=0.0)
    return trainer, trainer.log.flush()


@pytest.mark.parametrize("architecture", ["qwen3", "qwen2", "llama", "mixtral"])
@pytest.mark.parametrize("every", [1, 2])
def test_checkpointed_layers_give_the_same_update(tmp_path: Path, architecture: str, every: int) -> None:
    save_lm(tmp_path, architecture)
    (plain, of_plain), (trainer, seen) = trained(tmp_path), trained(tmp_path, activation_checkpointing=every)
    assert seen == of_plain
    for mine, other in zip(trainer.model.parameters(), plain.model.parameters(), strict=True):
        assert torch.equal(mine, other)


def kept_bytes(model: PolicyModel) -> int:
    """Bytes that a forward keeps for the backward pass."""
    kept: dict[int, int] = {}

    def note(tensor: torch.Tensor) -> torch.Tensor:
        kept[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    tokens = torch.randint(0, model.vocab_size, (sum(ROWS),), generator=torch.Generator().manual_seed(1))
    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        model.hidden(tokens, torch.cat([torch.arange(n) for n in ROWS]), torch.tensor(ROWS))
    return sum(kept.values())


def test_fewer_activations_are_kept_the_more_layers_are_checkpointed(tmp_path: Path) -> None:
    save_lm(tmp_path)
    found = []
    for every in (0, 2, 1):
        model = PolicyModel.from_pretrained(tmp_path)
        model.compute_in("float32", every)
        found.append(kept_bytes(model))
    none, half, every_layer = found
    assert none > 1.5 * half > 2 * every_layer


def test_rows_of_many_lengths_multiply_matrices_of_few_shapes(tmp_path: Path) -> None:
    """In bfloat16 a CPU's library compiles kernels for each number of rows, and keeps them for good."""
    model = PolicyModel.from_pretrained(save_lm(tmp_path))
    model.compute_in("bfloat16")
    seen: set[int] = set()
    for module in model.lm.model.modules():
        if isinstance(module, torch.nn.Linear):
            module.register_forward_hook(lambda _module, _inputs, output: seen.add(output.shape[-2]))
    for length in range(300, 420):
        tokens = torch.randint(0, model.vocab_size, (length,))
        assert len(model.hidden(tokens, torch.arange(length), torch.tensor([length]))) == length
    assert len(seen) <= 3


def test_bfloat16_computes_with_it_over_weights_and_results_in_float32(tmp_path: Path) -> None:
    model = PolicyModel.from_pretrained(save_lm(tmp_path))
    products: set[torch.dtype] = set()
    for module in model.lm.model.modules():
        if isinstance(module, torch.nn.Linear):
            module.register_forward_hook(lambda _module, _inputs, output: products.add(output.dtype))
    model.compute_in("bfloat16")
    tokens = torch.randint(0, model.vocab_size, (sum(ROWS),), generator=torch.Generator().manual_seed(1))
    hidden = model.hidden(tokens, torch.cat([torch.arange(n) for n in ROWS]), torch.tensor(ROWS))
    log_probs, entropy = model.action_log_probs(hidden[:-1], tokens[1:], 0.7)
    values = model.values(hidden)
    (log_probs.sum() + entropy.sum() + values.sum()).backward()
    assert products == {torch.bfloat16}
    assert {x.dtype for x in (hidden, log_probs, entropy, values)} == {torch.float32}
    assert {p.dtype for p in model.parameters()} == {torch.float32}
    assert {p.grad.dtype for p in model.parameters() if p.grad is not None} == {torch.float32}


def test_bfloat16_and_checkpointing_train_nearly_as_float32_does(tmp_path: Path) -> None:
    save_lm(tmp_path)
    _, exact = trained(tmp_path)
    plain, of_plain = trained(tmp_path, precision="bfloat16")
    checkpointed, of_checkpointed = trained(tmp_path, precision="bfloat16", activation_checkpointing=1)
    assert of_checkpointed == of_plain
    for mine, other in zip(checkpointed.model.parameters(), plain.model.parameters(), strict=True):
        assert torch.equal(mine, other)
    for name in ("loss/policy", "loss/value", "loss/entropy", "optimizer/gradient_norm"):
        assert of_plain[name] != exact[name] and of_plain[name] == pytest.approx(exact[name], rel=0.05), name


@pytest.mark.system
@needs_a_path_without_spaces
def test_compiled_layers_train_as_others_do_and_are_compiled_once_for_rows_of_any_number_and_length(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "compiled"))
    save_lm(tmp_path)
    torch.compiler.reset()
    settings = {"precision": "bfloat16", "activation_checkpointing": 2}
    # Of a version that has sampled no row: none is scored without gradients, which would compile all once more.
    plain, of_plain = trained(tmp_path, 4, **settings)
    compiled, seen = trained(tmp_path, 4, compile_layers=True, **settings)
    for name in ("loss/policy", "loss/value", "loss/entropy", "optimizer/gradient_norm"):
        assert seen[name] == pytest.approx(of_plain[name], rel=0.02), name
    for mine, other in zip(compiled.model.parameters(), plain.model.parameters(), strict=True):
        torch.testing.assert_close(mine, other, rtol=0, atol=3e-3)
    before = num_compiled()
    for rows in ([7, 9], [300], [40] * 8, [3, 70, 200]):
        tokens = torch.randint(0, compiled.model.vocab_size, (sum(rows),), generator=torch.Generator().manual_seed(1))
        hidden = compiled.model.hidden(tokens, torch.cat([torch.arange(n) for n in rows]), torch.tensor(rows))
        hidden.sum().backward()
    assert num_compiled() == before > 0


def num_compiled() -> int:
    return int(torch._dynamo.utils.counters["stats"]["unique_graphs"])
