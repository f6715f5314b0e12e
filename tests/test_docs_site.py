"""The site that scripts/docs.sh builds has every page in its menu, and the links between docs/ and the rest of the repository."""

from __future__ import annotations

import importlib.util
import re
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

yaml = pytest.importorskip("yaml", reason="mkdocs is not installed")
pytest.importorskip("mkdocs", reason="mkdocs is not installed")

ROOT = Path(__file__).resolve().parent.parent
CONFIG: dict[str, Any] = yaml.safe_load((ROOT / "mkdocs.yml").read_text(encoding="utf-8"))
IMAGES = sorted((ROOT / "docs" / "images").glob("*.svg"))


def in_menu(entry: Any) -> Iterator[str]:
    if isinstance(entry, str):
        yield entry
    else:
        for value in entry.values() if isinstance(entry, dict) else entry:
            yield from in_menu(value)


@pytest.fixture(scope="module")
def hooks() -> ModuleType:
    spec = importlib.util.spec_from_file_location("docs_hooks", ROOT / "scripts" / "docs_hooks.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_every_page_is_in_the_menu_once(hooks: ModuleType) -> None:
    docs = ROOT / "docs"
    pages = [str(page.relative_to(docs)) for page in docs.rglob("*.md")]
    beside = [hooks.BESIDE + name for name in hooks.PAGES]
    assert sorted(in_menu(CONFIG["nav"])) == sorted(pages + beside)


def test_the_pages_beside_the_code_are_there(hooks: ModuleType) -> None:
    assert [name for name in hooks.PAGES if not (ROOT / name).is_file()] == []


def test_nothing_is_loaded_from_elsewhere() -> None:
    assert CONFIG["theme"]["font"] is False
    text = (ROOT / "mkdocs.yml").read_text(encoding="utf-8")
    assert "://" not in text
    assert not {"extra_javascript", "repo_url", "site_url"} & CONFIG.keys()


@pytest.mark.parametrize(
    ("uri", "text", "expected"),
    [
        ("cli.md", "[here](settings.md)", "[here](settings.md)"),
        ("linker.md", "[how](../bench/README.md#x)", "[how](repo/bench/README.md#x)"),
        ("decisions/001-checksum.md", "[s](../../SECURITY.md)", "[s](../repo/SECURITY.md)"),
        ("repo/docker/README.md", "[s](../docs/settings.md)", "[s](../../settings.md)"),
        ("repo/SECURITY.md", "[f](docs/format.md)", "[f](../format.md)"),
        ("repo/SECURITY.md", "[docker](docker)", "[docker](docker/README.md)"),
        ("daemon.md", "[`deploy/systemd/gdsstore.service`](../deploy/systemd/gdsstore.service)", None),
        ("daemon.md", "[the unit](../deploy/systemd/gdsstore.service)", None),
        ("cli.md", "[lost](../nowhere.md)", "[lost](../nowhere.md)"),
        ("cli.md", "[web](https://example.org/a.md)", "[web](https://example.org/a.md)"),
    ],
)
def test_links_lead_to_the_sites_pages(hooks: ModuleType, uri: str, text: str, expected: str | None) -> None:
    found = hooks.relink(text, uri)
    if expected is None:  # named, not linked
        assert "](" not in found
        assert "`deploy/systemd/gdsstore.service`" in found
    else:
        assert found == expected


def test_links_in_code_are_left_alone(hooks: ModuleType) -> None:
    class Page:
        class file:  # noqa: N801
            src_uri = "linker.md"

    code = "```text\n[how](../bench/README.md)\n```"
    assert hooks.on_page_markdown(f"{code}\n[how](../bench/README.md)\n", Page) == (
        f"{code}\n[how](repo/bench/README.md)\n"
    )


@pytest.mark.parametrize("image", IMAGES, ids=lambda image: image.name)
def test_a_picture_is_small_readable_in_the_dark_and_described(image: Path) -> None:
    text = image.read_text(encoding="utf-8")
    assert len(text) < 20_000
    assert "prefers-color-scheme: dark" in text
    assert re.search(r"<title[^>]*>.+</title>", text)
    assert "href" not in text
    assert "@import" not in text


def test_every_picture_is_on_a_page() -> None:
    pages = "".join(page.read_text(encoding="utf-8") for page in (ROOT / "docs").rglob("*.md"))
    images = [image.name for image in (ROOT / "docs" / "images").iterdir()]
    assert [name for name in images if f"images/{name}" not in pages] == []
