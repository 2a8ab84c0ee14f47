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

#: Module -> the outsiders that it alone may import, and only inside functions: whoever lacks them loses one function.
ADAPTERS = {
    ("pack_torch", "flash"): {"flash_attn", "flash_attn_interface"},
    ("pack_torch", "cli"): {"rich"},
    ("pack_torch", "offline/picture"): {"matplotlib"},
    ("pack_miles", "miles/samples"): {"numpy"},
    ("pack_miles", "training/ray_ranks"): {"ray"},
    ("pack_miles", "training/weights_and_biases"): {"wandb"},
}

#: What is imported only once it is chosen, and needs what its package does not: module -> outsiders.
LAZY = {
    ("pack_core", "kernels/counting_numpy"): {"numpy"},
    ("pack_core", "kernels/loads_numpy"): {"numpy"},
    ("pack_core", "kernels/packing_numpy"): {"numpy"},
    ("pack_core", "search/reference/greedy"): {"numpy"},
    ("pack_core", "search/reference/loop"): {"numpy"},
    ("pack_core", "search/reference/proposals"): {"numpy"},
    ("pack_core", "search/reference/state"): {"numpy"},
    ("pack_torch", "offline"): set(),
    ("pack_torch", "offline/advice"): set(),
    ("pack_torch", "offline/columns"): {"pyarrow"},
    ("pack_torch", "offline/datasets"): {"datasets", "pyarrow"},
    ("pack_torch", "offline/drawing"): set(),
    ("pack_torch", "offline/files"): {"pyarrow"},
    ("pack_torch", "offline/formats"): {"msgspec", "pyarrow"},
    ("pack_torch", "offline/kinds"): {"pyarrow"},
    ("pack_torch", "offline/layout"): set(),
    ("pack_torch", "offline/lines"): {"msgspec", "pyarrow"},
    ("pack_torch", "offline/packed"): {"pyarrow"},
    ("pack_torch", "offline/picture"): {"matplotlib"},
    ("pack_torch", "offline/ray_data"): {"pyarrow", "ray"},
    ("pack_torch", "offline/sources"): {"pyarrow"},
    ("pack_torch", "offline/writing"): set(),
}

#: The modules of pack_miles that run a model; all others must work on a laptop without torch.
WITH_TORCH = {
    "asynchronous/source",
    "asynchronous/worker",
    "core/arguments",
    "core/attention",
    "core/checks",
    "core/fitness",
    "core/model",
    "core/replay",
    "core/sharding",
    "core/weights",
    "miles/steps",
    "training/actor",
    "training/checkpoint",
    "training/collection",
    "training/collectives",
    "training/column",
    "training/objective",
    "training/observed",
    "training/policy",
    "training/rank",
    "training/sampling",
    "training/scoring",
    "training/small",
    "training/tracking",
    "training/trainer",
}


def sources(package: str) -> list[Path]:
    folder = ROOT / "packages" / package.replace("_", "-") / "src" / package
    return sorted(folder.rglob("*.py"))


def module_of(package: str, path: Path) -> str:
    """The path of a module inside its package, `kernels/loads`; a folder's `__init__` is the folder."""
    folder = ROOT / "packages" / package.replace("_", "-") / "src" / package
    return path.relative_to(folder).with_suffix("").as_posix().removesuffix("/__init__")


def imported(node: ast.AST) -> list[str]:
    if isinstance(node, ast.Import):
        return [alias.name for alias in node.names]
    if isinstance(node, ast.ImportFrom):
        assert node.level == 0, "relative imports hide the direction"
        return [str(node.module)]
    return []


def named(node: ast.AST) -> list[str]:
    """What an import names, with what it takes from there, which may be a module too."""
    taken = [f"{node.module}.{alias.name}" for alias in node.names] if isinstance(node, ast.ImportFrom) else []
    return imported(node) + taken


@pytest.mark.parametrize("package", list(ALLOWED))
def test_a_package_imports_only_what_it_declares_and_nothing_above_it(package: str) -> None:
    found = sources(package)
    assert found
    for path in found:
        module = (package, module_of(package, path))
        outsiders = ADAPTERS.get(module, set()) | LAZY.get(module, set())
        for node in ast.walk(ast.parse(path.read_text())):
            for name in imported(node):
                top = name.split(".")[0]
                allowed = top == package or top in ALLOWED[package] or top in sys.stdlib_module_names
                assert allowed or top in outsiders, f"{path.name} imports {name}"


@pytest.mark.parametrize(("package", "module"), list(ADAPTERS))
def test_an_adapter_imports_its_outsiders_only_when_called(package: str, module: str) -> None:
    (path,) = (path for path in sources(package) if module_of(package, path) == module)
    tree = ast.parse(path.read_text())
    functions = [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)]

    def outsiders(nodes: list[ast.AST]) -> list[str]:
        names = [name for node in nodes for name in imported(node)]
        return sorted(name for name in names if name.split(".")[0] in ADAPTERS[package, module])

    inside = outsiders([node for function in functions for node in ast.walk(function)])
    assert inside
    assert inside == outsiders(list(ast.walk(tree)))


def test_a_lazy_module_is_imported_only_by_its_like_or_inside_a_function() -> None:
    for package, module in LAZY:
        name = f"{package}.{module.replace('/', '.')}"
        for path in sources(package):
            at_once = [name for node in ast.parse(path.read_text()).body for name in imported(node)]
            assert name not in at_once or (package, module_of(package, path)) in LAZY, f"{path.name} imports {name}"


@pytest.mark.parametrize("package", list(ALLOWED))
def test_no_module_imports_itself_in_a_circle(package: str) -> None:
    modules = {module_of(package, path): path for path in sources(package)}
    del modules["__init__"]
    graph: dict[str, set[str]] = {}
    for module, path in modules.items():
        graph[module] = set()
        for node in ast.parse(path.read_text()).body:
            names = named(node)
            inside = {name.removeprefix(f"{package}.").replace(".", "/") for name in names if name.startswith(package)}
            graph[module] |= inside & set(modules)
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


def test_olmo_core_is_named_in_one_module() -> None:
    """It is looked up by name, for every name it takes is checked first; so the imports alone would not tell."""
    found = [module_of("pack_miles", path) for path in sources("pack_miles") if '"olmo_core.' in path.read_text()]
    assert found == ["core/library"]


def test_only_the_training_runtime_imports_torch() -> None:
    found = {module_of("pack_miles", path): path for path in sources("pack_miles")}
    assert set(found) >= WITH_TORCH
    for module, path in found.items():
        at_once = [name for node in ast.parse(path.read_text()).body for name in named(node)]
        # What a function imports it imports when it is called; what a module imports, it imports for all its users.
        heavy = [
            name
            for name in at_once
            if name.split(".")[0] in ("torch", "pack_torch")
            or name.removeprefix("pack_miles.").replace(".", "/") in WITH_TORCH
        ]
        assert module in WITH_TORCH or not heavy, f"{path.name} imports {heavy}"
