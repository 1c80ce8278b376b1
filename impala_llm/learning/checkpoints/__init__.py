"""Checkpoints, and the folder of a run: written, read, owned by one learner at a time, and continued from.

- a checkpoint: writer, reader, parts (that one process writes), arrays (of numpy, for msgpack), files (where they lie,
  without torch), past (what a rank takes over from one)
- the folder: folder_owner, kept_settings (its config.yaml), policy_folders, resume (begin, go on or refuse)
"""
