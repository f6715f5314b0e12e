"""From the facts of a machine to what works, what does not, what that costs and what to do. Pure functions, no I/O."""

from __future__ import annotations

from dataclasses import replace

from gdsstore.probe.advice import cufile, gpu, host, routes, storage, tried
from gdsstore.probe.advice.finding import Finding, IoPath, Route, Rule, Severity
from gdsstore.probe.advice.verdicts import State, Verdict, exit_code, judge
from gdsstore.probe.derived import wants_p2pdma
from gdsstore.probe.facts import MachineFacts

__all__ = ["Finding", "IoPath", "Route", "Severity", "State", "Verdict", "exit_code", "findings", "verdicts"]

RULES: tuple[Rule, ...] = (
    *gpu.RULES,
    *storage.RULES,
    *cufile.RULES,
    *routes.RULES,
    *host.RULES,
    *tried.RULES,
)

# What P2PDMA lacks on this machine whatever is set.
BEYOND_SETTINGS = frozenset(
    {"kernel-without-p2pdma", "gpu-too-old-for-p2pdma", "bar1-smaller-than-memory", "p2pdma-on-raid"}
)
_ORDER = list(Severity)


def findings(facts: MachineFacts) -> tuple[Finding, ...]:
    """All findings about a machine, the gravest first; of equal ones, the direct path first.

    Where a dead end blocks the direct path, findings that would only matter beyond it are left out. Of the two routes,
    what the nearer one lacks blocks; what the other one lacks is a hint, or left out where a route works. Where bytes went
    direct when it was tried, nothing blocks that path, whatever speaks against it.
    """
    paths = list(IoPath)
    found = _all(facts)
    found = _harmless(found) if tried.proven_direct(facts) else _with_one_route(facts, found)
    return tuple(sorted(found, key=lambda each: (_ORDER.index(each.severity), paths.index(each.path))))


def verdicts(facts: MachineFacts) -> tuple[Verdict, ...]:
    """One verdict a path, in the order of IoPath. What was tried outweighs what is concluded."""
    return judge(facts, _all(facts))


def _all(facts: MachineFacts) -> list[Finding]:
    found = [each for rule in RULES for each in rule(facts)]
    if any(each.dead_end for each in found):
        return [each for each in found if each.dead_end or each.path is not IoPath.DIRECT or _matters(each)]
    driver = facts.cufile.driver
    said = (driver.nvme_routes or ()) if driver else ()
    # Where cuFile itself has looked, it knows better than we do.
    open_ways = [
        route for route, name in ((Route.P2PDMA, "p2pdma"), (Route.NVIDIA_FS, "nvfs")) if name in said
    ]
    return [each for each in found if each.route not in open_ways]


def _harmless(found: list[Finding]) -> list[Finding]:
    return [
        replace(each, severity=Severity.HINT)
        if each.path is IoPath.DIRECT and each.severity in (Severity.BLOCKS, Severity.MAY_BLOCK)
        else each
        for each in found
    ]


def _matters(finding: Finding) -> bool:
    """Beyond a dead end, only what costs something all the same, and what was tried."""
    return finding.severity is Severity.COSTS or finding.code in tried.CODES


def _with_one_route(facts: MachineFacts, found: list[Finding]) -> list[Finding]:
    """What is shown of the routes, since a machine needs only one."""
    lacking = {
        route: {each.code for each in found if each.route is route and each.severity is Severity.BLOCKS}
        for route in Route
    }
    open_ways = [route for route in Route if not lacking[route]]
    if open_ways:
        return [each for each in found if each.route is None or each.route in open_ways]
    near = _nearer(facts, lacking[Route.P2PDMA])
    return [
        replace(each, severity=Severity.HINT) if each.route is not None and each.route is not near else each
        for each in found
    ]


def _nearer(facts: MachineFacts, p2pdma_lacks: set[str]) -> Route:
    """The route that somebody began to set up; else P2PDMA, which needs no patched NVMe driver, where settings are enough."""
    if wants_p2pdma(facts):
        return Route.P2PDMA
    if facts.nvidia_fs.loaded or p2pdma_lacks & BEYOND_SETTINGS:
        return Route.NVIDIA_FS
    return Route.P2PDMA
