"""The verdict for each path: a pure function of facts and what was found about them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from enum import StrEnum
from typing import Any

from gdsstore.probe.advice.finding import Finding, IoPath, Route, Severity
from gdsstore.probe.facts import MachineFacts


class State(StrEnum):
    WORKS = "works"
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
    return (_direct(facts, found), _compat(facts, found, host), _bounce(facts, host), host)


def _direct(facts: MachineFacts, found: Sequence[Finding]) -> Verdict:
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
        State.WORKS,
        f"Through {way}, by all that can be seen here; no byte was moved to try it.",
    )


def _compat(facts: MachineFacts, found: Sequence[Finding], host: Verdict) -> Verdict:
    blocks = [each for each in found if each.path is IoPath.COMPAT and each.severity is Severity.BLOCKS]
    driver = facts.cufile.driver
    if not facts.nvidia.gpus:
        return Verdict(IoPath.COMPAT, State.DOES_NOT, "There is no usable GPU.")
    if facts.cufile.library is None:
        return Verdict(IoPath.COMPAT, State.DOES_NOT, "libcufile.so is not installed.")
    if driver is not None and not driver.opened:
        return Verdict(IoPath.COMPAT, State.DOES_NOT, f"cuFile's driver does not open: {driver.error}")
    if blocks:
        return Verdict(IoPath.COMPAT, State.DOES_NOT, _titles(blocks))
    if host.state is State.DOES_NOT:
        return Verdict(IoPath.COMPAT, State.DOES_NOT, host.reason)
    return Verdict(
        IoPath.COMPAT, State.NOT_DIRECT, "cuFile may fall back to host memory: works, at the cost of copies."
    )


def _bounce(facts: MachineFacts, host: Verdict) -> Verdict:
    if not facts.nvidia.gpus:
        return Verdict(IoPath.BOUNCE, State.DOES_NOT, "There is no usable GPU.")
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
    return Verdict(IoPath.HOST, State.WORKS, _titles(costs) or "Nothing stands in its way.")


def _titles(found: Sequence[Finding]) -> str:
    return " ".join(dict.fromkeys(each.title for each in found))
