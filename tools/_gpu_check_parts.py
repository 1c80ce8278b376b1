"""Parts of tools/gpu_check.sh; gpu_check.py starts a process for each, see `run`.

Each compares what the project computes with a definition of it, or with itself on fewer processes. Models have random
weights, so that nothing has to be downloaded. A long file: one function a part, which share their models and rows.
"""

import asyncio
import json
import os
import shutil
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.multiprocessing import start_processes
from transformers import AutoModelForCausalLM, Qwen3Config, Qwen3ForCausalLM

from impala_llm.bench._learner_loops import random_row
from impala_llm.config import load
from impala_llm.engines import make_engine
from impala_llm.engines.base import SamplingParams
from impala_llm.learning.batch_source import Batch
from impala_llm.learning.policy.attention import FLEX, SEGMENTS
from impala_llm.learning.policy.attention_choice import choose_attention, options
from impala_llm.learning.policy.model import PolicyModel
from impala_llm.learning.policy.products import prepare_cuda
from impala_llm.learning.ranks.parallel import Ranks, exit_process
from impala_llm.pipeline.shm.run_directory import shared_memory
from impala_llm.processes.supervised import RENDEZVOUS
from impala_llm.trainer import Trainer
from impala_llm.trajectory import Trajectory

EXACT_NATS = 1e-3
"""Mean difference of log-probabilities in float32: right ones stay below 1e-5."""
BFLOAT16_NATS = 0.02
COARSE_NATS, COARSE = 0.1, 0.2
"""Two right ways in bfloat16 with large weights: difference of log-probabilities, and that of gradients over their
size."""
MISMATCH_NATS = 0.05
"""The same between engine and learner of a run, bfloat16 included."""
SAME = 1e-3
"""Difference of two updates, or gradients, over their size, that differ by the order of sums alone."""
PEAK_TFLOPS = {
    "B200": 2250, "H200": 989, "H100 PCIe": 756, "H100": 989, "L40S": 362, "L40": 181, "L4": 121, "A100": 312,
    "A10": 125, "A40": 150, "RTX 5090": 209, "RTX 4090": 165, "RTX 3090": 71,
}  # fmt: skip
"""Dense bfloat16 products, 10^12 a second, from the data sheets; the first name that the GPU's contains."""
LENGTHS = (57, 9, 130, 33)
OFFLOADED = "fsdp2 with CPU offload"
RANK_UPDATES = 5


# --- models, rows, runs


def save_model(folder: Path, width: int = 128, layers: int = 3, vocabulary: int = 512, spread: float = 0.1) -> Path:
    """Write a Qwen3 with random weights. spread: their deviation; large, so that a wrong row shows."""
    torch.manual_seed(0)
    shape = Qwen3Config(
        vocab_size=vocabulary, hidden_size=width, intermediate_size=3 * width, num_hidden_layers=layers,
        num_attention_heads=max(2, width // 64), num_key_value_heads=max(1, width // 128), head_dim=64,
        max_position_embeddings=4096, tie_word_embeddings=False, initializer_range=spread,
        bos_token_id=None, eos_token_id=None, pad_token_id=0,
    )  # fmt: skip
    Qwen3ForCausalLM(shape).save_pretrained(folder)
    return folder


def random_rows(lengths: Sequence[int], vocabulary: int, device: str) -> list[Tensor]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randint(0, vocabulary, (length,), generator=generator).to(device) for length in lengths]


def episodes(lengths: Sequence[int], vocabulary: int) -> list[Trajectory]:
    """Random rows with random rewards; all tokens but the first four are one action."""
    rng = np.random.default_rng(1)
    rows = [random_row(rng, number, 4, length, vocabulary) for number, length in enumerate(lengths)]
    return [replace(row, group_id=number) for number, row in enumerate(rows)]


def packed_log_probs(model: PolicyModel, rows: Sequence[Tensor]) -> Tensor:
    """float32[all tokens but the first of each row], as the learner computes them."""
    device = rows[0].device
    lengths = [len(row) for row in rows]
    positions = torch.cat([torch.arange(n, device=device) for n in lengths])
    hidden = model.hidden(torch.cat(list(rows)), positions, torch.tensor(lengths)).split(lengths)
    parts = [model.action_log_probs(h[:-1], row[1:], 1.0)[0] for h, row in zip(hidden, rows, strict=True)]
    return torch.cat(parts)


def padded_log_probs(lm: Any, rows: Sequence[Tensor]) -> Tensor:
    """The same by transformers' own attention, rows padded at their ends."""
    width = max(len(row) for row in rows)
    tokens = torch.stack([torch.nn.functional.pad(row, (0, width - len(row))) for row in rows])
    mask = torch.stack([(torch.arange(width, device=row.device) < len(row)).long() for row in rows])
    logits = lm(input_ids=tokens, attention_mask=mask, use_cache=False).logits.float().log_softmax(-1)
    parts = [of[: len(row) - 1].gather(-1, row[1:, None])[:, 0] for of, row in zip(logits, rows, strict=True)]
    return torch.cat(parts)


def train(folder: Path, *words: str, until: int | None = None) -> tuple[int, list[dict[str, Any]]]:
    """A run of `impala-llm train` in a folder: its exit code and the metrics of its updates.

    Args:
        until: kill it, as a host is lost, once it has made so many updates.
    """
    name = f"gpu-check-{folder.name}-{os.getpid()}"
    command = [sys.executable, "-m", "impala_llm.cli", "train", f"run.name={name}", f"run.dir={folder}"]
    command += ["run.terminal=false", "replay.capacity_mb=64", *words]
    log = folder.with_suffix(".log")
    metrics = folder / "tensorboard" / "metrics.jsonl"

    def rows() -> list[dict[str, Any]]:
        lines = metrics.read_text().splitlines(keepends=True) if metrics.exists() else []
        return [json.loads(line) for line in lines if line.endswith("\n")]

    with log.open("ab") as out:
        run = subprocess.Popen(command, stdout=out, stderr=out)
        while run.poll() is None and (until is None or len(rows()) < until):
            time.sleep(0.1)
        if run.poll() is None:
            run.kill()  # the kernel ends learner and actors with it
            run.wait()
            deadline = time.monotonic() + 30
            while is_alive(name) and time.monotonic() < deadline:
                time.sleep(0.1)
            for left in shared_memory().glob(f"*{name}*"):
                shutil.rmtree(left)
    if run.returncode not in (0, -9):
        raise SystemExit(f"the run ended with code {run.returncode}: {log.read_text().strip().splitlines()[-1]}")
    return run.returncode, rows()


def is_alive(name: str) -> bool:
    """Whether a process of a run lives."""
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            if f"run.name={name}".encode() in path.read_bytes().split(b"\0"):
                return True
        except OSError:
            continue  # it is gone
    return False


def mean(rows: Sequence[dict[str, Any]], name: str) -> float:
    """Mean of a metric over the updates that have it."""
    return statistics.fmean(row[name] for row in rows if row.get(name) is not None)


# --- parts


def engine(settings: dict[str, Any], folder: Path) -> tuple[bool, str]:
    """Log-probabilities that the embedded engine reports, of completions in two turns, against a plain forward."""
    save_model(folder / "model")
    words = ["model=scratch", "engine.max_length=512", f"model.device={settings['device']}"]
    config = load([*words, f"run.dir={folder}"])
    prompts = random_rows((5, 40, 17, 64, 3, 29), 512, "cpu")

    async def play() -> list[tuple[list[int], list[float]]]:
        """Tokens of each history, and the log-probabilities of those that were sampled, NaN for the others."""
        made = make_engine(config, folder / "model", version=0)
        await made.start()

        async def episode(number: int, prompt: Tensor) -> tuple[list[int], list[float]]:
            history, known = prompt.tolist(), [float("nan")] * len(prompt)
            for _ in range(2):
                params = SamplingParams(max_new_tokens=24, seed=number)
                completion = await made.generate(str(number), history, params)
                history = [*history, *completion.tokens.tolist(), 7, 8]
                known = [*known, *completion.log_probs.tolist(), float("nan"), float("nan")]
            return history, known

        found = await asyncio.gather(*(episode(number, prompt) for number, prompt in enumerate(prompts)))
        await made.close()
        return list(found)

    lm = AutoModelForCausalLM.from_pretrained(folder / "model", dtype=torch.float32, attn_implementation="eager")
    lm.to(settings["device"])
    differences = []
    for history, known in asyncio.run(play()):
        row = torch.tensor(history, device=settings["device"])
        with torch.no_grad():
            plain = lm(input_ids=row[None], use_cache=False).logits[0, :-1].float().log_softmax(-1)
        plain = plain.gather(-1, row[1:, None])[:, 0].cpu()
        reported = torch.tensor(known[1:])
        differences.append((plain - reported).abs()[~reported.isnan()])
    apart = torch.cat(differences)
    figure = f"{apart.mean():.1e} nats apart on average, {apart.max():.1e} at most, {len(apart)} tokens"
    return float(apart.mean()) < EXACT_NATS, figure


def packed(settings: dict[str, Any], folder: Path) -> tuple[bool, str]:
    """Log-probabilities and gradients of packed rows against transformers' on padded ones; and each attention that this
    machine has for packed rows against that of our segments."""
    save_model(folder / "model")
    rows = random_rows(LENGTHS, 512, settings["device"])
    model = PolicyModel.from_pretrained(folder / "model").to(settings["device"])
    model.check(256)
    lm = AutoModelForCausalLM.from_pretrained(folder / "model", dtype=torch.float32, attn_implementation="sdpa")
    lm.to(settings["device"])
    mine, theirs = packed_log_probs(model, rows), padded_log_probs(lm, rows)
    mine.sum().backward()
    theirs.sum().backward()
    gradients = [(a.grad, b.grad) for a, b in zip(model.lm.parameters(), lm.parameters(), strict=True)]
    apart = float((mine - theirs).abs().mean())
    difference = sum(float((a - b).square().sum()) for a, b in gradients) ** 0.5
    off = difference / sum(float(b.square().sum()) for _, b in gradients) ** 0.5
    passed = apart < EXACT_NATS and off < SAME
    found = [f"segments: {apart:.1e} nats apart on average, gradients differ by {off:.1e}"]
    for precision in ("float32", "bfloat16"):
        model.compute_in(precision)
        here = [FLEX]
        if settings["device"] == "cuda":
            here += options("auto", "cuda", precision).implementations
        for implementation in here:
            if implementation != SEGMENTS:
                # Compiling takes a CPU a minute or two.
                with torch.compiler.set_stance("default" if settings["device"] == "cuda" else "force_eager"):
                    same, figure = beside_segments(model, implementation, rows)
                passed = passed and same
                found.append(f"{implementation} in {precision}: {figure}")
    return passed, "; ".join(found)


def beside_segments(model: PolicyModel, implementation: str, rows: Sequence[Tensor]) -> tuple[bool, str]:
    """Log-probabilities of another attention, and its gradients where there is a backward pass, against segments'."""
    has_backward = rows[0].device.type != "cpu"
    ends = []
    for name in (SEGMENTS, implementation):
        model.attend_by(name)
        model.zero_grad(set_to_none=True)
        with torch.set_grad_enabled(has_backward):
            log_probs = packed_log_probs(model, rows)
        if has_backward:
            log_probs.sum().backward()
        ends.append((log_probs.detach(), [p.grad for p in model.lm.parameters() if p.grad is not None]))
    model.attend_by(SEGMENTS)
    (expected, gradients), (found, others) = ends
    apart = float((found - expected).abs().mean())
    limits, figure = (EXACT_NATS, SAME) if model.is_exact else (COARSE_NATS, COARSE), f"{apart:.1e} nats"
    if not has_backward:
        return apart < limits[0], f"{figure}, forward only"
    difference = sum(float((a - b).square().sum()) for a, b in zip(others, gradients, strict=True)) ** 0.5
    off = difference / sum(float(b.square().sum()) for b in gradients) ** 0.5
    return apart < limits[0] and off < limits[1], f"{figure}, gradients {off:.1e}"


def bfloat16(settings: dict[str, Any], folder: Path) -> tuple[bool, str]:
    """Log-probabilities of the learner in bfloat16 against its float32. Weights are as small as in a trained model."""
    save_model(folder / "model", spread=0.02)
    rows = random_rows(LENGTHS, 512, settings["device"])
    model = PolicyModel.from_pretrained(folder / "model").to(settings["device"])
    with torch.no_grad():
        exact = packed_log_probs(model, rows)
        model.compute_in("bfloat16")
        apart = (packed_log_probs(model, rows) - exact).abs()
    return float(apart.mean()) < BFLOAT16_NATS, f"{apart.mean():.1e} nats apart on average, {apart.max():.1e} at most"


def ranks(settings: dict[str, Any], folder: Path) -> tuple[bool, str]:
    """Two ranks, NCCL on GPUs and gloo elsewhere, against one."""
    return compare_learners(settings, folder, (1, "replicated"), (2, "replicated"))


def fsdp2(settings: dict[str, Any], folder: Path) -> tuple[bool, str]:
    """Ranks that share the policy, with the shares on the device and in the host's memory, against ranks that each hold
    all of it. Two ranks; one where there is one GPU."""
    number = settings["num_ranks"]
    passed, figures = True, []
    for sharding in ("fsdp2", OFFLOADED):
        same, figure = compare_learners(settings, folder, (number, "replicated"), (number, sharding))
        passed = passed and same
        figures.append(f"{sharding}: {figure}")
    return passed, f"{number} rank{'s' * (number > 1)}; {'; '.join(figures)}"


def compare_learners(
    settings: dict[str, Any], folder: Path, one: tuple[int, str], other: tuple[int, str]
) -> tuple[bool, str]:
    """The same updates by two learners, each a number of ranks and a sharding."""
    start = load_file(save_model(folder / "model") / "model.safetensors")
    ends = [train_ranks(settings["device"], folder, *each) for each in (one, other)]
    lm = [{name.removeprefix("lm."): tensor for name, tensor in end.items()} for end in ends]
    moved = sum(float((lm[0][name] - tensor).square().sum()) for name, tensor in start.items()) ** 0.5
    difference = sum(float((lm[0][name] - lm[1][name]).square().sum()) for name in start) ** 0.5
    most = max(float((lm[0][name] - lm[1][name]).abs().max()) for name in start)
    off = difference / moved if moved else float("inf")
    return off < SAME, f"updates differ by {off:.1e} of their size, parameters by {most:.1e} at most"


@cache  # `fsdp2` compares two with the same one
def train_ranks(device: str, folder: Path, number: int, sharding: str) -> dict[str, Tensor]:
    """The parameters, whole, after some updates."""
    output = folder / f"{number}-{sharding.replace(' ', '-')}"
    meeting = f"file://{folder}/meeting-{output.name}"
    # Forks have all modules imported, and cannot use CUDA.
    method = "fork" if device == "cpu" else "spawn"
    start_processes(
        train_rank, (number, meeting, device, folder / "model", output, sharding), number, start_method=method
    )
    return load_file(output)


def train_rank(rank: int, num_ranks: int, meeting: str, device: str, policy: Path, output: Path, sharding: str) -> None:
    """One rank, as `train_ranks` starts it."""
    total = str(num_ranks)
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": total, "LOCAL_WORLD_SIZE": total}
    os.environ[RENDEZVOUS] = meeting
    torch.set_num_threads(1)
    prepare_cuda("float32")
    words = [
        *("model=scratch", "algorithm=ppo", f"learner.num_ranks={num_ranks}", "learner.batch_size=12"),
        *("learner.warmup_updates=0", f"learner.sharding={sharding.partition(' ')[0]}"),
        f"learner.cpu_offload={'true' if sharding == OFFLOADED else 'false'}",
    ]
    config = load(words)
    config.model.path = str(policy)
    config.learner.token_budget = 150  # many micro-batches, unlike in number between ranks
    here = Ranks(device, 120.0, config.learner.sharding, config.learner.cpu_offload)
    torch.manual_seed(0)
    model = PolicyModel.from_pretrained(policy, value_trunk_gradient=True)
    here.place(model)
    share = episodes([9, 57, 130, 33, 12, 80, 20, 41, 64, 15, 99, 28], 512)[here.rank :: num_ranks]
    batch = Batch(tuple(share), (1.0,) * len(share), tuple(range(len(share))), 1.0)
    trainer = Trainer(config, here, model)
    for version in range(RANK_UPDATES):
        trainer.update(batch, version, progress=0.0)
    whole = {name: p.full_tensor() if hasattr(p, "full_tensor") else p for name, p in model.named_parameters()}
    if here.is_main:
        save_file({name: p.detach().cpu().contiguous().clone() for name, p in whole.items()}, output)
    here.close()
    exit_process(0)  # the finalization of the interpreter may abort


def sglang_disk(settings: dict[str, Any], folder: Path) -> tuple[bool, str]:
    """A short run on an SGLang server that loads each version from the weight board."""
    return sglang(settings, folder, "disk")


def sglang_group(settings: dict[str, Any], folder: Path) -> tuple[bool, str]:
    """The same, by a process group with the learner."""
    return sglang(settings, folder, "distributed")


def sglang(settings: dict[str, Any], folder: Path, transfer: str) -> tuple[bool, str]:
    """A run of five updates: engine and learner must agree on what was sampled, after each change of weights too."""
    _, rows = train(
        folder / "run",
        *("experiment=corridor", "engine=sglang", f"engine.transfer={transfer}", "learner.total_updates=5"),
        *("learner.batch_size=32", "actor.num_actors=1", "algorithm.max_staleness=0", "learner.warmup_updates=0"),
        *(f"engine.python={settings['sglang_python']}", f"model.device={settings['device']}"),
    )
    apart = max(row["mismatch/logprob_mean"] for row in rows if row.get("mismatch/logprob_mean") is not None)
    passed = len(rows) == 5 and apart < MISMATCH_NATS
    figure = f"{apart:.1e} nats between engine and learner, {mean(rows, 'weights/pause_s'):.2f} s pause a version"
    if transfer == "distributed":
        sent = [row.get("weights/servers_sent", 0.0) for row in rows]
        dropped = sum(row.get("weights/servers_dropped", 0.0) for row in rows)
        passed = passed and max(sent) >= 1 and dropped == 0
        figure += f", {sum(map(bool, sent))} versions sent"
    return passed, figure


def checkpoint(settings: dict[str, Any], folder: Path) -> tuple[bool, str]:
    """A run that is killed and loses its shared memory makes the updates since its checkpoint again: with the losses
    that it had before."""
    words = (
        *("experiment=corridor", "algorithm.max_staleness=0", "learner.batch_size=32", "actor.num_actors=1"),
        *("learner.checkpoint_every=3", f"model.device={settings['device']}"),
        # More than a fast host makes before it is killed.
        *("learner.total_updates=1000000", "learner.decay=constant"),
    )
    _, before = train(folder / "lost", *words, until=8)
    last = before[-1]["step"]
    # It may have been killed right behind the newest, after which there would be no update to make again.
    for newer in sorted((folder / "lost" / "checkpoints").glob("update-*"))[1:]:
        shutil.rmtree(newer)
    _, after = train(folder / "lost", *words, until=last + 3)
    lost, again = ({row["step"]: row["loss/total"] for row in rows} for rows in (before, after))
    log = (folder / "lost.log").read_text()
    begin = next((line for line in log.splitlines() if "going on from update" in line), "")
    begin = begin.partition(", checkpoint")[0].removeprefix("learner: ")
    repeated = [step for step in lost if begin and step > int(begin.split()[-1])]
    if not repeated:
        return False, f"no update was made again: {begin or 'it began anew'}"
    if list(again) != list(range(1, len(again) + 1)):
        return False, f"updates are missing or there twice: {list(again)}; {begin}"
    worst = max(abs(again[step] - lost[step]) for step in repeated)
    size = statistics.fmean(abs(loss) for loss in lost.values())
    figure = f"losses of {len(repeated)} updates made again differ by {worst:.1e} at most; {begin}"
    return worst < SAME * size, figure


def speed(settings: dict[str, Any], folder: Path) -> tuple[bool, str]:
    """Whole updates of the learner on rows of uneven length, in bfloat16 on a GPU, by each attention that it could take
    there; all tokens are trained on."""
    is_gpu = settings["device"] == "cuda"
    shape, num_rows, longest = ((1536, 16, 32000), 64, 1024) if is_gpu else ((128, 3, 4096), 16, 256)
    path = Path(settings["model"]) if settings["model"] else save_model(folder / "model", *shape, 0.02)
    precision = "bfloat16" if is_gpu else "float32"
    budget = 16384 if is_gpu else 2048
    words = ["model=scratch", "algorithm=ppo", f"learner.batch_size={num_rows}", f"learner.precision={precision}"]
    config = load([*words, f"learner.token_budget={budget}"])
    here = Ranks(settings["device"])
    model = PolicyModel.from_pretrained(path, value_trunk_gradient=True)
    here.place(model, precision)
    choose_attention(model, config.learner, longest, here)
    drawn = np.random.default_rng(0).uniform(0.25, 1.0, num_rows)
    rows = episodes([int(longest * share) for share in drawn], model.vocab_size)
    batch = Batch(tuple(rows), (1.0,) * num_rows, tuple(range(num_rows)), 1.0)
    trainer = Trainer(config, here, model)
    num_tokens = sum(row.num_tokens for row in rows)

    def tokens_per_s() -> float:
        times = []
        for version in range(4):
            began = time.perf_counter()
            trainer.update(batch, version, progress=0.0)
            if is_gpu:
                torch.cuda.synchronize()
            times.append(time.perf_counter() - began)
        return num_tokens / statistics.median(times[1:])

    speed = tokens_per_s()
    tflops = speed * flops_a_token(model, num_tokens / num_rows) / 1e12
    figure = f"{speed:,.0f} tokens/s in {precision} by {model.attention}, {tflops:.3g} TFLOP/s"
    others = ""
    if is_gpu:
        figure += f", {torch.cuda.max_memory_allocated() / 1e9:.1f} GB"
        for implementation in sorted({SEGMENTS, FLEX} - {model.attention}):
            model.attend_by(implementation)
            try:
                others += f"; {tokens_per_s():,.0f} tokens/s by {implementation}"
            except Exception as error:  # one that fails here takes nothing from the figure of the chosen one
                others += f"; {implementation} fails: {type(error).__name__}"
    name = torch.cuda.get_device_name() if is_gpu else "this CPU"
    known = next((peak for gpu, peak in PEAK_TFLOPS.items() if gpu in name), None)
    peak = settings["peak_tflops"] or known
    figure += f", MFU {tflops / peak:.1%} of {peak:g} TFLOP/s" if peak else ", MFU needs --peak-tflops"
    return True, f"{figure} ({name}){others}"


def flops_a_token(model: PolicyModel, length: float) -> float:
    """Floating-point operations of forward and backward: 6 a weight of a matrix, and 12 a position that is attended to,
    by each layer and channel; a causal row attends to half of its length (Chowdhery et al. 2022, appendix B)."""
    weights = sum(p.numel() for p in model.lm.parameters() if p.dim() > 1)
    if model.lm.get_input_embeddings().weight is not model.lm.get_output_embeddings().weight:
        weights -= model.lm.get_input_embeddings().weight.numel()  # looked up, not multiplied
    shape = model.lm.config.get_text_config()
    heads = shape.num_attention_heads * (
        getattr(shape, "head_dim", None) or shape.hidden_size // shape.num_attention_heads
    )
    return 6 * weights + 12 * shape.num_hidden_layers * heads * length / 2


def idle(settings: dict[str, Any], folder: Path) -> tuple[bool, str]:
    """A run of the corridor: both sides work, and what each waits."""
    # Ended by the clock: an actor reports its share every few seconds, in which a fast host makes all of few updates.
    words = ("experiment=corridor", "learner.total_updates=100000", "learner.max_minutes=0.1", "actor.num_actors=1")
    code, rows = train(folder / "run", *words, f"model.device={settings['device']}")
    late = rows[10:]
    figure = (
        f"learner idle {mean(late, 'time/idle_share'):.0%}, actor idle {mean(late, 'actor/idle_share'):.0%}, "
        f"{mean(late, 'learner/trained_tokens_per_s'):,.0f} tokens/s trained, {mean(late, 'time/step_s'):.2f} s a step"
    )
    return code == 0, figure


PARTS: dict[str, Callable[[dict[str, Any], Path], tuple[bool, str]]] = {
    part.__name__.replace("sglang_", "sglang-"): part
    for part in (engine, packed, bfloat16, ranks, fsdp2, sglang_disk, sglang_group, checkpoint, speed, idle)
}


def run(name: str, settings: dict[str, Any], result: Connection, log: Path) -> None:
    """Run a part in this process, which leads a session of its own.

    Args:
        name: in PARTS.
        settings: see `gpu_check.main`.
        result: is sent {"passed": bool, "figure": str}, as JSON.
        log: file for all output, in a folder that the part may use; its last line is the error, where there is one.
    """
    os.setsid()
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    output = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    for stream in (1, 2):
        os.dup2(output, stream)
    prepare_cuda("float32")
    passed, figure = PARTS[name](settings, log.parent)
    result.send_bytes(json.dumps({"passed": passed, "figure": figure}).encode())
