"""docs/settings.md says what the code does."""

from __future__ import annotations

import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

from gdsstore.config import SETTINGS, Config

ROOT = Path(__file__).resolve().parent.parent
PAGE = ROOT / "docs" / "settings.md"


def check(root: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(root / "scripts" / "settings_doc.py"), "--check"]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)


def test_the_page_is_what_the_script_writes() -> None:
    result = check(ROOT)
    assert result.returncode == 0, result.stderr


def test_a_stale_page_is_found(tmp_path: Path) -> None:
    (tmp_path / "gdsstore").symlink_to(ROOT / "gdsstore")
    (tmp_path / "scripts").mkdir()
    for script in ("settings_doc.py", "written_page.py"):
        shutil.copy(ROOT / "scripts" / script, tmp_path / "scripts")
    (tmp_path / "docs").mkdir()
    (tmp_path / "docs" / "settings.md").write_text(PAGE.read_text().replace("`128`", "`256`"))
    result = check(tmp_path)
    assert result.returncode == 1
    assert "stale" in result.stderr


def test_every_setting_is_on_the_page_once_with_a_meaning() -> None:
    rows = [line.strip("| ").split(" | ") for line in PAGE.read_text().splitlines() if line.startswith("| `")]
    assert [row[0].strip("`") for row in rows] == list(SETTINGS)
    for row in rows:
        assert len(row) == 6, f"a | inside a cell breaks the table: {row}"
        assert len(row[5]) > 10


def test_the_example_file_on_the_page_is_a_valid_config(tmp_path: Path) -> None:
    example = PAGE.read_text().split("```toml\n")[1].split("```")[0]
    file = tmp_path / "example.toml"
    file.write_text(example)
    assert tomllib.loads(example)
    assert Config.load(file, {}) != Config()
