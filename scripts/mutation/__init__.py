"""What scripts/soak_mutants.py is made of."""
