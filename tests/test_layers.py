"""Imports go one way: a later module may import an earlier one, never the other way round."""

import ast
from pathlib import Path

SOURCE = Path(__file__).parent.parent / "src" / "packhorse"

# In processing order, as in docs/layout.md. A package is one layer: inside it, order is its own business.
LAYERS = [
    "errors",
    "units",
    "threads",
    "keys",
    "precision",
    "batch",
    "graph",
    "partition",
    "schedule",
    "lowering",
    "memory",
    "running",
    "device",
    "store",
    "machine",
    "price",
    "optimizer",
    "gradient",
    "rehearse",
    "ranks",
    "layout",
    "update",
    "case",
    "estimate",
    "weights",
    "checkpoint",
    "archive",
    "state",
    "run",
    "plan",
    "search",
    "arrange",
    "outline",
    "fetched",
    "program",
    "execute",
    "exchange",
    "tasks",
    "trainer",
    "verify",
    "sil",
    "models",
    "data",
    "chart",
    "report",
    "cli",
    "__main__",
]

# These load torch's tracing stack (tens of megabytes), which the caller's process must not carry: only inside functions.
HEAVY = ("packhorse.graph.export", "packhorse.graph.faithful", "packhorse.graph.cost")


def layer_of(name: str) -> str:
    return name.split(".")[1] if "." in name else ""


def imports(path: Path, top_level: bool) -> list[str]:
    tree = ast.parse(path.read_text())
    nodes = tree.body if top_level else list(ast.walk(tree))
    names = [a.name for n in nodes if isinstance(n, ast.Import) for a in n.names]
    froms = [n for n in nodes if isinstance(n, ast.ImportFrom) and n.module]
    names += [f"packhorse.{a.name}" for n in froms if n.module == "packhorse" for a in n.names]
    names += [n.module for n in froms if n.module and n.module != "packhorse"]
    return [name for name in names if name.split(".")[0] == "packhorse"]


def test_every_module_has_its_layer() -> None:
    found = {p.stem if p.parent == SOURCE else p.relative_to(SOURCE).parts[0] for p in SOURCE.rglob("*.py")}
    assert found - {"__init__"} == set(LAYERS)


def test_imports_go_one_way() -> None:
    for path in SOURCE.rglob("*.py"):
        relative = path.relative_to(SOURCE)
        layer = relative.parts[0].removesuffix(".py")
        if layer == "__init__":
            continue
        for name in imports(path, top_level=False):
            used = layer_of(name)
            assert LAYERS.index(used) <= LAYERS.index(layer), f"{relative} imports {name}"


def test_the_tracer_is_imported_only_where_it_runs() -> None:
    tracer = {"export.py", "faithful.py", "cost.py"}
    for path in SOURCE.rglob("*.py"):
        if path.name not in tracer:
            assert not set(HEAVY) & set(imports(path, top_level=True)), path.name
