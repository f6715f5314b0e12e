"""Facts of other machines, as `gdsstore doctor --save-facts` records them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from gdsstore.probe.facts import MachineFacts

FOLDER = Path(__file__).parent / "machines"
NAMES = tuple(sorted(file.stem for file in FOLDER.glob("*.json")))


def recorded(name: str) -> dict[str, Any]:
    return dict(json.loads((FOLDER / f"{name}.json").read_text()))


def machine(name: str) -> MachineFacts:
    return MachineFacts.from_dict(recorded(name))
