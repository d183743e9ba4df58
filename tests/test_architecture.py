"""The import rules of docs/architecture.md, held by the sources themselves and by fresh interpreters."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parent.parent / "clip_deploy"

# From the bottom up: a module may import those of lower rows, and of its own package.
LAYERS = (
    {"errors", "progress"},
    {"files"},
    {"resources", "triton_schema", "releases", "plan"},
    {"spec"},
    {"contract"},
    {"artifacts"},
    {"compare", "inputs"},
    {"export", "engines", "repository", "servers", "client", "lint"},
    {"report", "doctor", "inspection", "indexes", "operations"},
    {"smoke"},
    {"bench"},
    {"tune", "capacity"},
    {"gateway"},
    {"publishing"},
    {"deploy"},
    {"cli"},
)
STANDARD_ONLY = {
    "errors",
    "files",
    "resources",
    "releases",
    "progress",
    "spec",
    "contract",
    "artifacts",
    "servers",
    "plan",
}

# A heavy library → the only places that may import it.
HOMES = {
    "torch": {"export"},
    "torchvision": {"export"},
    "open_clip": {"export"},
    "onnx": {"export", "lint", "inspection"},
    "tensorrt": {"engines"},
    "tensorrt_rtx": {"engines"},
    "polygraphy": {"engines"},
    "openvino": {"engines"},
    "nncf": {"engines"},
    "onnxruntime": {"export", "lint"},
    "regex": {"export"},
    "typer": {"cli"},
    "rich": {"cli", "report"},
    "jinja2": {"repository", "report", "operations"},
    "tritonclient": {"client"},
    "grpc": {"client"},
    "psutil": {"bench"},
    "matplotlib": {"report"},
    "google": {"repository", "lint", "triton_schema"},
    "optuna": {"tune"},
    "fsspec": {"publishing"},
    "tomli": {"deploy"},
    "PIL": {"inputs"},
    "ftfy": {"inputs"},
    "tokenizers": {"inputs", "export"},
    "lancedb": {"indexes"},
    "pyarrow": {"indexes"},
    "elasticsearch": {"indexes"},
    "fastapi": {"gateway"},
    "starlette": {"gateway"},
    "pydantic": {"gateway"},
    "pydantic_core": {"gateway"},
    "uvicorn": {"gateway"},
    "python_multipart": {"gateway"},
    "prometheus_client": {"gateway"},
    "elastic_transport": {"indexes"},
}


def _modules() -> list[tuple[str, Path]]:
    """(top-level name inside the package, file) of every module."""
    return [
        (path.relative_to(PACKAGE).parts[0].removesuffix(".py"), path)
        for path in sorted(PACKAGE.rglob("*.py"))
    ]


def _imports(path: Path) -> set[str]:
    """Dotted names that a file imports at run time; imports for type checkers alone do not count."""
    tree = ast.parse(path.read_text("utf-8"))
    for node in ast.walk(tree):
        if (
            isinstance(node, ast.If)
            and isinstance(node.test, ast.Name)
            and node.test.id == "TYPE_CHECKING"
        ):
            node.body = []
    found = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            found |= {f"{node.module}.{alias.name}" for alias in node.names}
    return found


def _layer(name: str) -> int:
    return next(i for i, names in enumerate(LAYERS) if name in names)


def test_every_module_has_a_place_in_the_layers():
    named = {name for name, _ in _modules()} - {"__init__", "__main__"}
    assert named == set().union(*LAYERS)


@pytest.mark.parametrize(
    ("name", "path"), _modules(), ids=lambda value: str(value).rpartition("clip_deploy/")[2]
)
def test_modules_import_downwards_only(name: str, path: Path):
    for imported in _imports(path):
        parts = imported.split(".")
        if (
            parts[0] != "clip_deploy"
            or name in ("__init__", "__main__")
            or len(parts) < 2
            or parts[1] == "__version__"
        ):
            continue
        other = parts[1]
        assert other == name or _layer(other) < _layer(name), f"{path} imports {imported}"


@pytest.mark.parametrize(
    ("name", "path"), _modules(), ids=lambda value: str(value).rpartition("clip_deploy/")[2]
)
def test_libraries_stay_at_home(name: str, path: Path):
    for imported in _imports(path):
        library = imported.split(".")[0]
        if library == "clip_deploy":
            continue
        assert name in HOMES.get(library, {name}), f"{path} imports {library}"
        if name in STANDARD_ONLY:
            assert library in sys.stdlib_module_names or library == "__future__", (
                f"{path} imports {library}"
            )


@pytest.mark.processes
@pytest.mark.parametrize(
    ("module", "forbidden"),
    [
        ("clip_deploy", "typer rich numpy torch"),
        (
            "clip_deploy.cli",
            "numpy torch open_clip onnx onnxruntime tritonclient PIL jinja2 fastapi",
        ),
        (
            "clip_deploy.client",
            "torch torchvision open_clip onnx onnxruntime typer rich jinja2 fastapi",
        ),
        (
            "clip_deploy.engines",
            "torch onnx onnxruntime tensorrt tensorrt_rtx polygraphy openvino nncf numpy",
        ),
        ("clip_deploy.engines.tensorrt.building", "torch onnx tensorrt polygraphy numpy"),
        ("clip_deploy.engines.tensorrt.checking", "torch onnx tensorrt_rtx polygraphy numpy"),
        ("clip_deploy.servers", "torch onnxruntime tritonclient numpy"),
        (
            "clip_deploy.lint",
            "numpy torch onnx onnxruntime typer rich jinja2 grpc tritonclient.grpc.service_pb2 PIL tokenizers",
        ),
        ("clip_deploy.smoke", "torch torchvision open_clip onnx onnxruntime"),
        ("clip_deploy.bench.benchmark", "torch open_clip onnx onnxruntime psutil matplotlib rich"),
        ("clip_deploy.indexes", "torch lancedb pyarrow elasticsearch tritonclient PIL typer rich"),
        (
            "clip_deploy.gateway",
            "torch torchvision open_clip onnx onnxruntime typer rich jinja2 lancedb pyarrow",
        ),
        ("clip_deploy.doctor", "torch open_clip onnx onnxruntime tensorrt numpy"),
    ],
)
def test_a_fresh_interpreter_imports_it_without(module: str, forbidden: str):
    blocked = "".join(f"sys.modules[{name!r}] = None\n" for name in forbidden.split())
    done = subprocess.run(
        [sys.executable, "-c", f"import sys\n{blocked}import {module}"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr


def test_functions_and_modules_stay_short():
    for _, path in _modules():
        text = path.read_text("utf-8")
        assert text.count("\n") <= 400, f"{path} has {text.count(chr(10))} lines"
        for node in ast.walk(ast.parse(text)):
            if (
                isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef))
                and "cli" not in path.parts
            ):
                assert node.end_lineno - node.lineno < 60, (
                    f"{path}: {node.name} has {node.end_lineno - node.lineno} lines"
                )
