"""What ``backstash bench`` runs in a clone: step time and memory beside the alternatives."""
