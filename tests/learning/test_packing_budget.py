"""The token budget: what a trial chooses, and what happens to an update that memory does not suffice for."""

import itertools
import re
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from impala_llm.algorithms.distillation import Distillation
from impala_llm.algorithms.interface import PackedBatch
from impala_llm.learning import packing
from impala_llm.learning.batch_source import Batch
from impala_llm.learning.kept_budget import conditions, read_note
from impala_llm.learning.packing import OutOfMemory, RestartNeeded, TokenBudget, pack
from impala_llm.learning.policy.model import PolicyModel
from impala_llm.learning.ranks.parallel import Ranks
from impala_llm.settings import Config, LearnerConfig
from impala_llm.trainer import Trainer
from tests.learning.builders import make_batch, make_config, save_lm
from tests.two_ranks import Meeting, ThreadRanks

ERRORS = {
    "cuda": torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB."),
    "cpu": RuntimeError("[enforce fail at alloc_cpu.cpp:118] err == 0. DefaultCPUAllocator: can't allocate memory"),
    "cpu without posix_memalign": RuntimeError(
        "[enforce fail at alloc_cpu.cpp:89] DefaultCPUAllocator: not enough memory"
    ),
    "python": MemoryError(),
}


class SmallMemory(PolicyModel):
    """Has no memory for a micro-batch above a size, once it has computed some."""

    most = 10**9
    after = 0
    error: Exception = ERRORS["cuda"]

    def hidden(self, tokens: Tensor, position_ids: Tensor, lengths: Tensor) -> Tensor:
        if len(tokens) > self.most:
            if self.after == 0:
                raise self.error
            self.after -= 1
        return super().hidden(tokens, position_ids, lengths)


def trained(
    directory: Path, config: Config, on_progress: Callable[[int, int], object] | None = None, **limits: object
) -> tuple[Trainer, dict[str, float]]:
    """A trainer after an update, and its metrics."""
    model = SmallMemory.from_pretrained(directory)
    for name, value in limits.items():
        setattr(model, name, value)
    trainer = Trainer(config, Ranks("cpu"), model)
    if on_progress is not None:
        trainer.on_progress = on_progress
    trainer.update(Batch(tuple(make_batch()), (1.0,) * 6, tuple(range(6)), 1.0), version=3, progress=0.0)
    return trainer, trainer.log.flush()


def settings(token_budget: int | str, **learner: object) -> Config:
    config = make_config(entropy_coef=0.01)
    config.learner = LearnerConfig(token_budget=token_budget, warmup_updates=0, **learner)  # type: ignore[arg-type]
    return config


@pytest.mark.parametrize("error", ERRORS)
def test_an_update_that_ran_out_of_memory_is_that_of_the_smaller_budget(
    tmp_path: Path, error: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """To the last bit, though there was a gradient already when memory ran out."""
    save_lm(tmp_path)
    # 119 tokens in micro-batches of 69 and 50, for the monitor's look at the first batch and then for the gradient.
    trainer, seen = trained(tmp_path, settings(70), most=45, after=3, error=ERRORS[error])
    expected, of_expected = trained(tmp_path, settings(40))
    assert trainer.model.after == 0 and trainer.budget.tokens == 40
    said = capsys.readouterr().out
    for words in ("5 to 40 tokens", "learner.token_budget=70", "learner.activation_checkpointing=1"):
        assert words in said
    for name, value in of_expected.items():
        assert seen[name] == (pytest.approx(value, abs=1e-5) if name.startswith("mismatch/") else value), name
    for mine, other in zip(trainer.model.parameters(), expected.model.parameters(), strict=True):
        assert torch.equal(mine, other)


def test_an_update_tells_its_progress_in_tokens_and_begins_again_where_memory_ran_out(tmp_path: Path) -> None:
    told: list[tuple[int, int]] = []
    # 119 tokens in micro-batches of 69 and 50; the second has no memory for its passes, and the look before needs two.
    trained(save_lm(tmp_path), settings(70), lambda *numbers: told.append(numbers), most=45, after=3)
    assert told[0] == (69, 119) and told[1][0] <= 40, "smaller micro-batches count from 0"
    assert told[-1] == (119, 119)
    assert all(first[0] < second[0] for first, second in itertools.pairwise(told[1:]))


def test_the_progress_of_an_update_is_that_of_all_its_steps(tmp_path: Path) -> None:
    told: list[tuple[int, int]] = []
    trained(save_lm(tmp_path), settings(70, epochs=2), lambda *numbers: told.append(numbers))
    assert {total for _, total in told} == {2 * 119} and told[-1] == (2 * 119, 2 * 119)
    assert sorted(told) == told


def of_two_steps(token_budget: int, directory: Path) -> Config:
    """Two steps with all that is computed before them, by the policy in a directory and itself as reference."""
    config = settings(token_budget, epochs=2)
    config.algorithm = replace(
        config.algorithm,
        recompute_behaviour="always",
        whiten_advantages=True,
        reward_kl_coef=0.1,
        reference=str(directory),
    )
    return config


@pytest.fixture(scope="module")
def of_smaller_budget(tmp_path_factory: pytest.TempPathFactory) -> dict[str, float]:
    """Metrics of an update that has memory for all that it was told. Read only."""
    directory = save_lm(tmp_path_factory.mktemp("lm"))
    return trained(directory, of_two_steps(40, directory))[1]


@pytest.mark.system
@pytest.mark.parametrize("after", range(8))
def test_nothing_is_counted_twice_wherever_memory_runs_out(
    tmp_path: Path, after: int, of_smaller_budget: dict[str, float]
) -> None:
    """In one of two micro-batches of the look at the first batch, of that before the first step, and of two steps."""
    trainer, seen = trained(save_lm(tmp_path), of_two_steps(70, tmp_path), most=45, after=after)
    assert trainer.budget.tokens == 40
    for name, expected in of_smaller_budget.items():
        assert seen[name] == pytest.approx(expected, rel=1e-4, abs=1e-5), name


def test_a_row_for_which_memory_does_not_suffice_is_named_with_what_to_lower(tmp_path: Path) -> None:
    with pytest.raises(OutOfMemory, match=r"a row of 40 tokens alone.*learner\.token_budget=1000.*engine\.max_length"):
        trained(save_lm(tmp_path), settings(1000), most=39)


def sharing() -> Ranks:
    """A rank that shares the policy."""
    ranks = Ranks("cpu")
    ranks.is_sharded = True
    return ranks


def test_ranks_that_share_the_policy_name_a_row_for_which_memory_does_not_suffice(tmp_path: Path) -> None:
    config = settings(20)
    config.run.dir = str(tmp_path / "run")
    model = SmallMemory.from_pretrained(save_lm(tmp_path))
    model.most = 39
    batch = Batch(tuple(make_batch()), (1.0,) * 6, tuple(range(6)), 1.0)
    with pytest.raises(OutOfMemory, match=r"a row of 40 tokens alone.*learner\.token_budget=20.*engine\.max_length"):
        Trainer(config, sharing(), model).update(batch, version=3, progress=0.0)


def test_ranks_that_share_the_policy_end_and_go_on_with_a_smaller_budget(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """None of them can begin again alone: the learner that is started next computes the update, to the last bit that
    of the smaller budget."""
    config = settings(1000)
    config.run.dir = str(tmp_path / "run")
    (tmp_path / "run").mkdir()
    batch = Batch(tuple(make_batch()), (1.0,) * 6, tuple(range(6)), 1.0)
    save_lm(tmp_path)
    tried = []
    for _ in range(3):
        model = SmallMemory.from_pretrained(tmp_path)
        model.most = 45
        trainer = Trainer(config, sharing(), model)
        tried.append(trainer.budget.tokens)
        if len(tried) < 3:
            words = r"rows of 5 to 40 tokens.*started again.*token_budget\.json.*learner\.activation_checkpointing=1"
            with pytest.raises(RestartNeeded, match=words):
                trainer.update(batch, version=3, progress=0.0)
    assert tried == [1000, 59, 40]
    assert f"of 40 tokens a micro-batch of {tmp_path / 'run' / 'token_budget.json'} is taken" in capsys.readouterr().out
    trainer.update(batch, version=3, progress=0.0)
    expected, _ = trained(tmp_path, settings(40))
    for mine, other in zip(trainer.model.parameters(), expected.model.parameters(), strict=True):
        assert torch.equal(mine, other)
    # A checkpoint of before does not raise it, and a remedy ends it.
    trainer.budget.load_state_dict({**trainer.budget.state_dict(), "tokens": 1000})
    assert trainer.budget.tokens == 40
    remedied = settings(1000, activation_checkpointing=1)
    remedied.run.dir = config.run.dir
    assert Trainer(remedied, sharing(), SmallMemory.from_pretrained(tmp_path)).budget.tokens == 1000


@pytest.fixture
def progress(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Budgets that were told the supervisor as progress."""
    reported: list[int] = []
    monkeypatch.setattr(packing, "report_progress", lambda: reported.append(1))
    return reported


def test_ranks_on_two_kinds_of_gpu_take_over_one_note(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, progress: list[int]
) -> None:
    """Else each would ignore the other's, run out of memory again, and count as one that goes on."""
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: ("RTX 4090", "RTX 3090")[device.index])
    model, config = SmallMemory.from_pretrained(save_lm(tmp_path)), settings(8192, sharding="fsdp2")

    def begin(rank: int, meeting: Meeting) -> TokenBudget:
        ranks = ThreadRanks(rank, meeting)
        ranks.is_sharded, ranks.device = True, torch.device("cuda", rank)
        return TokenBudget(8192, ranks, conditions(config, ranks, model), tmp_path / "note")

    tried = []
    for _ in range(3):
        with ThreadPoolExecutor(2) as pool:
            budgets = list(pool.map(begin, (0, 1), [Meeting()] * 2))
        tried.append([budget.tokens for budget in budgets])
        with pytest.raises(RestartNeeded):
            budgets[len(tried) % 2].lower([40] * 30)
    assert tried == [[8192] * 2, [600] * 2, [300] * 2] and len(progress) == 3
    noted = read_note(tmp_path / "note")
    assert noted is not None and noted["conditions"]["the device"] == "RTX 3090 and RTX 4090"


def test_a_restart_counts_as_progress_only_where_its_budget_is_below_any_that_was_noted(
    tmp_path: Path, progress: list[int]
) -> None:
    """Whatever the conditions: learners that ignore each other's notes would be started again for ever."""
    for life in range(6):
        budget = TokenBudget(8192, sharing(), {"the device": f"GPU {life % 2}"}, tmp_path / "note")
        with pytest.raises(RestartNeeded):
            budget.lower([40] * 30)
        assert budget.tokens == 600
    assert len(progress) == 1


def test_a_budget_holds_for_the_model_and_the_lengths_that_it_was_found_with(tmp_path: Path) -> None:
    model = SmallMemory.from_pretrained(save_lm(tmp_path))

    def changed(**others: object) -> set[str]:
        config = settings(8192)
        config.model.path = str(tmp_path)
        before = conditions(config, Ranks("cpu"), model)
        for key, value in others.items():
            section: Any = config
            *path, name = key.split("__")
            for part in path:
                section = getattr(section, part)
            setattr(section, name, value)
        now = conditions(config, Ranks("cpu"), model)
        return {key for key in {**before, **now} if before.get(key) != now.get(key)}

    assert changed() == set()
    assert changed(model__path=f"{tmp_path}/../{tmp_path.name}") == set(), "the same directory"
    assert changed(model__path="scratch") == {"model.path"}
    assert changed(model__lora__rank=16) == {"model.lora.rank"}
    assert changed(engine__max_length=64) == {"engine.max_length"}
    assert changed(algorithm__kl_coef=0.1) == {"the reference policy"}
    assert changed(algorithm__credit=Distillation(teacher=str(tmp_path))) == {"the teacher"}
    whole = conditions(settings(8192), Ranks("cpu"), model)
    model.lm.model.layers = model.lm.model.layers[:1]
    cut = conditions(settings(8192), Ranks("cpu"), model)
    assert whole["the model's parameters"] > cut["the model's parameters"]


def test_ranks_that_share_the_policy_say_what_to_set_where_the_disk_is_full(tmp_path: Path) -> None:
    budget = TokenBudget(119, sharing(), {}, tmp_path / "missing" / "token_budget.json")

    def work(micro: PackedBatch) -> None:
        raise MemoryError

    with pytest.raises(OutOfMemory, match=r"token_budget\.json written .*: set learner\.token_budget=59 or lower"):
        budget.in_micro_batches(make_batch(), work)


def test_a_trial_of_ranks_that_share_the_policy_leaves_what_it_has_found(tmp_path: Path) -> None:
    def trial(micro: PackedBatch) -> None:
        if len(micro.tokens) > 1024:
            raise MemoryError
        compute(micro)

    budget = TokenBudget("auto", sharing(), {}, tmp_path / "note")
    with pytest.raises(RestartNeeded):
        budget.choose(make_batch() * 50, trial, 0, sharing())
    after = TokenBudget("auto", sharing(), {}, tmp_path / "note")
    assert after.tokens in (512, 1024) and not after.must_choose(sharing())


def test_other_errors_of_the_model_are_not_taken_for_a_lack_of_memory(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match="shapes"):
        trained(save_lm(tmp_path), settings(1000), most=39, error=RuntimeError("shapes cannot be multiplied"))


def test_the_chosen_budget_is_said_and_kept_by_a_learner_that_goes_on(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    trainer, _ = trained(save_lm(tmp_path), settings("auto"))
    said = capsys.readouterr().out
    assert re.search(r"learner\.token_budget=auto is \d+ tokens a micro-batch: .*tokens/s at 512", said)
    again = Trainer(settings("auto"), Ranks("cpu"), SmallMemory.from_pretrained(tmp_path)).budget
    assert not again.is_chosen
    again.load_state_dict(trainer.state_dict()["budget"])  # as a checkpoint has it
    assert again.is_chosen and again.tokens == trainer.budget.tokens
    assert (
        f"the budget of {again.tokens} tokens a micro-batch of the checkpoint is taken over" in capsys.readouterr().out
    )
    other = TokenBudget(4096)
    other.load_state_dict(trainer.budget.state_dict())
    assert other.tokens == 4096, "a setting that was changed counts"
    assert not capsys.readouterr().out


def test_a_lowered_budget_ends_with_the_remedy_that_was_offered(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    lowered = trained(save_lm(tmp_path), settings(70), most=45)[0].state_dict()["budget"]
    kept, remedied = (
        Trainer(settings(70, **remedy), Ranks("cpu"), SmallMemory.from_pretrained(tmp_path)).budget
        for remedy in ({}, {"activation_checkpointing": 1})
    )
    capsys.readouterr()
    kept.load_state_dict(lowered)
    said = capsys.readouterr().out
    assert kept.tokens == 40 and said.count("\n") == 1
    assert "of 40 tokens a micro-batch of the checkpoint is taken over, with learner.token_budget=70" in said
    remedied.load_state_dict(lowered)
    said = capsys.readouterr().out
    assert remedied.tokens == 70 and said.count("\n") == 1
    assert "learner.activation_checkpointing was 0 and is 1: with learner.token_budget=70 it begins with 70" in said


def test_a_budget_that_was_found_on_another_device_is_found_anew(capsys: pytest.CaptureFixture[str]) -> None:
    before = {"the device": "NVIDIA A100"}
    budget = TokenBudget("auto", None, {"the device": "NVIDIA H100"})
    budget.load_state_dict({"configured": "auto", "tokens": 65536, "is_chosen": True, "conditions": before})
    assert budget.must_choose(Ranks("cpu"))
    assert "with learner.token_budget=auto it is found anew" in capsys.readouterr().out


def test_all_ranks_find_a_budget_anew_where_one_must() -> None:
    meeting = Meeting()
    ranks = [ThreadRanks(rank, meeting) for rank in range(2)]
    budgets = [TokenBudget("auto", None, {"the device": f"GPU {rank}"}) for rank in range(2)]
    state = {"configured": "auto", "tokens": 2048, "is_chosen": True, "conditions": {"the device": "GPU 0"}}
    for budget in budgets:
        budget.load_state_dict(state)
    assert [budget.is_chosen for budget in budgets] == [True, False]
    with ThreadPoolExecutor(2) as pool:
        assert list(pool.map(TokenBudget.must_choose, budgets, ranks)) == [True, True]


def compute(micro: PackedBatch) -> None:
    """Take as long for a token in a micro-batch of any size."""
    begin = time.thread_time()
    while time.thread_time() - begin < 2e-6 * len(micro.tokens):
        pass


@pytest.mark.parametrize("most", [0, 1024])
@pytest.mark.parametrize("error", [name for name in ERRORS if name != "cuda"])
def test_on_a_cpu_no_budget_is_chosen_for_which_memory_does_not_suffice(
    error: str, most: int, capsys: pytest.CaptureFixture[str]
) -> None:
    def trial(micro: PackedBatch) -> None:
        if len(micro.tokens) > most:
            raise ERRORS[error]
        compute(micro)

    budget = TokenBudget("auto")
    budget.choose(make_batch() * 50, trial, 0, Ranks("cpu"))
    assert budget.is_chosen and budget.tokens <= max(512, most)
    assert f"memory does not suffice for {2 * most or 512:,}" in capsys.readouterr().out


@pytest.mark.parametrize("most", [0, 1024])
def test_all_ranks_stop_their_trials_where_the_memory_of_one_does_not_suffice(most: int) -> None:
    meeting, budgets = Meeting(), [TokenBudget("auto") for _ in range(2)]

    def choose(rank: int) -> None:
        def trial(micro: PackedBatch) -> None:
            if rank == 1 and len(micro.tokens) > most:
                raise MemoryError
            compute(micro)

        budgets[rank].choose(make_batch() * 50, trial, 0, ThreadRanks(rank, meeting))

    with ThreadPoolExecutor(2) as pool:
        list(pool.map(choose, (0, 1)))
    assert budgets[0].tokens == budgets[1].tokens <= max(512, most)


def test_a_trial_leaves_no_gradient_and_no_other_weights(tmp_path: Path) -> None:
    """The first update with a budget that was chosen is that with the same budget configured."""
    save_lm(tmp_path)
    chosen, seen = trained(tmp_path, settings("auto"))
    expected, of_expected = trained(tmp_path, settings(chosen.budget.tokens))
    assert seen == of_expected
    for mine, other in zip(chosen.model.parameters(), expected.model.parameters(), strict=True):
        assert torch.equal(mine, other)


def test_work_that_threads_share_counts_by_its_length_not_by_its_sum() -> None:
    """Micro-batches of up to 1,024 tokens take this thread 10 us a token; larger ones each of two threads 6."""

    def burn(seconds: float) -> None:
        begin = time.thread_time()
        while time.thread_time() - begin < seconds:
            pass

    def trial(micro: PackedBatch) -> None:
        tokens = len(micro.tokens)
        if tokens <= 1024:
            burn(10e-6 * tokens)
            return
        other = threading.Thread(target=burn, args=(6e-6 * tokens,))
        other.start()
        burn(6e-6 * tokens)
        other.join()

    budget = TokenBudget("auto")
    budget.choose(make_batch() * 50, trial, 0, Ranks("cpu"))
    assert budget.tokens > 1024


@pytest.mark.parametrize("is_compiled", [False, True])
def test_what_compiling_for_a_size_takes_does_not_count(is_compiled: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """A token takes 1 ms in a micro-batch of 513 to 1,024 tokens, else 2 ms; the first of a power of two 20 s more."""
    now, sizes = 0.0, set[int]()

    def trial(micro: PackedBatch) -> None:
        nonlocal now
        tokens = len(micro.tokens)
        now += (0.001 if 512 < tokens <= 1024 else 0.002) * tokens
        if is_compiled and tokens.bit_length() not in sizes:
            now += 20.0
        sizes.add(tokens.bit_length())

    monkeypatch.setattr(time, "thread_time", lambda: now)
    budget = TokenBudget("auto", None, {"learner.compile_layers": is_compiled})
    budget.choose(make_batch() * 50, trial, 0, Ranks("cpu"))
    assert budget.tokens == 1024


class SmallBackward(SmallMemory):
    """Has memory for a micro-batch above a size only until the gradient of its last layer is there."""

    num_failures = 0

    def hidden(self, tokens: Tensor, position_ids: Tensor, lengths: Tensor) -> Tensor:
        hidden = PolicyModel.hidden(self, tokens, position_ids, lengths)
        if len(tokens) > self.most and hidden.requires_grad:
            hidden.register_hook(self.fail)
        return hidden

    def fail(self, _gradient: Tensor) -> None:
        self.num_failures += 1
        raise self.error


def test_a_trial_that_ran_out_of_memory_amid_its_gradient_leaves_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = SmallBackward.from_pretrained(save_lm(tmp_path))
    model.most = 1024
    trainer = Trainer(settings("auto"), Ranks("cpu"), model)
    memory = Memory(says_so=False)
    memory.total_memory = 10**12
    memory.install(monkeypatch)
    trainer.budget.choose(make_batch() * 20, trainer.trial, 0, Device())  # type: ignore[arg-type]
    assert model.num_failures == 1 and trainer.budget.tokens == 1024
    assert all(p.grad is None for p in model.parameters())


class Device:
    """A rank whose device is said to be a GPU."""

    device = torch.device("cuda", 0)
    world_size, is_main, is_sharded = 1, True, False

    def __init__(self, tensor_parallel: int = 1) -> None:
        self.tensor_parallel = tensor_parallel

    def sum(self, numbers: list[float], of_processes: bool = False) -> list[float]:
        return numbers


class Memory:
    """A GPU of 2,000 bytes on which a trial takes 200 and half a byte a token, and what asks torch for it.

    Args:
        says_so: whether torch knows what a trial has taken.
        others: bytes that other processes hold.
    """

    total_memory = 2000
    reserved = 300
    """Bytes that this process has: they are free for a trial, as far as it needs them."""

    def __init__(self, says_so: bool, others: int = 0) -> None:
        self.says_so, self.others = says_so, others
        self.tried: list[int] = []
        self.peak = 0.0

    def trial(self, micro: PackedBatch) -> None:
        self.tried.append(len(micro.tokens))
        self.peak = 200 + 0.5 * len(micro.tokens)
        if self.peak > self.total_memory - self.others:
            raise ERRORS["cuda"]

    def install(self, monkeypatch: pytest.MonkeyPatch) -> None:
        free = self.total_memory - self.others - self.reserved
        monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _device: (free, self.total_memory))
        monkeypatch.setattr(torch.cuda, "memory_reserved", lambda _device: self.reserved)
        monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", lambda _device: None)
        monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda _device: self.peak if self.says_so else 0)


@pytest.mark.parametrize("says_so", [True, False], ids=["measured", "only by running out"])
def test_on_a_gpu_the_largest_budget_is_chosen_that_its_memory_holds(
    says_so: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    memory, budget = Memory(says_so), TokenBudget("auto")
    memory.install(monkeypatch)
    # 4,096 tokens would take 2,248 bytes; 90 % of 2,000 bytes are left without an optimizer.
    budget.choose(make_batch() * 100, memory.trial, 0, Device())  # type: ignore[arg-type]
    assert budget.tokens == 2048
    assert max(memory.tried) <= (2048 if says_so else 4096), "what is sure to fail is not tried"


def test_on_a_gpu_memory_that_other_processes_hold_is_left_to_them(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """As an engine on the learner's own GPU."""
    memory, budget = Memory(says_so=True, others=900), TokenBudget("auto")
    memory.install(monkeypatch)
    # 2,000 bytes less the others' 900, and less a tenth of all: 900 are left. 2,048 tokens would take 1,224.
    budget.choose(make_batch() * 100, memory.trial, 0, Device())  # type: ignore[arg-type]
    assert budget.tokens == 1024
    assert "CUDA itself and other processes hold" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("others", "to_come", "tensor_parallel", "said"),
    [
        (1_900_000_000, 0, 1, "CUDA itself and other processes hold 1.9 GB of the GPU's 2.0 GB"),
        (0, 1_900_000_000, 1, "the optimizer's moments take 1.9 GB"),
        (0, 1_900_000_000, 2, "or set model.lora.rank=16 and learner.tensor_parallel=1"),
    ],
    ids=["other processes", "moments", "tensor parallel"],
)
def test_on_a_gpu_that_has_no_room_the_smallest_budget_is_taken_and_what_holds_it_is_said(
    others: int,
    to_come: int,
    tensor_parallel: int,
    said: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    memory, budget = Memory(says_so=True, others=others), TokenBudget("auto")
    memory.total_memory, memory.reserved = 2_000_000_000, 0
    memory.install(monkeypatch)
    budget.choose(make_batch() * 100, memory.trial, to_come, Device(tensor_parallel))  # type: ignore[arg-type]
    printed = capsys.readouterr().out
    assert budget.tokens == 512 and not memory.tried
    assert "is 512 tokens a micro-batch: the smallest" in printed and said in printed
    assert "-" not in printed.replace("micro-batch", "") and "CUDA_VISIBLE_DEVICES" in printed


def test_where_the_gpu_of_another_rank_has_no_room_it_is_said_so(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    class OfTwo(Device):
        def sum(self, numbers: list[float], of_processes: bool = False) -> list[float]:
            return [number + of_processes for number in numbers]

    memory, budget = Memory(says_so=True), TokenBudget("auto")
    memory.install(monkeypatch)
    budget.choose(make_batch() * 100, memory.trial, 0, OfTwo())  # type: ignore[arg-type]
    assert budget.tokens == 512 and "the smallest, since the GPU of another rank" in capsys.readouterr().out


def test_micro_batches_of_a_lowered_budget_hold_every_row_once() -> None:
    budget, sizes = TokenBudget(119), list[int]()

    def work(micro: PackedBatch) -> tuple[int, ...]:
        sizes.append(len(micro.tokens))
        if sizes[-1] > 60:
            raise MemoryError
        return micro.members

    found = budget.in_micro_batches(make_batch(), work)
    assert sorted(i for members in found for i in members) == list(range(6))
    assert [len(micro.tokens) for micro in pack(make_batch(), budget.tokens)] == sizes[1:]


@pytest.mark.system
@pytest.mark.skipif(sys.platform != "linux", reason="other systems do not keep a process below a limit of its memory")
def test_memory_that_the_system_does_not_give_lowers_the_budget() -> None:
    code = """if True:
        import resource
        import torch
        from impala_llm.learning.packing import TokenBudget
        from tests.learning.builders import make_batch

        def work(micro):
            torch.empty(1 << 41 if len(micro.tokens) > 60 else 1, dtype=torch.uint8)

        resource.setrlimit(resource.RLIMIT_AS, (1 << 40, 1 << 40))
        budget = TokenBudget(119)
        budget.in_micro_batches(make_batch(), work)
        print("tokens", budget.tokens)
    """
    root = Path(__file__).parents[2]
    found = subprocess.run([sys.executable, "-c", code], cwd=root, capture_output=True, text=True, check=False)
    assert "tokens 59" in found.stdout, found.stderr
