"""The model side of the learner: policy and value head, packing, loss, optimizer, ranks, and the source of batches."""
