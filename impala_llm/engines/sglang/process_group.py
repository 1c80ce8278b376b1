"""Process group of the learner and one SGLang server, through which the server is sent weights.

A server's group is made as SGLang's `init_custom_process_group` makes its side: the same store, the same prefixes.
PyTorch's registry of groups is left out: a group that hangs must not affect others.
"""

import asyncio
import contextlib
import os
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any, TypeVar
from urllib.parse import urlsplit

import torch
import torch.distributed as dist
from torch import Tensor

from impala_llm.engines.sglang.client import SGLangClient
from impala_llm.pipeline.network.listener import address_towards, listen_at

POLL_S = 0.001
_T = TypeVar("_T")


@dataclass
class Link:
    """One server's process group, of which this process is rank 0."""

    name: str
    url: str
    store: dist.TCPStore | None = None
    """Store where the two meet; it is needed for as long as the group."""
    group: Any = None
    is_nccl: bool = False
    works: list[Any] = field(default_factory=list)
    """Works of the latest broadcasts."""
    is_beginning: bool = False
    """Whether a thread begins a broadcast, whose work is not among `works` yet."""

    @property
    def hangs(self) -> bool:
        """Whether a broadcast may be under way. With NCCL always: its group is aborted, never freed."""
        is_under_way = self.is_nccl or self.is_beginning or not all(work.is_completed() for work in self.works)
        return self.group is not None and is_under_way

    async def meet(self, client: SGLangClient, device: torch.device, timeout_s: float) -> None:
        """Form the group with all GPUs of the server.

        Args:
            client: of the server.
            device: where the tensors lie that will be sent.
            timeout_s: limit of each wait of one end for the other.
        """
        size = 1 + (await client.info()).tensor_parallel
        parts = urlsplit(self.url)
        address = await _in_thread(address_towards, parts.hostname or "", parts.port or 80)
        # A store for each: a wait for one server at a shared store would block all others.
        self.store = store = _open_store(address, timeout_s)
        self.is_nccl = device.type == "cuda"
        backend = "nccl" if self.is_nccl else "gloo"
        num_keys = store.num_keys()

        async def make() -> Any:
            # A thread that waits for a lost server would outlive this call, and abort the process at its end.
            while store.num_keys() == num_keys:
                await asyncio.sleep(POLL_S)
            return await _in_thread(_make_group, store, self.name, size, backend, timeout_s, address)

        self.group = await both(make(), client.join_group(self.name, address, store.port, size, backend, timeout_s))

    async def broadcast(self, tensors: Sequence[Tensor], deadline: float) -> None:
        """Broadcast tensors from this rank. Raises RuntimeError at the deadline (monotonic), or for a lost peer."""
        self.works, self.is_beginning = [], True
        await _in_thread(self._begin, tensors, max(0.1, deadline - time.monotonic()))
        while not all(work.is_completed() for work in self.works):
            await asyncio.sleep(POLL_S)
        for work in self.works:
            work.wait()
        self.works = []

    def _begin(self, tensors: Sequence[Tensor], timeout_s: float) -> None:
        """Begin in a thread that continues if the call that waits for it is cancelled."""
        try:
            begin_broadcast(self, tensors, timeout_s)
        finally:
            self.is_beginning = False


def _open_store(address: str, timeout_s: float) -> dist.TCPStore:
    """Open a store that listens at one of this host's addresses and no other."""
    listener = listen_at(address)
    return dist.TCPStore(
        address,
        listener.port,
        is_master=True,
        wait_for_workers=False,
        timeout=timedelta(seconds=timeout_s),
        master_listen_fd=listener.descriptor,
    )


def _make_group(store: dist.TCPStore, name: str, size: int, backend: str, timeout_s: float, address: str) -> Any:
    """Make rank 0's end, which gloo has listen at an address, once the others have joined. Raises RuntimeError where
    they do not."""
    device = "cuda" if backend == "nccl" else "cpu"
    prefixed = dist.PrefixStore(f"{device}/", dist.PrefixStore(f"{name}/", dist.PrefixStore(name, store)))
    if backend == "gloo":
        # By itself gloo listens at the address that this host's name has, also where the server is on this host.
        gloo: Any = dist.ProcessGroupGloo
        settings = gloo._Options()
        settings._devices, settings._timeout = [gloo.create_device(hostname=address)], timedelta(seconds=timeout_s)
        return gloo(prefixed, 0, size, settings)
    options = dist.ProcessGroupNCCL.Options()
    # Long: this process aborts groups that hang after `timeout_s`.
    options._timeout = timedelta(seconds=10 * timeout_s)
    with _errors_left_to_us():
        return dist.ProcessGroupNCCL(prefixed, 0, size, options)


@contextlib.contextmanager
def _errors_left_to_us() -> Iterator[None]:
    """Let a group that is made meanwhile only clean up after an error. PyTorch's default for NCCL ends the process."""
    name = "TORCH_NCCL_ASYNC_ERROR_HANDLING"
    before = os.environ.get(name)
    os.environ[name] = "2"
    try:
        yield
    finally:
        if before is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = before


def begin_broadcast(link: Link, tensors: Sequence[Tensor], timeout_s: float) -> None:
    """Begin a broadcast, and append its works to the link's.

    Only the link refers to its group: a reference in an error's traceback would keep it open.
    """
    device = tensors[0].device
    options = dist.BroadcastOptions()
    options.rootRank = 0
    options.timeout = timedelta(seconds=timeout_s)
    with torch.cuda.device(device) if device.type == "cuda" else contextlib.nullcontext():
        for tensor in tensors:
            link.works.append(link.group.broadcast([tensor], options))


async def both(first: Any, second: Any) -> Any:
    """Wait for two awaitables. Returns the result of the first; raises the error of either, at once."""
    tasks = [asyncio.ensure_future(first), asyncio.ensure_future(second)]
    try:
        done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_EXCEPTION)
        for task in done:
            task.result()
        return tasks[0].result()
    finally:
        for task in tasks:
            task.cancel()


async def _in_thread(function: Callable[..., _T], *arguments: Any) -> _T:
    """Call a function on a thread of its own, which may hang: it is not waited for at the end."""
    loop = asyncio.get_running_loop()
    future: asyncio.Future[_T] = loop.create_future()

    def settle(set_outcome: Callable[[Any], None], outcome: Any) -> None:
        if not future.done():
            set_outcome(outcome)

    def run() -> None:
        try:
            outcome: tuple[Callable[[Any], None], Any] = (future.set_result, function(*arguments))
        except Exception as error:
            outcome = (future.set_exception, error)
        with contextlib.suppress(RuntimeError):  # the loop is closed
            loop.call_soon_threadsafe(settle, *outcome)

    threading.Thread(target=run, daemon=True).start()
    return await future
