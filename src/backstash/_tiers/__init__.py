"""The tiers of one device (its own memory, host memory, disk), and the moves between them."""

__all__: list[str] = []
