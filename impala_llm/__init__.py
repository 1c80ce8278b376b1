"""Asynchronous reinforcement learning of language-model agents: many actors, one importance-corrected learner."""

__version__ = "0.1.0"
