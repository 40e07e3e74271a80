"""What ``backstash bench`` runs in a clone: step time and memory compared with the alternatives."""
