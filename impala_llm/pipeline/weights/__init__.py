"""Versions of the policy: the board in shared memory, and the relay that brings them to other hosts."""
