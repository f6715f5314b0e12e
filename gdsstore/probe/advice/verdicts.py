"""The verdict for each path: a pure function of facts and what was found about them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from enum import StrEnum
from typing import Any

from gdsstore.probe.advice.finding import Finding, IoPath, Route, Severity
from gdsstore.probe.advice.tried import by_bounce, by_cufile, moved, on_host, proven_direct
from gdsstore.probe.derived import why_no_gpu
from gdsstore.probe.facts import MachineFacts

DIRECT_WORKS, NOT_DIRECT, DOES_NOT_WORK = 0, 1, 2


class State(StrEnum):
    WORKS = "works"
    SHOULD = "should work"  # by all that can be seen; it was not tried
    NOT_DIRECT = "works, not direct"
    DOES_NOT = "does not work"
    NOT_KNOWN = "not known"


@dataclass(frozen=True, slots=True)
class Verdict:
    path: IoPath
    state: State
    reason: str

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


def judge(facts: MachineFacts, found: Sequence[Finding]) -> tuple[Verdict, ...]:
    """One verdict a path, in the order of IoPath. `found`: every finding, those of both routes among them."""
    host = _host(facts, found)
    return (_direct(facts, found, host), _compat(facts, found, host), _bounce(facts, found, host), host)


def exit_code(judged: Sequence[Verdict]) -> int:
    """0: bytes went direct. 1: a store works, but not direct, or nobody tried. 2: a store does not work."""
    states = {each.path: each.state for each in judged}
    if states[IoPath.HOST] is State.DOES_NOT:
        return DOES_NOT_WORK
    return DIRECT_WORKS if states[IoPath.DIRECT] is State.WORKS else NOT_DIRECT


def _direct(facts: MachineFacts, found: Sequence[Finding], host: Verdict) -> Verdict:
    proof = proven_direct(facts)
    if proof is not None:
        return Verdict(IoPath.DIRECT, State.WORKS, f"{moved([proof])}, every byte of it direct.")
    if host.state is State.DOES_NOT:
        return Verdict(IoPath.DIRECT, State.DOES_NOT, host.reason)

    def of(severity: Severity, *routes: Route | None) -> list[Finding]:
        return [
            each
            for each in found
            if each.path is IoPath.DIRECT and each.severity is severity and each.route in routes
        ]

    blocks = of(Severity.BLOCKS, None)
    ways = [route for route in Route if not of(Severity.BLOCKS, route)]
    if not blocks and not ways:
        blocks = of(Severity.BLOCKS, *Route)
    if blocks:
        return Verdict(IoPath.DIRECT, State.DOES_NOT, _titles(blocks))
    sure = [way for way in ways if not of(Severity.MAY_BLOCK, way)]
    doubts = of(Severity.MAY_BLOCK, None) or ([] if sure else of(Severity.MAY_BLOCK, *ways))
    if facts.storage.fs_type is None or not facts.storage.drives:
        return Verdict(IoPath.DIRECT, State.NOT_KNOWN, "What lies under the directory could not be read.")
    if doubts:
        return Verdict(IoPath.DIRECT, State.NOT_KNOWN, _titles(doubts))
    way = "nvidia-fs" if sure[0] is Route.NVIDIA_FS else "the kernel's P2PDMA"
    return Verdict(
        IoPath.DIRECT,
        State.SHOULD,
        f"Through {way}, by all that can be seen here; no byte was moved to try it.",
    )


def _compat(facts: MachineFacts, found: Sequence[Finding], host: Verdict) -> Verdict:
    blocks = [each for each in found if each.path is IoPath.COMPAT and each.severity is Severity.BLOCKS]
    driver = facts.cufile.driver
    no_gpu = why_no_gpu(facts)
    trips = by_cufile(facts)
    works = [each for each in trips if each.works and each.path is IoPath.COMPAT]
    if no_gpu is not None:
        return Verdict(IoPath.COMPAT, State.DOES_NOT, no_gpu)
    if works:
        return Verdict(IoPath.COMPAT, State.NOT_DIRECT, f"{moved(works)}, through host memory inside cuFile.")
    if facts.cufile.library is None:
        return Verdict(IoPath.COMPAT, State.DOES_NOT, "libcufile.so is not installed.")
    if driver is not None and not driver.opened:
        return Verdict(IoPath.COMPAT, State.DOES_NOT, f"cuFile's driver does not open: {driver.error}")
    if blocks:
        return Verdict(IoPath.COMPAT, State.DOES_NOT, _titles(blocks))
    if host.state is State.DOES_NOT:
        return Verdict(IoPath.COMPAT, State.DOES_NOT, host.reason)
    if trips and not any(each.works for each in trips):
        said = dict.fromkeys(f"{each.engine} failed: {each.detail}." for each in trips)
        return Verdict(IoPath.COMPAT, State.DOES_NOT, " ".join(said))
    return Verdict(
        IoPath.COMPAT, State.NOT_DIRECT, "cuFile may fall back to host memory: works, at the cost of copies."
    )


def _bounce(facts: MachineFacts, found: Sequence[Finding], host: Verdict) -> Verdict:
    no_gpu = why_no_gpu(facts)
    blocks = [each for each in found if each.path is IoPath.BOUNCE and each.severity is Severity.BLOCKS]
    works = [each for each in by_bounce(facts) if each.works]
    if no_gpu is not None:
        return Verdict(IoPath.BOUNCE, State.DOES_NOT, no_gpu)
    if blocks:
        return Verdict(IoPath.BOUNCE, State.DOES_NOT, _titles(blocks))
    if works:
        return Verdict(IoPath.BOUNCE, State.NOT_DIRECT, f"{moved(works)}, through pinned host memory.")
    if host.state is State.DOES_NOT:
        return Verdict(IoPath.BOUNCE, State.DOES_NOT, host.reason)
    return Verdict(
        IoPath.BOUNCE, State.NOT_DIRECT, "Through pinned host memory: one copy more, and no setup needed."
    )


def _host(facts: MachineFacts, found: Sequence[Finding]) -> Verdict:
    mine = [each for each in found if each.path is IoPath.HOST]
    blocks = [each for each in mine if each.severity is Severity.BLOCKS]
    if blocks:
        return Verdict(IoPath.HOST, State.DOES_NOT, _titles(blocks))
    if facts.storage.fs_type is None and facts.storage.writable is None:
        return Verdict(IoPath.HOST, State.NOT_KNOWN, "What lies under the directory could not be read.")
    costs = [each for each in mine if each.severity is Severity.COSTS]
    works = [each for each in on_host(facts) if each.works]
    reason = f"{moved(works)}." if works else "Nothing stands in its way."
    return Verdict(IoPath.HOST, State.WORKS, _titles(costs) or reason)


def _titles(found: Sequence[Finding]) -> str:
    return " ".join(dict.fromkeys(each.title for each in found))
