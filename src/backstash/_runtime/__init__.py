"""What runs a stash: worker threads, transfers, deferred reclamation, recovery from interrupts, events."""

__all__: list[str] = []
