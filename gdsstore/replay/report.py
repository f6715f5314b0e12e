"""The result of a replay: one flat record, as JSON for programs and as a table for people."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any

from rich.table import Table

from gdsstore.sizes import format_size


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """What a replay found. GB are 10^9 bytes; a rate is None where nothing moved."""

    trace: str
    requests: int
    tokens: int  # of the requests' blocks, each counted in full
    hit_rate: float  # of tokens: in blocks of a request's unbroken prefix that were loaded and right
    lru_hit_rate: float  # of a plain page-LRU of the same capacity, empty at the start
    lru_hit_rate_warm: float  # of the same, had it seen the skipped requests; equal if none was skipped
    pages: int
    pages_hit: int
    pages_saved: int
    pages_loaded: int
    pages_verified: int
    wrong_pages: int
    wrong_keys: list[str]  # the first few, hex
    misses: dict[str, int]  # pages by reason; "not found" are those behind the prefix that lookup found
    saves: dict[str, int]  # pages by outcome
    load_gbps: float | None  # GB/s as one caller sees it: bytes loaded over the time spent waiting for loads
    save_gbps: float | None  # the same for pages newly saved
    moved_gbps: float | None  # GB/s of all processes together: loaded and saved over the whole time
    cpu_s_per_gb: (
        float | None
    )  # CPU of the processes, less what the replay's own keys and checks took, per GB moved
    drive_bytes_read: int
    drive_bytes_written: int
    drive_bytes_written_per_hit_byte: float | None
    lookup_latency_p50_ms: float | None  # a latency is of one request, all its pages
    lookup_latency_p99_ms: float | None
    load_latency_p50_ms: float | None
    load_latency_p99_ms: float | None
    save_latency_p50_ms: float | None
    save_latency_p99_ms: float | None
    engine: str
    faults: dict[str, int]  # ranges that injected faults hit, by kind
    capacity_bytes: int
    page_bytes: int
    block_tokens: int
    processes: int
    seconds: float  # from the first worker's first request to the last worker's last

    def to_dict(self) -> dict[str, Any]:
        """Plain values, ready for `json.dumps`."""
        return asdict(self)

    def to_table(self) -> Table:
        """The same for a terminal."""
        table = Table(title=f"replay of {self.trace}", show_header=False, title_justify="left")
        for name, value in self._rows():
            table.add_row(name, value)
        return table

    def _rows(self) -> Iterator[tuple[str, str]]:
        yield "requests", f"{self.requests:,} ({self.tokens:,} tokens)"
        yield "hit rate by tokens", f"{self.hit_rate:.1%}"
        yield "  plain page-LRU of this capacity", f"{self.lru_hit_rate:.1%}"
        if self.lru_hit_rate_warm != self.lru_hit_rate:
            yield "  plain page-LRU, skipped requests seen", f"{self.lru_hit_rate_warm:.1%}"
        yield "pages saved", f"{self.pages_saved:,}"
        yield "pages loaded", f"{self.pages_loaded:,}"
        yield "pages verified", f"{self.pages_verified:,}"
        yield "pages wrong", f"[bold red]{self.wrong_pages:,}[/]" if self.wrong_pages else "0"
        for key in self.wrong_keys:
            yield "  key", key
        yield "misses", _counts(self.misses)
        yield "saves", _counts(self.saves)
        if any(self.faults.values()):
            yield "faults injected", _counts(self.faults)
        yield "load", _rate(self.load_gbps, self.load_latency_p50_ms, self.load_latency_p99_ms)
        yield "save", _rate(self.save_gbps, self.save_latency_p50_ms, self.save_latency_p99_ms)
        yield "all processes together", _shown(self.moved_gbps, "GB/s")
        yield "CPU", _shown(self.cpu_s_per_gb, "s/GB")
        yield "drive bytes written per hit byte", _shown(self.drive_bytes_written_per_hit_byte)
        capacity, page = format_size(self.capacity_bytes), format_size(self.page_bytes)
        yield "store", f"{capacity}, pages of {page}, engine {self.engine}"
        yield "processes, seconds", f"{self.processes}, {self.seconds:.1f}"


def _counts(counts: dict[str, int]) -> str:
    return ", ".join(f"{name} {count:,}" for name, count in counts.items()) or "none"


def _rate(gbps: float | None, p50_ms: float | None, p99_ms: float | None) -> str:
    if p50_ms is None or p99_ms is None:
        return "none"
    return f"{_shown(gbps, 'GB/s')} a caller; a request p50 {p50_ms:.2f} ms, p99 {p99_ms:.2f} ms"


def _shown(value: float | None, unit: str = "") -> str:
    return "none" if value is None else f"{value:.2f} {unit}".rstrip()
