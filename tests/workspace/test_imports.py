"""Imports point one way: pack_core <- pack_torch <- pack_miles, and outsiders stay inside their one adapter."""

import ast
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]

#: Package -> what it may import beside the standard library and itself.
ALLOWED = {
    "pack_core": {"attrs", "msgspec"},
    "pack_torch": {"attrs", "numpy", "torch", "pack_core"},
    "pack_miles": {"attrs", "msgspec", "structlog", "rich", "matplotlib", "torch", "pack_core", "pack_torch"},
}

#: pack_miles modules that must work on a laptop without torch.
TORCH_FREE = """
    arguments audit cli combinations config errors events facts figures forecast log machine options overview page
    planning progress refusal refusals report samples scoring_pass sections show sink standing summary tasks
"""


def sources(package: str) -> list[Path]:
    folder = ROOT / "packages" / package.replace("_", "-") / "src" / package
    return sorted(folder.rglob("*.py"))


def imported(node: ast.AST) -> list[str]:
    if isinstance(node, ast.Import):
        return [alias.name for alias in node.names]
    if isinstance(node, ast.ImportFrom):
        assert node.level == 0, "relative imports hide the direction"
        return [str(node.module)]
    return []


@pytest.mark.parametrize("package", list(ALLOWED))
def test_a_package_imports_only_what_it_declares_and_nothing_above_it(package: str) -> None:
    found = sources(package)
    assert found
    for path in found:
        for node in ast.walk(ast.parse(path.read_text())):
            for name in imported(node):
                top = name.split(".")[0]
                allowed = top == package or top in ALLOWED[package] or top in sys.stdlib_module_names
                assert allowed, f"{path.name} imports {name}"


@pytest.mark.parametrize("package", list(ALLOWED))
def test_no_module_imports_itself_in_a_circle(package: str) -> None:
    graph: dict[str, set[str]] = {}
    for path in sources(package):
        if path.stem == "__init__":
            continue
        names = {name for node in ast.parse(path.read_text()).body for name in imported(node)}
        graph[path.stem] = {name.split(".")[1] for name in names if name.startswith(f"{package}.")}
        for node in ast.parse(path.read_text()).body:
            if isinstance(node, ast.ImportFrom) and node.module == package:
                graph[path.stem] |= {alias.name for alias in node.names}
    done: set[str] = set()

    def visit(module: str, above: tuple[str, ...]) -> None:
        assert module not in above, f"circle: {' -> '.join((*above, module))}"
        if module in done:
            return
        for below in graph.get(module, set()):
            visit(below, (*above, module))
        done.add(module)

    for module in graph:
        visit(module, ())


def test_what_checks_a_configuration_needs_no_torch() -> None:
    for path in sources("pack_miles"):
        if path.stem not in TORCH_FREE.split():
            continue
        for node in ast.parse(path.read_text()).body:  # imports inside a function are made when it needs them
            for name in imported(node):
                assert name.split(".")[0] not in ("torch", "pack_torch"), f"{path.name} imports {name} at once"


def test_the_list_of_torch_free_modules_names_modules_that_exist() -> None:
    assert {path.stem for path in sources("pack_miles")} >= set(TORCH_FREE.split())
