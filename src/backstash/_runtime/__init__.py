"""The machinery of a stash: workers, transfers, deferred cleanup, recovery from interrupts, events."""

__all__: list[str] = []
