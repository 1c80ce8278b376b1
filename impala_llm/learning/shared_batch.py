"""The batch of a rank in all of its processes: the one that leads the rank gives it to the others, as records."""

from collections.abc import Sequence

import msgpack

from impala_llm.learning.batch_source import Batch, BatchSource
from impala_llm.learning.parallel import Ranks
from impala_llm.pipeline.shm.record import decode_record, record_bytes
from impala_llm.trajectory import Trajectory


def share_batch(ranks: Ranks, batch: Batch | None) -> Batch:
    """Return the batch of the process that leads this rank. batch: in this process, which must have one if it leads."""
    if ranks.tensor_parallel == 1 and batch is not None:
        return batch
    packed = None
    if batch is not None:
        packed = msgpack.packb([list(batch.weights), list(batch.item_ids), batch.mean_reuse])
    weights, item_ids, mean_reuse = msgpack.unpackb(ranks.share(packed))
    trajectories = share_trajectories(ranks, () if batch is None else batch.trajectories)
    return batch or Batch(tuple(trajectories), tuple(weights), tuple(item_ids), mean_reuse)


def share_trajectories(ranks: Ranks, trajectories: Sequence[Trajectory]) -> Sequence[Trajectory]:
    """Return the trajectories that the process that leads this rank has called it with, itself the same objects."""
    if ranks.tensor_parallel == 1:
        return trajectories
    packed = msgpack.packb([record_bytes(t) for t in trajectories]) if ranks.leads else None
    records = ranks.share(packed)
    return trajectories if ranks.leads else [decode_record(bytearray(each)) for each in msgpack.unpackb(records)]


def share_arrivals(ranks: Ranks, batches: BatchSource, version: int) -> Sequence[Trajectory]:
    """Take in what has arrived at a rank, and return it in all of its processes. version: the learner's."""
    return share_trajectories(ranks, batches.arrivals(version))
