"""The result of a replay with time: TTFT by variant, as JSON, as a table and as a plot."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from rich.table import Table

from gdsstore.errors import ArgumentError, MissingExtraError, from_os_error
from gdsstore.replay.timed_plan import Variant
from gdsstore.replay.timed_server import Served
from gdsstore.replay.timed_store import TimedTally
from gdsstore.sizes import format_size


@dataclass(frozen=True, slots=True, kw_only=True)
class VariantReport:
    """One variant. TTFT: from a request's arrival to the end of its prefill, seconds."""

    variant: Variant
    ttft_mean_s: float
    ttft_p50_s: float
    ttft_p99_s: float
    hit_rate: float  # of tokens: loaded instead of computed
    compute_s: float  # of prefill, all requests
    load_wait_s: float  # that the server waited for loads, all requests
    pages_loaded: int
    load_gbps: float | None  # GB/s of the loads themselves
    pages_saved: int
    saves_dropped: int  # pages whose save waited too long
    misses: dict[str, int]
    wrong_pages: int
    ttft_s: list[float] = field(repr=False)  # of each request, in order


def report_variant(variant: Variant, served: Served, tally: TimedTally, page_bytes: int) -> VariantReport:
    ttft = np.array(served.ttft_s)
    return VariantReport(
        variant=variant,
        ttft_mean_s=float(ttft.mean()),
        ttft_p50_s=float(np.percentile(ttft, 50)),
        ttft_p99_s=float(np.percentile(ttft, 99)),
        hit_rate=served.hit_tokens / served.tokens,
        compute_s=served.compute_s,
        load_wait_s=sum(served.load_s),
        pages_loaded=tally.pages_loaded,
        load_gbps=tally.pages_loaded * page_bytes / tally.load_s / 1e9 if tally.load_s else None,
        pages_saved=tally.pages_saved,
        saves_dropped=tally.saves_dropped,
        misses=dict(tally.misses),
        wrong_pages=tally.wrong_pages,
        ttft_s=served.ttft_s,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class TimedReport:
    """All variants of one replay."""

    trace: str
    requests: int
    seconds: float  # from the first arrival to the last
    scale: float  # seconds of the trace in one of the replay's
    prefill_tokens_s: float
    throttle_mbps: float | None  # MB/s in each direction; None: not throttled
    page_bytes: int
    block_tokens: int
    engine: str
    variants: list[VariantReport]

    @property
    def wrong_pages(self) -> int:
        return sum(variant.wrong_pages for variant in self.variants)

    def to_dict(self) -> dict[str, Any]:
        """Plain values, ready for `json.dumps`."""
        return asdict(self)

    def to_table(self) -> Table:
        """The same for a terminal."""
        rate = "not throttled" if self.throttle_mbps is None else f"{self.throttle_mbps:g} MB/s"
        table = Table(
            title=f"replay of {self.trace} with time: {self.requests:,} requests in {self.seconds:.1f} s, {self.scale:.3g} times "
            f"as fast as recorded\nprefill {self.prefill_tokens_s:,.0f} tokens/s; drive {rate}, engine {self.engine}; a page: "
            f"{self.block_tokens} tokens, {format_size(self.page_bytes)}",
            title_justify="left",
        )
        for name in (
            "",
            "TTFT mean",
            "p50",
            "p99",
            "hit rate",
            "waited for loads",
            "pages loaded",
            "saves dropped",
            "wrong",
        ):
            table.add_column(name, justify="left" if not name else "right")
        for each in self.variants:
            table.add_row(
                each.variant.value,
                *(
                    f"{seconds * 1000:,.0f} ms"
                    for seconds in (each.ttft_mean_s, each.ttft_p50_s, each.ttft_p99_s)
                ),
                f"{each.hit_rate:.1%}",
                f"{each.load_wait_s:.2f} s",
                f"{each.pages_loaded:,}",
                f"{each.saves_dropped:,}",
                f"{each.wrong_pages:,}",
            )
        return table

    def plot(self, path: Path) -> None:
        """Write the distribution of TTFT, a line a variant, as a picture.

        Raises MissingExtraError without matplotlib, ArgumentError where the file cannot be written.
        """
        figure = new_figure()
        axes = figure.subplots()
        share = np.arange(1, self.requests + 1) / self.requests
        for each in self.variants:
            axes.step(
                np.sort(each.ttft_s),
                share,
                where="post",
                label=f"{each.variant.value}, mean {each.ttft_mean_s:.2g} s",
            )
        axes.set_xscale("log")
        axes.set_xlabel("time to first token, s")
        axes.set_ylabel("share of requests")
        rate = "" if self.throttle_mbps is None else f", drive {self.throttle_mbps:g} MB/s"
        axes.set_title(f"{self.trace}, prefill {self.prefill_tokens_s:,.0f} tokens/s{rate}")
        axes.grid(alpha=0.3)
        axes.legend()
        try:
            figure.savefig(path, dpi=120, bbox_inches="tight")
        except (OSError, ValueError) as error:
            if isinstance(error, OSError):
                raise from_os_error(error, "cannot write the plot", ArgumentError) from error
            raise ArgumentError(f"cannot write the plot: {error}", path=str(path)) from error


def new_figure() -> Any:
    """An empty figure of matplotlib's. Raises MissingExtraError without matplotlib."""
    try:
        from matplotlib.figure import Figure  # slow to import, and not everybody has it
    except ImportError as error:
        raise MissingExtraError("matplotlib", "bench", "a plot") from error
    return Figure(figsize=(8, 5))
