"""The model side of the learner: policy and value head, packing, loss, optimizer, ranks, and the source of batches.

- a batch: batch_source, work_balance (between ranks), packing (micro-batches), kept_budget (their size in the
  next learner)
- a step: update, shaped_rewards, survey (of the whole batch), scoring (by other models), objective (the loss),
  own_parts (calls of a user's), log_probs, mismatch (engine against learner), control, optim
- the model: model, attention, attention_choice, lora, products, scratch (a random one)
- several ranks: parallel, tensor_parallel
- weights out: publishing, policy_export
- a run that lasts: saving, checkpoints (a folder), origin, training_time
- a model's folder: policy_files (where it is), model_files (what lies beside the weights, and checksums)
- cautions: warnings about settings that are likely to fail
"""
