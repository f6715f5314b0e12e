"""Which catalogs are opened, and which are rebuilt unopened; and that no damage to one takes the process down."""

from __future__ import annotations

import json
import random
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from gdsstore.catalog.state import State, Trust, boot_id, catalog_mark, judge
from tests.crash.processes import Zygote
from tests.crash.stores import LARGE, blame, first_spec, run
from tests.crash.worker import Spec

pytestmark = pytest.mark.crash

PAGE_BYTES = 4096  # LMDB's


@pytest.fixture(scope="module")
def closed(zygote: Zygote, tmp_path_factory: pytest.TempPathFactory) -> Spec:
    """A store that was closed cleanly, and the journal of what it holds."""
    place = tmp_path_factory.mktemp("closed")
    spec = first_spec(place, 1, settings=LARGE | {"engine": "posix"}, opens=1, calls_per_open=150)
    worker = run(zygote, spec)
    assert worker.code == 0, blame(spec, worker)
    return spec


@pytest.fixture
def spec(closed: Spec, place: Path) -> Spec:
    """A copy that may be damaged. Copied without the mark of a clean shutdown: as if its user had been killed."""
    shutil.copytree(closed.store, place / "store")
    shutil.copy(closed.journal, place / "journal")
    change_state(place / "store", clean=False)
    return replace(
        closed, store=str(place / "store"), journal=str(place / "journal"), calls_per_open=20, seed=2
    )


def change_state(store: Path, **changes: object) -> None:
    path = store / "state.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


# --- the table ---


@pytest.mark.parametrize(
    ("state", "alone", "trust"),
    [
        (lambda boot, mark: State(boot, True, 1, mark), True, Trust.USE),
        (
            lambda boot, mark: State("another boot", True, 1, mark),
            True,
            Trust.USE,
        ),  # shut down, then switched off
        (
            lambda boot, mark: State(boot, True, 1, "1-1-1-1"),
            True,
            Trust.REBUILD,
        ),  # changed after it was closed
        (lambda boot, mark: State("another boot", True, 1, "1-1-1-1"), True, Trust.REBUILD),
        (lambda boot, mark: State(boot, True, 1, ""), True, Trust.REBUILD),
        (lambda boot, mark: State(boot, False, 1, ""), True, Trust.USE),  # a kill: the walk decides
        (lambda boot, mark: State("another boot", False, 1, mark), True, Trust.REBUILD),  # a power cut
        (lambda boot, mark: State(), True, Trust.REBUILD),  # state.json is lost
        (lambda boot, mark: State(boot, False, 1, ""), False, Trust.USE),  # others have it open
    ],
)
def test_a_catalog_is_opened_only_where_its_bytes_can_be_trusted(
    spec: Spec, state: Callable[[str, str], State], alone: bool, trust: Trust
) -> None:
    catalog = Path(spec.store) / "catalog"
    assert judge(state(boot_id(), catalog_mark(catalog)), catalog, alone)[0] is trust


def test_a_catalog_that_is_gone_is_rebuilt(spec: Spec) -> None:
    catalog = Path(spec.store) / "catalog"
    (catalog / "data.mdb").unlink()
    for clean in (False, True):
        assert judge(State(boot_id(), clean, 1, ""), catalog, alone=True)[0] is Trust.REBUILD


def test_the_check_runs_wherever_the_process_stands(
    spec: Spec, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The library may have been found through `sys.path` alone, which a child does not inherit."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("PYTHONPATH", raising=False)
    trust, why = judge(State(boot_id(), False, 1, ""), Path(spec.store) / "catalog", alone=True)
    assert (trust, why) == (Trust.USE, "its user died; the catalog was checked")


# --- damage ---


def garbage_over(first: int, pages: int) -> Callable[[Path, random.Random], None]:
    def damage(path: Path, rng: random.Random) -> None:
        with path.open("r+b") as file:
            file.seek(first * PAGE_BYTES)
            file.write(rng.randbytes(pages * PAGE_BYTES))

    return damage


def used_bytes(path: Path) -> int:
    """How much of the file holds something: the rest of it was allocated ahead."""
    return len(path.read_bytes().rstrip(b"\0"))


def cut_to(share: float) -> Callable[[Path, random.Random], None]:
    def damage(path: Path, rng: random.Random) -> None:
        with path.open("r+b") as file:
            file.truncate(int(used_bytes(path) * share))

    return damage


def flip_bits(path: Path, rng: random.Random) -> None:
    """In some of the pages that are in use, anywhere."""
    with path.open("r+b") as file:
        content = bytearray(path.read_bytes())
        for _ in range(rng.randrange(1, 40)):
            content[rng.randrange(used_bytes(path))] ^= 1 << rng.randrange(8)
        file.write(content)


def swap_pages(path: Path, rng: random.Random) -> None:
    content = bytearray(path.read_bytes())
    pages = used_bytes(path) // PAGE_BYTES
    for _ in range(rng.randrange(1, 4)):
        a, b = (slice(n * PAGE_BYTES, (n + 1) * PAGE_BYTES) for n in rng.sample(range(pages), 2))
        content[a], content[b] = content[b], content[a]
    path.write_bytes(content)


def garbage_somewhere(path: Path, rng: random.Random) -> None:
    garbage_over(rng.randrange(2, used_bytes(path) // PAGE_BYTES), rng.randrange(1, 4))(path, rng)


DAMAGES = {
    "gone": lambda path, rng: path.unlink(),
    "empty": lambda path, rng: path.write_bytes(b""),
    "first page": garbage_over(0, 1),
    "both meta pages": garbage_over(0, 2),
    "first ten pages": garbage_over(0, 10),
    "the pages behind the meta pages": garbage_over(2, 20),
    "half": cut_to(0.5),
    "a page": cut_to(0.01),
}


@pytest.mark.parametrize("damage", DAMAGES.values(), ids=DAMAGES.keys())
@pytest.mark.parametrize("clean", [False, True], ids=["killed", "closed"])
def test_a_damaged_catalog_costs_neither_the_process_nor_a_page(
    zygote: Zygote, spec: Spec, seed: int, clean: bool, damage: Callable[[Path, random.Random], None]
) -> None:
    catalog = Path(spec.store) / "catalog"
    change_state(Path(spec.store), clean=clean, catalog_mark=catalog_mark(catalog) if clean else "")
    damage(catalog / "data.mdb", random.Random(seed))
    worker = run(zygote, spec)
    assert worker.code == 0, blame(spec, worker)
    assert "catalog rebuilt" in worker.complaint()


@pytest.mark.parametrize("damage", [flip_bits, swap_pages, garbage_somewhere])
@pytest.mark.parametrize("turn", range(5))
def test_damage_that_may_pass_the_check_is_never_a_wrong_page_nor_a_crash(
    zygote: Zygote, spec: Spec, seed: int, turn: int, damage: Callable[[Path, random.Random], None]
) -> None:
    """A kill cannot do this, only a stranger can: a page may be lost."""
    damage(Path(spec.store) / "catalog" / "data.mdb", random.Random(seed))
    worker = run(zygote, replace(spec, lossless=False, alone=False))
    assert worker.code is not None
    assert worker.code >= 0, blame(spec, worker)
    assert "WRONG" not in blame(spec, worker)
