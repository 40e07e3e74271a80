"""The parts of a stash that each saved tensor passes through, independent of who decides where it goes."""

__all__: list[str] = []
