"""A budget: steps are measured and planned for, and the plan is followed. Loaded only where one is given."""

__all__: list[str] = []
