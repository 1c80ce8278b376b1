"""Selection of the data to train on next: grouping, buffering, priorities, reuse. numpy only, without torch.

- groups: trajectories of a group together; buffer: what may be trained on, in the columns of items
- priorities: what is drawn, and what a full buffer gives up; rate, replay_fraction: how often data are used again
"""

from impala_llm.replay.buffer import ReplayBuffer
from impala_llm.replay.groups import GroupAssembler
from impala_llm.replay.items import EvictedItem, Sample, SampledItem
from impala_llm.replay.priorities import OldestFirst, PrioritySampler, Sampler
from impala_llm.replay.rate import SamplesPerInsert
from impala_llm.replay.replay_fraction import ReplayFraction

__all__ = [
    "EvictedItem",
    "GroupAssembler",
    "OldestFirst",
    "PrioritySampler",
    "ReplayBuffer",
    "ReplayFraction",
    "Sample",
    "SampledItem",
    "Sampler",
    "SamplesPerInsert",
]
