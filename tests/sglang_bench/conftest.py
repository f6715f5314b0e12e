"""Without SGLang there is nothing to run here."""

import importlib.util

if importlib.util.find_spec("sglang") is None:
    collect_ignore = ["test_hicache.py"]
