"""The ranks of the learner: torch.distributed, by sums alone.

Invariant: what is reduced is a sum over ranks, never a mean, since every loss is already divided by the global count. A
collective that a rank never joins ends with an error after the time-out, instead of waiting for ever.
"""

import os
from collections.abc import Iterable, Sequence
from datetime import timedelta

import msgpack
import torch
import torch.distributed as dist
from torch import Tensor, nn

from impala_llm.supervised import RENDEZVOUS


class Ranks:
    """This process among the learner's ranks; a single process needs no torchrun.

    Args:
        device: auto | cpu | cuda; auto takes the GPU of the local rank if there is one.
        timeout_s: of every collective.
    """

    def __init__(self, device: str = "auto", timeout_s: float = 600.0) -> None:
        use_cuda = device == "cuda" or (device == "auto" and torch.cuda.is_available())
        self.device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0"))) if use_cuda else torch.device("cpu")
        if use_cuda:
            torch.cuda.set_device(self.device)
        self.world_size = int(os.environ.get("WORLD_SIZE", "1"))
        self.rank = int(os.environ.get("RANK", "0"))
        if self.world_size > 1:
            dist.init_process_group(
                "nccl" if use_cuda else "gloo",
                init_method=os.environ.get(RENDEZVOUS),  # torchrun's without
                rank=self.rank,
                world_size=self.world_size,
                timeout=timedelta(seconds=timeout_s),
            )

    @property
    def is_main(self) -> bool:
        return self.rank == 0

    def broadcast(self, tensors: Iterable[Tensor]) -> None:
        """Give every rank rank 0's values."""
        if self.world_size > 1:
            for tensor in tensors:
                dist.broadcast(tensor.detach(), src=0)

    def sum(self, numbers: Sequence[float]) -> list[float]:
        """Sums over ranks, float64."""
        if self.world_size == 1:
            return list(numbers)
        total = torch.tensor(numbers, dtype=torch.float64, device=self.device)
        dist.all_reduce(total)
        return total.tolist()

    def gather(self, item: dict[str, list[float]]) -> list[dict[str, list[float]]]:
        """Every rank's metric state, by rank: {name: [value, weight]}."""
        if self.world_size == 1:
            return [item]
        # msgpack, since torch's own object collectives pickle
        mine = torch.frombuffer(bytearray(msgpack.packb(item)), dtype=torch.uint8).to(self.device)
        lengths = [int(n) for n in self.sum([len(mine) if r == self.rank else 0 for r in range(self.world_size)])]
        padded = torch.zeros(max(lengths), dtype=torch.uint8, device=self.device)
        padded[: len(mine)] = mine
        parts = [torch.empty_like(padded) for _ in lengths]
        dist.all_gather(parts, padded)
        return [msgpack.unpackb(part[:n].cpu().numpy().tobytes()) for part, n in zip(parts, lengths, strict=True)]

    def sum_gradients(self, model: nn.Module) -> None:
        """Add up the gradients of all ranks, in one flat all-reduce. A parameter without one counts as zeros."""
        if self.world_size == 1:
            return
        parameters = [p for p in model.parameters() if p.requires_grad]
        flat = torch.cat([(p.grad if p.grad is not None else torch.zeros_like(p)).reshape(-1) for p in parameters])
        dist.all_reduce(flat)
        offset = 0
        for p in parameters:
            p.grad = flat[offset : offset + p.numel()].view_as(p)
            offset += p.numel()

    def barrier(self) -> None:
        self.sum([0.0])

    def close(self) -> None:
        if self.world_size > 1:
            dist.destroy_process_group()
