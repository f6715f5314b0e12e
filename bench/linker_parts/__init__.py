"""The parts of `bench/linker.py`: a device pool with the linker behind it, what is timed, and the peers."""
