"""Pure tensor functions of reinforcement learning: no I/O, no state, no globals. One concept a file."""
