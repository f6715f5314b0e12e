"""What SGLang keeps of a server's arguments, for the whole process."""

from collections.abc import Iterator
from contextlib import contextmanager

KEPT = ("_server_args", "_config_bags", "_overrides_log", "_publish_role")


@contextmanager
def server_arguments_kept() -> Iterator[None]:
    """Put the arguments back afterwards: SGLang's own fixtures publish some and leave them, and other tests must not see them."""
    from sglang.srt.runtime_context import get_context

    context = get_context()
    before = {name: getattr(context, name) for name in KEPT}
    parallel = context.parallel._config
    yield
    for name, value in before.items():
        setattr(context, name, value)
    context.parallel._config = parallel
