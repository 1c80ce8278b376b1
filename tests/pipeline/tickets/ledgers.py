"""Ledgers of ten tasks, and what tests do with them."""

from impala_llm.pipeline.tickets.ledger import Ticket, TicketLedger, Verdict
from impala_llm.pipeline.tickets.task_order import TaskOrder


def make_ledger(
    batch_size: int = 4,
    max_staleness: int | None = 1,
    group_size: int = 1,
    max_open: int | None = None,
    max_attempts: int = 3,
) -> TicketLedger:
    order = TaskOrder(range(100, 110), group_size, seed=3)
    return TicketLedger(order, batch_size, max_staleness, max_open=max_open, max_attempts=max_attempts)


def grant(ledger: TicketLedger) -> dict[str, list[Ticket]]:
    return dict(ledger.grantable())


def ids(tickets: list[Ticket]) -> list[int]:
    return [ticket.ticket_id for ticket in tickets]


def receive(ledger: TicketLedger, tickets: list[Ticket]) -> None:
    for ticket in tickets:
        assert ledger.received(ticket.ticket_id, f"episode of {ticket.ticket_id}") is Verdict.ACCEPTED
