"""The stash's own parts: what a tensor that is saved meets, whoever decides what is done with it."""

__all__: list[str] = []
