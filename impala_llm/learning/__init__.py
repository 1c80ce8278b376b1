"""The model side of the learner: policy and value head, packing, loss, optimizer, ranks, and the source of batches.

- a batch: batch_source, packing (micro-batches), kept_budget (their size in the next learner)
- a step: update, shaped_rewards, survey (of the whole batch), scoring (by other models), objective (the loss),
  own_parts (calls of a user's), mismatch (engine against learner), control, optim
- the model: policy (a folder)
- several ranks: ranks (a folder)
- weights out: publishing, policy_export
- a run that lasts: saving, checkpoints (a folder), origin, training_time
- cautions: warnings about settings that are likely to fail
"""
