"""The parts of `bench/gds_vs_bounce.py`: the ways between drive and memory that take turns, what is measured, and the report."""
