"""Permits to play an episode: the ledger that grants them, the bound on staleness, the order of tasks."""
