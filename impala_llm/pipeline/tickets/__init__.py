"""Permits to play an episode: the ledger that grants them, the bound on staleness, the order of tasks.

From outside: `ledger.TicketLedger` and `ticket.Ticket`, `task_order.TaskOrder`, `curriculum.Curriculum`, and
`journal_rows` for checkpoints.

- of the ledger: table (states and transitions), granting (who gets the next), staleness (how many at once), quarantine
  (tasks that kill), recovery (from the journal of a process that has died)
"""
