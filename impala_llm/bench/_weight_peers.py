"""The two sides of the weight benchmark, and its contenders: ours and the peers'.

Invariant: both sides follow the same schedule, and no process works for one contender while another one is measured.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
import zmq
from safetensors import safe_open
from safetensors.torch import save_file

from impala_llm.pipeline.shm import copy_kernels
from impala_llm.pipeline.weights import safetensors_layout
from impala_llm.pipeline.weights.board import WeightPublisher, WeightReader
from impala_llm.pipeline.weights.tensor_writing import TensorBytes

_TIMEOUT_S = 120
_NAMES = {torch.float32: "F32", torch.bfloat16: "BF16"}


@dataclass(frozen=True)
class Contender:
    """One side's part of a way to move weights. together: both sides work at once; otherwise the writer goes first."""

    step: Callable[[], None]
    together: bool = False
    copies: bool = True
    """Whether the weights end in the reader's own tensors."""
    tidy: Callable[[], None] = lambda: None
    """Clean-up when both sides have finished; it is not timed."""


def tensor_shapes(megabytes: int) -> dict[str, tuple[torch.dtype, tuple[int, ...]]]:
    """A decoder's tensors, of `megabytes` 10^6 bytes nearly: large matrices and small vectors in two dtypes."""
    hidden = 256 if megabytes <= 50 else 1024 if megabytes <= 1000 else 2048
    shapes: dict[str, tuple[torch.dtype, tuple[int, ...]]] = {}
    num_bytes = 0
    layer = 0
    layer_bytes = 2 * (4 + 9) * hidden**2 + 4 * 2 * hidden
    budget = megabytes * 1_000_000
    while layer == 0 or num_bytes + 1.25 * layer_bytes < budget:
        for name in ("q", "k", "v", "o"):
            shapes[f"layers.{layer}.attention.{name}.weight"] = (torch.bfloat16, (hidden, hidden))
        for name in ("gate", "up", "down"):
            shapes[f"layers.{layer}.mlp.{name}.weight"] = (torch.bfloat16, (3 * hidden, hidden))
        for name in ("norm_1", "norm_2"):
            shapes[f"layers.{layer}.{name}.weight"] = (torch.float32, (hidden,))
        num_bytes += layer_bytes
        layer += 1
    shapes["embedding.weight"] = (torch.float32, (max(1, (budget - num_bytes) // (4 * hidden)), hidden))
    return shapes


def run_side(
    role: str, link: Connection, results: Connection | None, folder: str, megabytes: int, num_rounds: int
) -> None:
    """A process of the benchmark. role: writer or reader. link: to the other side. results: where the reader sends the
    times, or a sentence that says what went wrong."""
    torch.set_num_threads(1)
    is_writer = role == "writer"
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    memory, tensors = make_tensors(megabytes)
    if is_writer:
        pattern = np.random.default_rng(0).integers(0, 256, 1_000_003).astype(np.uint8)
        for start in range(0, memory.size, pattern.size):
            memory[start : start + pattern.size] = pattern[: memory.size - start]
    contenders = make_contenders(is_writer, memory, tensors, Path(folder))
    times: dict[str, list[tuple[float, float, float]]] = {name: [] for name in contenders}
    checksums = {name: copy_kernels.bytes_checksum(data) for name, data in _byte_views(tensors).items()}
    if is_writer:
        link.send(checksums)
    expected = checksums if is_writer else link.recv()
    for round_index in range(-1, num_rounds):
        order = list(contenders)
        for name in order[round_index % len(order) :] + order[: round_index % len(order)]:
            contender = contenders[name]
            if round_index < 0 and not is_writer:
                memory.fill(0)
            begin, end = _take_turn(link, contender, is_writer)
            if is_writer:
                link.send((begin, end))
                continue
            written, read = link.recv(), (begin, end)
            if round_index < 0:
                if contender.copies and any(
                    copy_kernels.bytes_checksum(data) != expected[tensor]
                    for tensor, data in _byte_views(tensors).items()
                ):
                    assert results is not None
                    results.send(f"{name} did not deliver the bytes that were sent")
                    return
                continue
            write_s, read_s = written[1] - written[0], read[1] - read[0]
            span = max(written[1], read[1]) - min(written[0], read[0])
            times[name].append((span if contender.together else write_s + read_s, write_s, read_s))
    if results is not None:
        results.send(times)
    dist.destroy_process_group()


def _take_turn(link: Connection, contender: Contender, is_writer: bool) -> tuple[float, float]:
    """Do this side's part when it is its turn. Returns when it began and ended, on the clock of the machine."""
    goes_first = is_writer or contender.together
    link.send("ready")
    link.recv()
    if not goes_first:
        link.recv()
    begin = time.monotonic()
    contender.step()
    end = time.monotonic()
    if is_writer and not contender.together:
        link.send("written")
    link.send("through")
    link.recv()
    contender.tidy()
    # The other side may continue only when both have cleaned up.
    link.send("tidy")
    link.recv()
    return begin, end


def make_tensors(megabytes: int) -> tuple[np.ndarray, dict[str, torch.Tensor]]:
    """Zeros: the tensors, and the uint8 array in which they lie end to end, so that one memcpy can move all of them."""
    shapes = tensor_shapes(megabytes)
    layout = safetensors_layout.plan({name: (_NAMES[dtype], shape) for name, (dtype, shape) in shapes.items()})
    begin = len(layout.header)
    memory = np.empty(layout.num_bytes - begin, np.uint8)
    memory.fill(0)  # resident, unlike np.zeros
    tensors = {}
    for name, info in layout.infos.items():
        # From numpy each has a storage of its own, which matters to those that save storages.
        data = torch.from_numpy(memory[info.start - begin : info.end - begin])
        tensors[name] = data.view(shapes[name][0]).view(shapes[name][1])
    return memory, tensors


def make_contenders(
    is_writer: bool, memory: np.ndarray, tensors: dict[str, torch.Tensor], folder: Path
) -> dict[str, Contender]:
    """This side's part of every contender, all prepared: files made, memory resident, peers connected."""
    return {
        **_bounds(is_writer, memory, tensors, folder),
        **_ours(is_writer, tensors, folder / "board"),
        "safetensors": _safetensors(is_writer, tensors, folder / "file.safetensors"),
        "torch_mmap": _torch_save(is_writer, tensors, folder / "file.pt"),
        "gloo": _gloo(is_writer, memory, folder),
        "zmq": _zmq(is_writer, memory, folder),
    }


def _byte_views(tensors: dict[str, torch.Tensor]) -> dict[str, np.ndarray]:
    return {name: tensor.view(-1).view(torch.uint8).numpy() for name, tensor in tensors.items()}


def _bounds(
    is_writer: bool, memory: np.ndarray, tensors: dict[str, torch.Tensor], folder: Path
) -> dict[str, Contender]:
    path = folder / "bound"
    with path.open("ab") as file:
        file.truncate(memory.size)
    shared = np.memmap(path, np.uint8, "r+")
    parts = []
    start = 0
    for view in _byte_views(tensors).values():
        parts.append((shared[start : start + view.size], view))
        start += view.size

    def copy(pairs: list[tuple[np.ndarray, np.ndarray]]) -> None:
        for there, here in pairs:
            if is_writer:
                np.copyto(there, here)
            else:
                np.copyto(here, there)

    whole = [(shared[:], memory)]
    return {"bound_whole": Contender(lambda: copy(whole)), "bound_tensors": Contender(lambda: copy(parts))}


def _ours(is_writer: bool, tensors: dict[str, torch.Tensor], board: Path) -> dict[str, Contender]:
    views = _byte_views(tensors)
    if is_writer:
        described: dict[str, TensorBytes] = {
            name: (_NAMES[tensor.dtype], tuple(tensor.shape), views[name]) for name, tensor in tensors.items()
        }
        publisher = WeightPublisher(board, num_slots=2)
        publisher.reserve(described)
        versions = iter(range(1_000_000))

        def publish() -> None:
            publisher.publish(described, next(versions))

        return {"ours": Contender(publish), "ours_mapped": Contender(publish, copies=False)}
    reader = WeightReader(board)

    def copy() -> None:
        with reader.lease() as lease:
            lease.copy_into(views)

    def look() -> None:
        with reader.lease() as lease:
            lease.tensors()

    return {"ours": Contender(copy), "ours_mapped": Contender(look, copies=False)}


def _safetensors(is_writer: bool, tensors: dict[str, torch.Tensor], path: Path) -> Contender:
    """`save_file` makes a new file each time: it takes no open one whose pages are there already, and to serialise
    first and write into such pages takes several times as long. The old one is removed off the clock."""
    if is_writer:
        return Contender(lambda: save_file(tensors, path), tidy=lambda: path.unlink())
    opened = contextlib.ExitStack()

    def copy() -> None:
        file = opened.enter_context(safe_open(path, framework="pt"))
        for name, tensor in tensors.items():
            tensor.copy_(file.get_tensor(name))

    return Contender(copy, tidy=opened.close)


def _torch_save(is_writer: bool, tensors: dict[str, torch.Tensor], path: Path) -> Contender:
    """`torch.save` into one file that stays, so into pages that are there, as our slots are; without the checksums that
    it writes by default and `torch.load` never reads: they take more than half of its time."""
    if is_writer:
        torch.serialization.set_crc32_options(False)
        torch.save(tensors, path)
        file = path.open("r+b")

        def save() -> None:
            file.seek(0)
            torch.save(tensors, file)
            file.flush()

        return Contender(save)
    loaded: dict[str, torch.Tensor] = {}

    def copy() -> None:
        loaded.update(torch.load(path, mmap=True, weights_only=True))
        for name, tensor in tensors.items():
            tensor.copy_(loaded[name])

    return Contender(copy, tidy=loaded.clear)


def _gloo(is_writer: bool, memory: np.ndarray, folder: Path) -> Contender:
    """One broadcast of the memory in which all tensors lie: a bucket that need not be filled first."""
    dist.init_process_group(
        "gloo",
        init_method=f"file://{folder / 'gloo'}",
        rank=0 if is_writer else 1,
        world_size=2,
        timeout=timedelta(seconds=_TIMEOUT_S),
    )
    bucket = torch.from_numpy(memory)
    return Contender(lambda: dist.broadcast(bucket, src=0), together=True)


def _zmq(is_writer: bool, memory: np.ndarray, folder: Path) -> Contender:
    """One frame of the same memory, which pyzmq does not copy on either side but into the reader's tensors."""
    socket: zmq.Socket[bytes] = zmq.Context.instance().socket(zmq.PUSH if is_writer else zmq.PULL)
    socket.setsockopt(zmq.LINGER, 0)
    socket.setsockopt(zmq.RCVTIMEO, 1000 * _TIMEOUT_S)
    endpoint = f"ipc://{folder / 'zmq.sock'}"
    if is_writer:
        socket.bind(endpoint)

        def send() -> None:
            socket.send(memory.data, copy=False)

        return Contender(send, together=True)
    socket.connect(endpoint)
    received: list[zmq.Frame] = []

    def receive() -> None:
        received.append(socket.recv(copy=False))
        np.copyto(memory, np.frombuffer(received[0].buffer, np.uint8))

    return Contender(receive, together=True, tidy=received.clear)
