"""The pinned OLMo-core: what happens when it is missing, another, or lacks a name that is used."""

import importlib
import importlib.metadata
import subprocess
import sys
from types import SimpleNamespace
from typing import Any

import pytest
from pack_miles.core import library as core_library
from pack_miles.errors import InputError
from support.olmo_leaves import replace


def test_the_installed_core_is_the_pinned_one_and_has_every_name() -> None:
    library = core_library.load()
    assert library.version == importlib.metadata.version("ai2-olmo-core") == "3.0.0"
    assert library.Attention.__module__ == "olmo_core.nn.attention"
    with pytest.raises(AttributeError):
        _ = library.Nothing


@pytest.mark.parametrize("version", ["2.6.0", "3.0.1", "3.0.0rc1"])
def test_another_version_is_refused_with_the_one_to_install(version: str) -> None:
    with pytest.raises(InputError, match=rf"is {version} but this release drives 3\.0\.0 only; install it with: pip"):
        core_library.collect(version, importlib.import_module)


def test_a_build_of_the_pinned_version_is_that_version() -> None:
    assert core_library.collect("3.0.0+cu128", importlib.import_module).version == "3.0.0+cu128"


def test_names_that_are_gone_are_all_told() -> None:
    def find(name: str) -> Any:
        if name == "olmo_core.nn.moe.v2.router":
            return SimpleNamespace(MoERouterV2=object)
        if name == "olmo_core.nn.attention.kda":
            raise ImportError("no module of that name")
        return importlib.import_module(name)

    with pytest.raises(InputError) as caught:
        core_library.collect("3.0.0", find)
    gone = [problem.split(" is gone")[0] for problem in caught.value.problems]
    assert gone == ["olmo_core.nn.attention.kda.KimiDeltaAttention", "olmo_core.nn.moe.v2.router.MoERouterV2.get_top_k"]


def test_a_missing_core_is_refused_with_the_command_that_installs_it(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> str:
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(importlib.metadata, "version", missing)
    with pytest.raises(
        InputError, match=r"needs the package ai2-olmo-core; install it with: pip install 'pack-miles\[core\]'"
    ):
        core_library.load.__wrapped__()


def test_importing_the_adapter_imports_no_core() -> None:
    words = "import sys, pack_miles.core.model; print([name for name in sys.modules if name.startswith('olmo_core')])"
    assert subprocess.run([sys.executable, "-c", words], capture_output=True, text=True, check=True).stdout == "[]\n"


def test_a_stand_in_for_a_name_that_is_gone_is_an_error() -> None:
    with pytest.raises(
        AssertionError, match=r"olmo_core\.nn\.moe\.v2\.no_ep\.moe_permute is gone; look at what OLMo-core"
    ):
        replace(importlib.import_module("olmo_core.nn.moe.v2.no_ep"), "moe_permute", None)
