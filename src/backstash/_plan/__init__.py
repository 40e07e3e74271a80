"""Planning: what is measured of a step, a simulation of a step, and the cheapest choices within a budget."""

__all__: list[str] = []
