"""Pure tensor functions of reinforcement learning: no I/O, no state, no globals. One concept a file.

- interface: what a credit and a loss are; registry: both by name
- credits: vtrace (also GAE on a critic), advantages (groups, without one), distillation, preference
- losses: losses, stale_losses, loss_parts (what they share), importance (ratios and masks)
- rewards of the trainer's own: shaping
- recursions: kernels (compiled), scan (on any device); checks: of arguments
"""
