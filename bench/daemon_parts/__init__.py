"""The parts of bench/daemon.py."""
