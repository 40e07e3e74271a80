"""Plan a step: measure it, simulate it, and find the cheapest choices within a budget."""

__all__: list[str] = []
