"""Packages, the direction of imports, and the files of a release."""

from __future__ import annotations

import ast
import importlib
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PACKAGES = ("kernels", "engine", "llumnix", "serving")  # a package may import itself and those before it
OUTSIDE = {"ray", "pydantic", "fastapi", "starlette", "outlines", "uvicorn"}
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


def imports_of(path: Path) -> set[str]:
    found: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text(), str(path))):
        if isinstance(node, ast.Import):
            found.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.level == 0 and node.module:
            found.add(node.module)
            found.update(f"{node.module}.{alias.name}" for alias in node.names)
    return found


def sources(package: str) -> list[Path]:
    return sorted((ROOT / package).rglob("*.py"))


@pytest.mark.parametrize("package", PACKAGES)
def test_imports_go_one_way(package: str) -> None:
    later = set(PACKAGES[PACKAGES.index(package) + 1 :])
    for path in sources(package):
        wrong = {name for name in imports_of(path) if name.split(".")[0] in later}
        assert not wrong, f"{path.relative_to(ROOT)} imports {wrong}"


@pytest.mark.parametrize("package", ["kernels", "engine"])
def test_engine_and_kernels_know_no_server(package: str) -> None:
    for path in sources(package):
        wrong = {name for name in imports_of(path) if name.split(".")[0] in OUTSIDE}
        assert not wrong, f"{path.relative_to(ROOT)} imports {wrong}"


def test_the_engine_never_uses_transformers_models() -> None:
    for path in sources("engine"):
        assert "transformers.models" not in path.read_text(), path


def test_the_kernels_package_has_no_logic() -> None:
    tree = ast.parse((ROOT / "kernels/__init__.py").read_text())
    assert all(isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) for node in tree.body)


@pytest.mark.parametrize("first", ["kernels.metadata", "transformers"])
def test_transformers_and_our_kernels_live_together(first: str) -> None:
    """transformers looks for another project's distribution under the same top-level name."""
    second = "transformers" if first != "transformers" else "kernels.metadata"
    code = (
        f"import {first}, {second}\n"
        "from transformers import AutoTokenizer, PretrainedConfig\n"
        "import kernels\n"
        f"assert kernels.__file__.startswith({str(ROOT)!r}), kernels.__file__\n"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr


def test_the_configuration_needs_neither_torch_nor_pydantic() -> None:
    code = (
        "import sys; from engine.config import resolve; resolve({'model': 'm'});"
        "assert not {'pydantic', 'ray'} & set(sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr


def test_the_version_is_not_one_that_transformers_mistakes() -> None:
    assert not PROJECT["version"].startswith(("0.18.", "0.19."))


def test_console_scripts_exist() -> None:
    assert set(PROJECT["scripts"]) == {"ferry", "blade_llm_server", "blade_llm_split", "blade_llm_check"}
    for target in PROJECT["scripts"].values():
        module, function = target.split(":")
        assert callable(getattr(importlib.import_module(module), function))


def test_constraints_pin_everything_and_name_no_place() -> None:
    lines = (ROOT / "constraints.txt").read_text().split()
    assert all(line.count("==") == 1 for line in lines)
    assert not any("+" in line or "/" in line for line in lines)
    pinned = {line.split("==")[0].lower().replace("_", "-") for line in lines}
    wanted = [*PROJECT["dependencies"], *PROJECT["optional-dependencies"]["test"]]
    names = {name.split(">")[0].split("[")[0].lower().replace("_", "-") for name in wanted}
    assert names <= pinned


def test_every_package_is_a_regular_package() -> None:
    for package in PACKAGES:
        folders = {path.parent for path in sources(package)}
        missing = [folder for folder in folders if not (folder / "__init__.py").exists()]
        assert not missing
