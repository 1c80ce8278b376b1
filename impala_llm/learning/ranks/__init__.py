"""Several ranks of a learner.

- parallel: their sums, and a policy that is replicated or sharded (FSDP2)
- tensor_parallel: shares of each layer, by the model's own plan
- work_balance: exchange of rows, so that ranks have equally much to compute
"""
