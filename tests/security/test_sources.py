"""What no source of the library does: run what it reads, start shells, follow names into memory, or tell secrets."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.store.helpers import REPO

PACKAGES = ("gdsstore", "sglang_backend")
SOURCES = sorted(source for name in PACKAGES for source in (REPO / name).rglob("*.py"))
TREES = {source: ast.parse(source.read_text()) for source in SOURCES}

MODULES = {
    "pickle",
    "cPickle",
    "cloudpickle",
    "dill",
    "marshal",
    "shelve",
    "jsonpickle",
    "joblib",
    "yaml",
    "xml",
    "telnetlib",
}
CALLS = {"eval", "exec", "compile", "__import__"}
METHODS = {"os.system", "os.popen", "tempfile.mktemp", "torch.load", "np.load", "np.save", "yaml.load"}
SECRET = {"token", "secret", "password", "master"}
LOG_METHODS = {"debug", "info", "warning", "error", "exception", "critical", "log"}


def calls(source: Path) -> Iterator[ast.Call]:
    return (node for node in ast.walk(TREES[source]) if isinstance(node, ast.Call))


def at(source: Path, node: ast.AST) -> str:
    return f"{source.relative_to(REPO)}:{getattr(node, 'lineno', '?')}: {ast.unparse(node)}"


def test_nothing_is_imported_that_runs_what_it_reads() -> None:
    found = []
    for source, tree in TREES.items():
        for node in ast.walk(tree):
            names = []
            if isinstance(node, ast.Import):
                names = [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom) and node.level == 0:
                names = [node.module or ""]
            if {name.partition(".")[0] for name in names} & MODULES:
                found.append(at(source, node))
    assert found == []


def test_nothing_that_is_read_is_run() -> None:
    found = []
    for source in SOURCES:
        for call in calls(source):
            name = ast.unparse(call.func)
            if name in CALLS or name in METHODS:
                found.append(at(source, call))
    assert found == []


def test_no_shell_is_started() -> None:
    found = [
        at(source, call)
        for source in SOURCES
        for call in calls(source)
        if any(keyword.arg == "shell" for keyword in call.keywords)
    ]
    assert found == []


def test_a_file_that_is_made_is_made_for_its_owner() -> None:
    """Every os.open that makes a file says 0600, and is not led elsewhere by a link."""
    found = []
    for source in SOURCES:
        for call in calls(source):
            if ast.unparse(call.func) == "os.open" and "O_CREAT" in ast.unparse(call):
                mode = ast.unparse(call.args[-1])
                # What must be new (O_EXCL) is not behind a link. Flags may have a name, set nearby.
                if mode != "384" or not ("O_EXCL" in ast.unparse(call) or "O_NOFOLLOW" in source.read_text()):
                    found.append(at(source, call))
    assert found == []


def _is_secret(name: object) -> bool:
    """By its words. Constants are limits of secrets, and paths lead to them."""
    if not isinstance(name, str) or name.isupper() or name.endswith("_file"):
        return False
    return bool(set(name.split("_")) & SECRET)


def secrets_told(tree: ast.AST) -> list[ast.AST]:
    """Log messages and errors that are made from something that is called like a secret."""
    found: list[ast.AST] = []
    for call in (node for node in ast.walk(tree) if isinstance(node, ast.Call)):
        name = ast.unparse(call.func)
        logs = name.startswith("log.") and name.removeprefix("log.") in LOG_METHODS
        if not (logs or name.endswith("Error")):
            continue
        for part in (*call.args, *(keyword.value for keyword in call.keywords)):
            names = {getattr(node, "id", getattr(node, "attr", "")) for node in ast.walk(part)}
            if any(map(_is_secret, names)):
                found.append(call)
    return found


def test_no_message_is_made_from_a_secret() -> None:
    assert [at(source, node) for source, tree in TREES.items() for node in secrets_told(tree)] == []


@pytest.mark.parametrize(
    "code",
    [
        'log.warning("refused %s", self._token)',
        'raise ConfigError(f"bad {token}")',
        'log.info("x", extra=master)',
        'raise ConfigError("bad", got=client_secret)',
    ],
)
def test_the_rule_on_secrets_sees_one(code: str) -> None:
    assert secrets_told(ast.parse(code))
