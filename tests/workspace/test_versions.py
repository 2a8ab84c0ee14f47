"""One version everywhere, and the two commands of the README are the ones that run."""

import re
import tomllib
from pathlib import Path

ROOT = Path(__file__).parents[2]
PACKAGES = ("pack-core", "pack-torch", "pack-miles")


def project(name: str) -> dict[str, object]:
    return tomllib.loads((ROOT / "packages" / name / "pyproject.toml").read_text())["project"]


def test_versions_move_in_lockstep_with_the_changelog() -> None:
    versions = {project(name)["version"] for name in PACKAGES}
    newest = re.search(r"^## (\d+\.\d+\.\d+)", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)
    assert newest
    assert versions == {newest.group(1)}


def test_siblings_pin_each_other_exactly() -> None:
    version = project("pack-core")["version"]
    assert f"pack-core=={version}" in project("pack-torch")["dependencies"]
    assert {f"pack-core=={version}", f"pack-torch=={version}"} <= set(project("pack-miles")["dependencies"])


def test_pack_core_depends_on_attrs_and_msgspec_alone() -> None:
    assert {re.split(r"[<>=]", name)[0] for name in project("pack-core")["dependencies"]} == {"attrs", "msgspec"}


def test_every_package_is_typed_and_brings_its_readme_and_licence() -> None:
    for name in PACKAGES:
        folder = ROOT / "packages" / name
        assert (folder / "src" / name.replace("-", "_") / "py.typed").exists()
        assert (folder / "README.md").read_text().startswith(f"# {name}\n")
        assert (folder / "LICENSE").read_text() == (ROOT / "LICENSE").read_text()


def test_ci_runs_the_command_the_readme_tells() -> None:
    commands = re.findall(r"^python3 -m venv .*$", (ROOT / "README.md").read_text(), re.MULTILINE)
    assert [command.rsplit("/", 1)[1] for command in commands] == ["nox -s demo", "nox"]
    assert commands[1] in (ROOT / ".ci" / "run").read_text().splitlines()
