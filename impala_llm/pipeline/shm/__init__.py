"""Shared memory of one host: rings of records, the store of received trajectories, the journal, the folder of a run."""
