"""The parts of `bench/overlap.py`."""
