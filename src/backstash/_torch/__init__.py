"""Every private call of PyTorch, each with what is done where a PyTorch lacks it. It knows no stash."""

__all__: list[str] = []
