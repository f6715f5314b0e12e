"""The parts of `bench/sick_volume.py`."""
