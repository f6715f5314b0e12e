"""The parts of `bench/hicache.py`: SGLang's host pool, the backends that take turns, and what is measured."""
