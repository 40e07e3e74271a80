"""The machinery of a stash: worker threads, transfers, deferred cleanup, recovery from interrupts, and
events."""

__all__: list[str] = []
