"""What the fuzz targets have in common. A target is a function of bytes that returns, or fails by raising.

Two ways to run one:

    python tests/fuzz/test_NAME.py -max_total_time=300     atheris (coverage-guided), until it finds something or time is up
    pytest tests/fuzz                                      hypothesis and the kept inputs of corpus/, for seconds

An input that found something belongs into corpus/NAME/, so that pytest tries it for ever.
"""

from __future__ import annotations

import contextlib
import logging
import resource
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

HERE = Path(__file__).parent
MEMORY_BYTES = 2 << 30  # that one process of a fuzzer may take beyond what it has at the start
INPUT_BYTES = 2048
SECONDS = 5  # that one input may take

Target = Callable[[bytes], None]


def instrumented() -> AbstractContextManager[Any]:
    """For a `with` around the imports of a target: under atheris, what is imported there is traced."""
    if not _is_script():
        return nullcontext()
    import atheris  # not in pytest's runs

    package = HERE.parents[1] / "gdsstore"
    compiled = [  # numba cannot compile what is traced
        ".".join(source.relative_to(package.parent).with_suffix("").parts)
        for source in package.rglob("*.py")
        if "numba" in source.read_text()
    ]
    traced: AbstractContextManager[Any] = atheris.instrument_imports(include=["gdsstore"], exclude=compiled)
    return traced


def _is_script() -> bool:
    main = getattr(sys.modules.get("__main__"), "__file__", None)
    return main is not None and Path(main).resolve().parent == HERE


def fuzz(target: Target) -> None:
    """Run a target under atheris with the arguments of the command line. Does not return."""
    import atheris

    limit_memory()
    logging.disable()
    target(b"")  # what is made once, and compiled, is not to count as the first input's time
    name = Path(sys.argv[0]).stem.removeprefix("test_")
    found = HERE / "corpus" / name
    arguments = [
        sys.argv[0],
        f"-timeout={SECONDS}",
        f"-max_len={INPUT_BYTES}",
        "-len_control=0",
        *sys.argv[1:],
    ]
    with tempfile.TemporaryDirectory(prefix="gdsstore-fuzz-") as fresh:
        if all(each.startswith("-") for each in sys.argv[1:]):
            arguments.append(fresh)  # it writes what it learns into the first folder
        if found.is_dir():
            arguments.append(str(found))
        atheris.Setup(arguments, target, enable_python_coverage=True)
        atheris.Fuzz()


def quickly(target: Target, examples: int) -> Callable[[], None]:
    """A pytest test: the target on random inputs, and on those that found something before."""
    name = target.__module__.rpartition("test_")[2]

    @settings(max_examples=examples, deadline=None, suppress_health_check=list(HealthCheck))
    @given(st.binary(max_size=INPUT_BYTES))
    def on_random_inputs(data: bytes) -> None:
        target(data)

    def test() -> None:
        kept = HERE / "corpus" / name
        logging.disable()  # thousands of lines, and rightly so
        try:
            with little_memory():
                for file in sorted(kept.iterdir()) if kept.is_dir() else []:
                    target(file.read_bytes())
                on_random_inputs()
        finally:
            logging.disable(logging.NOTSET)

    return test


def limit_memory() -> None:
    """Make an allocation that an input only claims to need fail, instead of taking the machine down."""
    with open("/proc/self/statm") as file:
        now = int(file.read().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (now + MEMORY_BYTES, resource.getrlimit(resource.RLIMIT_AS)[1]))


@contextlib.contextmanager
def little_memory(nbytes: int = MEMORY_BYTES) -> Iterator[None]:
    """As `limit_memory`, for the length of a `with`."""
    before = resource.getrlimit(resource.RLIMIT_AS)
    with open("/proc/self/statm") as file:
        now = int(file.read().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (now + nbytes, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, before)
