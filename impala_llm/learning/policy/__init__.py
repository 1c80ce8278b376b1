"""The policy: a model of transformers with a value head, and the folder that it is loaded from.

- model (forward on packed rows), log_probs (of actions, without holding all logits)
- attention, attention_choice: packed rows apart from each other, and which way of it a device and a model have
- lora (adapters), products (precision of matrix products), scratch (a random model)
- policy_files (where a model's folder is), model_files (what lies beside the weights, and checksums)
"""
