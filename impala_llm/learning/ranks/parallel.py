"""The ranks of the learner: torch.distributed, by sums alone; and how they share the policy.

- replicated: every rank holds all of it, and gradients are summed once, before the step.
- fsdp2: every rank holds a share of each tensor (torch's `fully_shard`). A layer is gathered before it computes,
  forward and backward, and freed after it; its gradient is summed, and cut into shares, as soon as it is there. What
  belongs to no layer (embeddings, last norm, head) is gathered by `PolicyModel.forward` and stays until the backward
  pass is over or `reshard` is called: `action_log_probs` needs it after the forward. The value head and LoRA's
  adapters, small and in float32, stay whole on every rank; their gradients are summed before the step.
- tensor_parallel: every rank is several processes, each with a part of the layers' matrices (tensor_parallel.py). Its
  first process leads it; "rank" and `world_size` count ranks, and what is summed over ranks counts each of them once.

Invariant: reductions are sums over ranks, never means, since every loss is already divided by the global count. A
collective that a rank never joins ends with an error after the time-out, instead of waiting for ever. Ranks that share
the policy run equally many passes through it, forward and backward: see `num_missing`.
"""

import os
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from datetime import timedelta
from typing import Any, NoReturn

import msgpack
import psutil
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    FSDPModule,
    MixedPrecisionPolicy,
    fully_shard,
)
from torch.distributed.tensor import DTensor
from transformers.modeling_layers import GradientCheckpointingLayer

from impala_llm.config import ConfigError
from impala_llm.learning.policy.lora import adapter_tensors
from impala_llm.learning.policy.model import PolicyModel
from impala_llm.learning.ranks.tensor_parallel import divide
from impala_llm.processes.cgroups import memory_left
from impala_llm.processes.supervised import RENDEZVOUS
from impala_llm.settings import Config


class Ranks:
    """This process among the learner's ranks; a single process needs no torchrun.

    Of P processes with a tensor parallelism of T the first P / T lead a rank each, and process p works for rank
    p mod (P / T).

    Args:
        device: auto | cpu | cuda; auto takes the GPU of the local rank if there is one.
        timeout_s: of every collective.
        sharding: replicated | fsdp2.
        cpu_offload: whether shares lie in the host's memory.
        tensor_parallel: processes of each rank.
        environment: variables of torchrun; where they are not set, or empty, this process is alone.
    """

    def __init__(
        self,
        device: str = "auto",
        timeout_s: float = 600.0,
        sharding: str = "replicated",
        cpu_offload: bool = False,
        tensor_parallel: int = 1,
        environment: Mapping[str, str] = os.environ,
    ) -> None:
        use_cuda = device == "cuda" or (device == "auto" and torch.cuda.is_available())
        self.device = torch.device("cuda", int(environment.get("LOCAL_RANK") or 0)) if use_cuda else torch.device("cpu")
        if use_cuda:
            torch.cuda.set_device(self.device)
        self.num_processes = int(environment.get("WORLD_SIZE") or 1)
        self.process = int(environment.get("RANK") or 0)
        self.world_size = self.num_processes // tensor_parallel
        self.rank = self.process % self.world_size
        self.tensor_parallel = tensor_parallel
        self.is_sharded = sharding == "fsdp2" or tensor_parallel > 1
        """Whether each process holds a share of the policy, and none computes without others."""
        self._cpu_offload = cpu_offload
        self._partial: set[nn.Parameter] = set()
        """Whole in each process of a rank, and their gradient is the sum of what the processes compute."""
        if self.num_processes > 1 or self.is_sharded:
            # Norms of shares in the host's memory are summed there.
            backend = "cpu:gloo,cuda:nccl" if use_cuda and self.is_sharded else "nccl" if use_cuda else "gloo"
            store = self._store(environment, timeout_s)
            dist.init_process_group(
                backend,
                init_method=environment[RENDEZVOUS] if store is None else None,
                rank=self.process,
                world_size=self.num_processes,
                store=store,
                timeout=timedelta(seconds=timeout_s),
            )
        self._mesh: DeviceMesh | None = None
        self._sharing: DeviceMesh | None = None
        if tensor_parallel > 1:
            shape, names = (tensor_parallel, self.world_size), ("tensor", "data")
            self._mesh = init_device_mesh(self.device.type, shape, mesh_dim_names=names)
        elif self.is_sharded:
            self._sharing = init_device_mesh(self.device.type, (self.world_size,))

    def _store(self, environment: Mapping[str, str], timeout_s: float) -> dist.Store | None:
        """The store in which the processes find each other; None: that of the address in RENDEZVOUS."""
        if self.num_processes == 1:
            return dist.HashStore()
        if RENDEZVOUS in environment:
            return None
        # torchrun keeps its store when it starts the processes again: without a prefix they would find the addresses
        # of those before them there.
        timeout = timedelta(seconds=timeout_s)
        found, _, _ = next(dist.rendezvous("env://", self.process, self.num_processes, timeout=timeout))
        return dist.PrefixStore(f"restart_{environment.get('TORCHELASTIC_RESTART_COUNT', '0')}", found)

    @classmethod
    def of(cls, config: Config) -> "Ranks":
        """This process among those of a run."""
        learner = config.learner
        how = learner.sharding, learner.cpu_offload, learner.tensor_parallel
        return cls(config.model.device, learner.rank_timeout_s, *how)

    @property
    def is_main(self) -> bool:
        return self.process == 0

    @property
    def leads(self) -> bool:
        """Whether this process is the first of its rank, with a receiver and a replay shard."""
        return self.process < self.world_size

    @property
    def exports(self) -> bool:
        """Whether no process before this one holds the same shares of the policy."""
        return self.tensor_parallel == 1 or self.rank == 0

    @contextmanager
    def in_turns(self, size: int) -> Iterator[None]:
        """Let as many processes at a time run the body as half of the host's free memory holds models of this size, and
        one at least, in the order of their numbers. All processes call it; in the body none waits for another.

        A process whose body fails lets the next ones go on: those whose body fails too then say why, and do not wait
        for a time-out.

        Args:
            size: bytes that the body takes of the host's memory; 0: all processes run it at the same time.
        """
        free = min(psutil.virtual_memory().available, memory_left())
        at_once = max(1, int(min(self.num_processes, free / 2 / max(1, size))))
        at_once = int(self.sum([float(at_once) if self.is_main else 0.0])[0])
        turn, last = self.process // at_once, (self.num_processes - 1) // at_once
        for _ in range(turn):
            self.barrier()
        failure: Exception | None = None
        try:
            yield
        except Exception as error:
            failure = error
        for _ in range(turn, last):
            self.barrier()
        if failure is not None:
            raise failure

    def place(self, model: PolicyModel, precision: str = "float32") -> None:
        """Bring a policy, the same on all ranks, to the device: whole, with rank 0's values, or this rank's share.

        Args:
            precision: see `cut`.
        """
        self.cut(model, precision)
        self.join(model)

    def cut(self, model: PolicyModel, precision: str = "float32") -> None:
        """Bring a policy to the device: whole, or with FSDP2 this rank's share of it. Where the processes of a rank
        will divide it, it stays as it is until `join`. No rank waits for another.

        Args:
            precision: learner.precision. With bfloat16 layers are gathered in it, their norms too, for
                `PolicyModel.compute_in`. Shares and sums are float32 in any case, and so is what belongs to no layer.
        """
        if not self.is_sharded:
            model.to(self.device)
        if self._sharing is None:
            return
        whole = {*model.value_head.parameters(), *adapter_tensors(model.lm).values()}
        for p in model.parameters():
            if p in whole:
                p.data = p.data.to(self.device)
        options: dict[str, Any] = {"mesh": self._sharing}
        if self._cpu_offload:
            options["offload_policy"] = CPUOffloadPolicy(pin_memory=self.device.type == "cuda")
        of_layers = MixedPrecisionPolicy()
        if precision == "bfloat16":
            of_layers = MixedPrecisionPolicy(torch.bfloat16, reduce_dtype=torch.float32, cast_forward_inputs=False)
        for layer in [m for m in model.lm.modules() if isinstance(m, GradientCheckpointingLayer)]:
            fully_shard(layer, mp_policy=of_layers, ignored_params=whole, **options)
        fully_shard(model, ignored_params=whole, **options)
        for module in model.modules():
            if isinstance(module, FSDPModule):
                module.set_gradient_divide_factor(1.0)
                module.set_force_sum_reduction_for_comms(True)
                # A parameter that one rank alone uses has a gradient on both. Before torch 2.13 none may be used so;
                # the experts of a layer are not, since transformers holds them as one tensor.
                if hasattr(module, "set_reduce_scatter_unused_params"):
                    module.set_reduce_scatter_unused_params(True, recurse=False)

    def join(self, model: PolicyModel) -> None:
        """Give all ranks rank 0's values of what each has as a whole, on the device, and divide matrices among the
        processes of a rank. All ranks call it, with policies that are `cut`."""
        if self._mesh is not None:
            self.broadcast(model.parameters())
            self._partial = divide(model, self._mesh["tensor"])
            return
        self.broadcast(p for p in model.parameters() if not isinstance(p, DTensor))

    def num_missing(self, num_passes: int) -> int:
        """Number of passes through the policy by which the rank with the most has more than this one, where ranks share
        it: as many this one must take part in. All ranks call it."""
        if not self.is_sharded or self._mesh is not None:  # processes of a rank have the same rows
            return 0
        counts = self.gather({"passes": [num_passes]})
        return int(max(count["passes"][0] for count in counts)) - num_passes

    def broadcast(self, tensors: Iterable[Tensor]) -> None:
        """Give every rank rank 0's values."""
        if self.num_processes > 1:
            for tensor in tensors:
                dist.broadcast(tensor.detach(), src=0)

    def share(self, content: bytes | None) -> bytes:
        """Give the bytes of the process that leads this rank to the others of it. Returns them.

        Args:
            content: None in the others.
        """
        if self._mesh is None:
            assert content is not None
            return content
        group = self._mesh.get_group("tensor")
        length = torch.tensor([len(content or b"")])
        dist.broadcast(length, src=self.rank, group=group)
        shared = torch.zeros(int(length), dtype=torch.uint8)
        if content:
            shared = torch.frombuffer(bytearray(content), dtype=torch.uint8)
        if len(shared):
            dist.broadcast(shared, src=self.rank, group=group)
        return shared.numpy().tobytes()

    def sum(self, numbers: Sequence[float], of_processes: bool = False) -> list[float]:
        """Sums over ranks, float64.

        Args:
            of_processes: sums over all processes; else those that lead their ranks count.
        """
        if self.num_processes == 1:
            return list(numbers)
        mine = numbers if self.leads or of_processes else [0.0] * len(numbers)
        total = torch.tensor(mine, dtype=torch.float64, device=self.device)
        dist.all_reduce(total)
        return total.tolist()

    def gather(self, item: dict[str, list[Any]], of_processes: bool = False) -> list[dict[str, list[Any]]]:
        """Bring every rank's lists of numbers, bytes and lists to all of them, by rank.

        Args:
            of_processes: of all processes; else those that lead their ranks count.
        """
        if self.num_processes == 1:
            return [item]
        # msgpack, since torch's own object collectives pickle
        mine = torch.frombuffer(bytearray(msgpack.packb(item)), dtype=torch.uint8).to(self.device)
        own = [float(len(mine)) if number == self.process else 0.0 for number in range(self.num_processes)]
        lengths = [int(n) for n in self.sum(own, of_processes=True)]
        padded = torch.zeros(max(lengths), dtype=torch.uint8, device=self.device)
        padded[: len(mine)] = mine
        parts = [torch.empty_like(padded) for _ in lengths]
        dist.all_gather(parts, padded)
        found = [msgpack.unpackb(part[:n].cpu().numpy().tobytes()) for part, n in zip(parts, lengths, strict=True)]
        return found if of_processes else found[: self.world_size]

    def sum_gradients(self, model: nn.Module) -> None:
        """Add up the gradients of all ranks. A parameter that has one on no rank gets none, so that the optimizer
        passes over it, as with a single rank.

        Those of FSDP2's shares are sums already.
        """
        reshard(model)
        if self.num_processes == 1:
            return
        trained = [p for p in model.parameters() if p.requires_grad]
        whole = [p for p in trained if not isinstance(p, DTensor)]
        for p, total in zip(whole, _sums([p.grad for p in whole], whole), strict=True):
            p.grad = total
            if total is not None and self.tensor_parallel > 1 and p not in self._partial:
                # The same in all processes of a rank but for the order of sums on a GPU: so it stays the same.
                total.div_(self.tensor_parallel)
        if self._mesh is not None:
            self._sum_parts([p for p in trained if isinstance(p, DTensor)], self._mesh["data"])

    def _sum_parts(self, parameters: Sequence[DTensor], mesh: DeviceMesh) -> None:
        """Add up the gradients of the parts that this process holds with those of the other ranks."""
        for p in parameters:
            if p.grad is not None:
                grad: Any = p.grad
                p.grad = grad.redistribute(placements=p.placements)
        if mesh.size() == 1:
            return
        grads = [None if p.grad is None else local(p.grad) for p in parameters]
        for p, total in zip(parameters, _sums(grads, [local(p) for p in parameters], mesh.get_group()), strict=True):
            p.grad = None
            if total is not None:
                p.grad = DTensor.from_local(total, p.device_mesh, p.placements, run_check=False)

    def barrier(self) -> None:
        self.sum([0.0])

    def close(self) -> None:
        if self.num_processes > 1 or self.is_sharded:
            dist.destroy_process_group()


BUCKET = 1 << 24
"""Numbers that are summed over the ranks at a time."""


def _sums(
    mine: Sequence[Tensor | None], like: Sequence[Tensor], group: dist.ProcessGroup | None = None
) -> list[Tensor | None]:
    """Sums of tensors over the processes of a group, in place, None for those that none of them has.

    Small ones are sent together, in buckets: in one piece they would need as much memory again.

    Args:
        like: a tensor of the shape of each.
    """
    there = torch.tensor([float(tensor is not None) for tensor in mine], device=like[0].device)
    dist.all_reduce(there, group=group)
    totals = [
        (torch.zeros_like(shape) if tensor is None else tensor) if number else None
        for tensor, shape, number in zip(mine, like, there.tolist(), strict=True)
    ]
    buckets: list[list[Tensor]] = [[]]
    for total in (total for total in totals if total is not None):
        if buckets[-1] and sum(map(Tensor.numel, buckets[-1])) + total.numel() > BUCKET:
            buckets.append([])
        buckets[-1].append(total)
    for bucket in filter(None, buckets):
        if len(bucket) == 1 and bucket[0].is_contiguous():  # perhaps a large one
            dist.all_reduce(bucket[0], group=group)
            continue
        flat = torch.cat([total.reshape(-1) for total in bucket])
        dist.all_reduce(flat, group=group)
        for total, part in zip(bucket, flat.split([total.numel() for total in bucket]), strict=True):
            total.copy_(part.view_as(total))
    return totals


def exit_process(status: int) -> NoReturn:
    """End this process with a status, without the finalization of the interpreter.

    Threads of gloo outlive `Ranks.close` where a device mesh still holds their group. One that frees the tensors of the
    last sums while the interpreter is finalized aborts the process (SIGABRT), after all its work is done.
    """
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError):  # on a full disk the status stays as it is
            stream.flush()
    os._exit(status)


def reshard(model: nn.Module) -> None:
    """Free the gathered parameters of a sharded policy: from here on its parameters are this rank's shards again.

    Call it before these change: parameters that a pass without gradient has gathered would keep their old values.
    """
    if isinstance(model, FSDPModule):
        model.reshard()


def local(tensor: Tensor) -> Tensor:
    """This rank's share of a tensor, or all of one that is not shared."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def is_shared(tensor: Tensor) -> bool:
    """Whether each process holds another part of a tensor."""
    return isinstance(tensor, DTensor) and any(placement.is_shard() for placement in tensor.placements)


def check_ranks(config: Config) -> None:
    """ConfigError where the ranks that were started, by torchrun as a rule, are not those that can work together."""
    num_ranks = int(os.environ.get("WORLD_SIZE") or 1)
    num_here = int(os.environ.get("LOCAL_WORLD_SIZE") or num_ranks)
    if num_here != num_ranks:
        raise ConfigError(
            f"torchrun started {num_ranks} ranks, {num_here} of them on this host: the ranks of a learner share the "
            "memory of one host; start them with --nnodes 1"
        )
    learner = config.learner
    if learner.num_processes != num_ranks:
        each = (
            "" if learner.tensor_parallel == 1 else f" of learner.tensor_parallel={learner.tensor_parallel} processes"
        )
        raise ConfigError(
            f"learner.num_ranks={learner.num_ranks}{each}, but {num_ranks} ranks were started: set learner.num_ranks="
            f"{max(1, num_ranks // learner.tensor_parallel)}, or start {learner.num_processes} with torchrun"
        )
