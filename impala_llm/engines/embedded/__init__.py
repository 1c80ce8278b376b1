"""Embedded engine: generates with torch inside of the actor's process.

From outside: `engine.TorchEngine`; and for the learner, which loads and checks the same models, `loading`,
`model_check` and `model_weights`.

- what is computed next: scheduler, sessions, kv_cache
- a forward: decoder, attention, fused_layers, cpu_kernels; then sampling
"""
