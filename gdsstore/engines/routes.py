"""Which paths device memory may take: a pure function of what was asked for and what this machine has.

docs/paths.md has the outcome of every combination in one table, which is tested against this file.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING

from gdsstore.errors import ConfigError, EngineError, GdsStoreError

if TYPE_CHECKING:
    from gdsstore.engines.paths import Path

DOCTOR = "`gdsstore doctor PATH` says what stands in the way of the direct path"


class PathSetting(StrEnum):
    """The setting `path`."""

    AUTO = "auto"  # what is measured to be faster
    DIRECT = "direct"
    BOUNCE = "bounce"


@dataclass(frozen=True, slots=True)
class Side:
    """One of the two ways to device memory as this machine has it: cuFile's, or ours through pinned host memory.

    `path`: the best that it can do here, None where it cannot be had. `reason`: why not, or why no better, in the words of the
    error that was met; that of a missing package names its `pip install`.
    """

    path: Path | None
    reason: str = ""

    @classmethod
    def missing(cls, error: GdsStoreError) -> Side:
        """A side whose engine raised `error` when it was made."""
        return cls(None, str(error))


@dataclass(frozen=True, slots=True)
class Choice:
    """`paths`: those to use, the preferred one first; where there are several, measurement decides between them.
    `why`: one sentence for the log."""

    paths: tuple[Path, ...]
    why: str


NOT_TRIED = Side(None, "not tried")


def check(setting: PathSetting, strict: bool) -> None:
    """Raises ConfigError where the two settings contradict each other."""
    if strict and setting is PathSetting.BOUNCE:
        raise ConfigError(
            "strict = true takes nothing but the direct path, and path = bounce never takes it: change one of the two",
            path=setting.value,
            strict=strict,
        )


def needs_cufile(setting: PathSetting) -> bool:
    """Whether cuFile's side has to be tried before `choose`; give NOT_TRIED otherwise."""
    return setting is not PathSetting.BOUNCE


def needs_bounce(setting: PathSetting, strict: bool, cufile: Side) -> bool:
    """Whether our own side has to be tried before `choose`, which costs pinned memory; give NOT_TRIED otherwise."""
    return not strict and (setting is not PathSetting.DIRECT or cufile.path is None)


def choose(setting: PathSetting, strict: bool, cufile: Side, bounce: Side) -> Choice:
    """The paths to use.

    Raises ConfigError for settings that contradict each other, EngineError where nothing that they allow is there.
    """
    from gdsstore.engines.paths import Path  # not above: the config is read without numpy

    check(setting, strict)
    direct = cufile.path is Path.DIRECT
    if setting is PathSetting.BOUNCE:
        if bounce.path is None:
            raise EngineError(
                f"path = bounce cannot be had: {_reason(bounce)}; mend that, or set path = auto",
                path=setting.value,
            )
        return Choice((Path.BOUNCE,), "path = bounce")
    if strict:
        if direct:
            return Choice((Path.DIRECT,), "strict = true")
        raise EngineError(
            f"strict = true takes nothing but the direct path, and {_not_direct(cufile)}; {DOCTOR}, "
            "and strict = false does without it",
            path=setting.value,
            strict=strict,
        )
    if setting is PathSetting.DIRECT and direct:
        return Choice((Path.DIRECT,), "path = direct")
    if setting is PathSetting.DIRECT and cufile.path is not None:
        return Choice((cufile.path,), f"path = direct, but {_not_direct(cufile)}")
    if direct and bounce.path is not None:
        return Choice((Path.DIRECT, bounce.path), "both are there, measurement decides")
    if direct:
        return Choice((Path.DIRECT,), f"there is no other: {_reason(bounce)}")
    # cuFile's own fallback makes the same copies as ours, with fewer requests in flight, and says less of what it does.
    for side in (bounce, cufile):
        if side.path is not None:
            return Choice((side.path,), _not_direct(cufile))
    raise EngineError(
        f"there is no way to device memory: {_not_direct(cufile)}, and path bounce cannot be had: {_reason(bounce)}; {DOCTOR}",
        path=setting.value,
    )


def _not_direct(cufile: Side) -> str:
    if cufile.path is None:
        return f"cuFile cannot be had: {_reason(cufile)}"
    return f"cuFile goes through host memory: {_reason(cufile)}"


def _reason(side: Side) -> str:
    return side.reason or "no reason was given"
