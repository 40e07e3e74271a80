"""What `scripts/soak_load.py` runs, one kind of load a file. Each returns what it found wrong, in words."""
