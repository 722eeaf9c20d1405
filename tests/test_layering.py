"""Imports go downward only, and ``import busync`` is light."""

from __future__ import annotations

import ast
import subprocess
import sys
import time
from functools import cache
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[1] / "busync"

#: Module or package -> layer. A module may import from layers below its own, and from its own package.
LAYERS = {
    "errors": 0, "ids": 0,
    "options": 1, "fds": 1, "forks": 1, "interrupts": 1, "manifest": 1,
    "wire": 2,
    "protocol": 3, "handles": 3, "transport": 3,
    "pool": 4,
    "calls": 5, "exports": 5, "links": 5, "server": 5, "session": 5, "snapshot": 5, "publishing": 5, "attachment": 5,
    "publisher": 5, "asking": 5, "requests": 5, "holds": 5, "subscriber": 5, "blocking": 5,
    "daemon": 6,
}  # fmt: skip
#: Layers whose modules may import each other.
TOGETHER = {0, 1, 5}
PURE = ("protocol", "wire", "manifest", "ids", "errors", "options")
IMPURE = {
    "torch", "zmq", "asyncio", "socket", "time", "threading", "random", "os", "select", "signal", "subprocess",
    "multiprocessing", "concurrent", "uvloop", "datetime",
}  # fmt: skip
#: Where foreign packages may be imported at all.
BOUNDARIES = {
    "torch": {"handles", "pool", "server", "session", "snapshot", "publishing", "publisher", "subscriber", "blocking",
              "daemon"},
    "zmq": {"transport"},
    "msgpack": {"wire"},
    "safetensors": {"daemon"}, "typer": {"daemon"}, "rich": {"daemon"},
    "uvloop": {"server", "daemon"},
    "pickle": {"daemon"},  # to catch what torch.load raises, never to unpickle
}  # fmt: skip


@cache
def modules() -> dict[str, Path]:
    """Dotted name within the package -> file."""
    found = {}
    for path in sorted(PACKAGE.rglob("*.py")):
        name = ".".join(path.relative_to(PACKAGE).with_suffix("").parts)
        found[name.removesuffix(".__init__")] = path
    del found["__init__"]
    return found


@cache
def imports(path: Path) -> frozenset[str]:
    """What a file imports, wherever it does so, but for what only type checkers see."""
    tree = ast.parse(path.read_text())
    skipped = {
        inner
        for node in ast.walk(tree)
        if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"
        for statement in node.body
        for inner in ast.walk(statement)
    }
    names: set[str] = set()
    for node in ast.walk(tree):
        if node in skipped:
            continue
        if isinstance(node, ast.Import):
            names.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            assert node.module
            # "from busync import forks" names a module, "from busync.forks import x" a thing in one
            names.update(f"{node.module}.{a.name}" if node.module == "busync" else node.module for a in node.names)
    return frozenset(names)


EVERY = pytest.mark.parametrize("name", modules())


@EVERY
def test_every_module_has_a_layer_and_imports_only_from_below(name: str) -> None:
    own = name.split(".")[0]
    assert own in LAYERS, f"give {own} a layer"
    for imported in imports(modules()[name]):
        if not imported.startswith("busync."):
            continue
        other = imported.split(".")[1]
        if other not in LAYERS:  # a name that the package exports, like __version__
            assert not (PACKAGE / other).exists(), other
            continue
        below = LAYERS[other] < LAYERS[own]
        together = LAYERS[other] == LAYERS[own] and LAYERS[own] in TOGETHER
        assert below or other == own or together, f"busync.{name} imports {imported}"


@EVERY
def test_pure_modules_import_nothing_that_touches_the_world(name: str) -> None:
    if name.split(".")[0] not in PURE:
        return
    touched = {imported.split(".")[0] for imported in imports(modules()[name])} & IMPURE
    assert not touched


@EVERY
def test_foreign_packages_stay_behind_their_boundary(name: str) -> None:
    for imported in imports(modules()[name]):
        allowed = BOUNDARIES.get(imported.split(".")[0])
        assert allowed is None or name.split(".")[0] in allowed, f"busync.{name} imports {imported}"


def test_the_transport_cannot_decode_messages() -> None:
    for name, path in modules().items():
        if name.startswith("transport"):
            assert not {i for i in imports(path) if i.startswith(("busync.wire", "msgpack", "msgspec"))}


def run(code: str) -> str:
    """The output of a fresh interpreter."""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=30)
    return done.stdout.strip()


@pytest.mark.parametrize(
    "what", ["busync", "busync.protocol.publisher", "busync.protocol.subscriber", "busync.options"]
)
def test_importing_loads_neither_torch_nor_zmq(what: str) -> None:
    heavy = "'torch', 'zmq', 'asyncio', 'numpy', 'uvloop', 'typer', 'rich', 'safetensors'"
    assert run(f"import sys, {what}; print([m for m in ({heavy}) if m in sys.modules])") == "[]"


def test_importing_takes_less_than_100_ms() -> None:
    def best(code: str) -> float:
        times = []
        for _ in range(5):
            start = time.perf_counter()
            run(code)
            times.append(time.perf_counter() - start)
        return min(times)

    assert best("import busync") - best("pass") < 0.1
