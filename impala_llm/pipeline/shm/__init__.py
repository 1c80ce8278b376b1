"""Shared memory of one host: rings of records, the store of received trajectories, the journal, the folder of a run.

From outside: `run_directory.RunDirectory`, `ring` (an actor's arena), `trajectory_store.TrajectoryStore`,
`journal.Journal`, `record` for a trajectory as bytes, and `actor_claims` between the runs of a host.

- records: record_layout (words of a header, by name), record_kernels and text_kernels (compiled checks), copy_kernels
  (copies with checksums)
- files: owned_directory (one owner, its lock, its end), file_lock, reserved_file, store_header (sizes of a store),
  free_space (extents of a store that no record takes up)
"""
