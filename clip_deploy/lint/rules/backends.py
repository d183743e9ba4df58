"""CD3xx: the backend, and code that it runs."""

from __future__ import annotations

import ast
import difflib
import warnings
from collections import deque
from typing import TYPE_CHECKING

from clip_deploy.lint.disk import inside, names_in
from clip_deploy.lint.findings import Example, Hit, Severity, rule
from clip_deploy.lint.model import BACKEND_FILES
from clip_deploy.lint.target import KNOWN_BACKENDS
from clip_deploy.lint.text import Place

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from clip_deploy.lint.model import Model
    from clip_deploy.lint.target import Target

# What people write → what the backend is called.
_ALIASES = {
    "onnx": "onnxruntime",
    "ort": "onnxruntime",
    "onnxruntime_onnx": "onnxruntime",
    "trt": "tensorrt",
    "tensorrt_plan": "tensorrt",
    "torch": "pytorch",
    "libtorch": "pytorch",
    "pytorch_libtorch": "pytorch",
    "py": "python",
    "python3": "python",
    "tf": "tensorflow",
}
_PLATFORMS = (
    *("onnxruntime_onnx", "tensorrt_plan", "pytorch_libtorch", "torch_aoti", "ensemble"),
    *("tensorflow_savedmodel", "tensorflow_graphdef"),
)
_MODEL_DIRECTORY = "$$TRITON_MODEL_DIRECTORY"
_ENVIRONMENT = "parameters { key: 'EXECUTION_ENV_PATH' value { string_value: 'PLACE' } }"
_MAX_CODE_BYTES = 4 * 2**20


@rule(
    "CD301",
    "unknown-backend",
    Severity.ERROR,
    "There is no backend of that name in the server.",
    bad='backend: "onnx"',
    good='backend: "onnxruntime"',
)
def unknown_backend(model: Model, target: Target) -> Iterator[Hit]:
    name = model.backend
    if (
        not name
        or name in KNOWN_BACKENDS
        or name in target.backends
        or _brings_its_own(model, name)
    ):
        return
    right = _ALIASES.get(name.lower()) or next(
        iter(difflib.get_close_matches(name.lower(), sorted(target.backends), n=1, cutoff=0.6)),
        None,
    )
    hint = (
        f"; did you mean {right}?"
        if right
        else f"; the server has {', '.join(sorted(target.backends))}"
    )
    message = f"there is no backend {name!r}{hint}"
    if right:
        yield model.hit(message, "backend", right=f'backend: "{right}"')
    else:
        remedy = f"if the server has it, say so with --backend {name}"
        yield Hit(message, model.place("backend"), remedy=remedy)


def _brings_its_own(model: Model, name: str) -> bool:
    """A backend's library may lie in the model's own folder."""
    places = [model.folder, *model.served.values()]
    names = [f"libtriton_{name}.so", *([model.config.runtime] if model.config.runtime else [])]
    return any(inside(place, each).is_file() for place in places for each in names)


@rule(
    "CD302",
    "platform-and-backend",
    Severity.ERROR,
    "platform and backend name two different things, or platform is a word that Triton does not know.",
    bad='backend: ""\nplatform: "onnxruntime"',
    good='backend: ""\nplatform: "onnxruntime_onnx"',
)
def platform_and_backend(model: Model, target: Target) -> Iterator[Hit]:
    platform, backend = model.config.platform, model.config.backend
    if not platform:
        return
    right = BACKEND_FILES.get(backend, ("", ""))[0]
    fix = None
    if not backend and platform not in (*_PLATFORMS, "libtorch"):
        message, fix = f"there is no platform {platform!r}", _right_platform(platform)
    elif backend and platform == "ensemble":
        message = f"an ensemble has no backend, and this one names {backend!r}"
    elif backend and right and platform != right:
        message = f"backend {backend!r} goes with platform {right!r}, not {platform!r}"
        fix = f'platform: "{right}"'
    else:
        return
    yield model.hit(message, "platform", right=fix)


def _right_platform(written: str) -> str | None:
    """The line that was meant by a platform that does not exist."""
    name = _ALIASES.get(written, written)
    near = difflib.get_close_matches(written, _PLATFORMS, n=1, cutoff=0.6)
    right = BACKEND_FILES.get(name, ("", ""))[0] or next(iter(near), "")
    if right:
        return f'platform: "{right}"'
    return f'backend: "{name}"' if name in KNOWN_BACKENDS else None


@rule(
    "CD303",
    "backend-not-on-target",
    Severity.ERROR,
    "The server that the repository is meant for does not have this backend.",
    bad=Example('backend: "tensorrt"', files={"1/model.plan": "plan of TensorRT 10.4.0"}),
    good=Example(
        'backend: "tensorrt"', files={"1/model.plan": "plan of TensorRT 10.4.0"}, gpu=True
    ),
)
def backend_not_on_target(model: Model, target: Target) -> Iterator[Hit]:
    backend = model.backend
    if backend == "tensorrt" and not target.gpu:
        message = "TensorRT runs on GPUs only, and the target has none"
    elif backend in KNOWN_BACKENDS and backend not in target.backends and backend in BACKEND_FILES:
        message = (
            f"the server has no backend {backend}; it has {', '.join(sorted(target.backends))}"
        )
    else:
        return
    yield Hit(message, model.place("backend") or model.place("platform"))


@rule(
    "CD304",
    "no-backend",
    Severity.ERROR,
    "Neither the config nor the files say which backend is meant.",
    bad=Example(config='backend: ""', files={"1/model.onnx": "missing", "1/clip.onnx": "graph"}),
    good=Example(),
)
def no_backend(model: Model, target: Target) -> Iterator[Hit]:
    if model.backend or model.is_ensemble or not model.served or model.config.platform:
        return
    if not (model.is_parsed or not model.has_config):
        return
    names = sorted({name for folder in model.served.values() for name in names_in(folder)})
    known = {file.rpartition(".")[2]: file for _, file in BACKEND_FILES.values()}
    alike = next((name for name in names if name.rpartition(".")[2] in known), None)
    remedy = f"rename {alike} to {known[alike.rpartition('.')[2]]}" if alike else "name a backend"
    there = ", ".join(names[:4]) or "an empty folder"
    message = f"no backend is named, and {there} tells none"
    yield Hit(message, model.place("backend"), remedy=remedy)


@rule(
    "CD305",
    "code-does-not-compile",
    Severity.ERROR,
    "The Python backend imports model.py, and Python refuses it.",
    bad=Example(
        config='backend: "python"', files={"1/model.py": "class TritonPythonModel\n    pass\n"}
    ),
    good=Example(config='backend: "python"', files={"1/model.py": "python"}),
)
def code_does_not_compile(model: Model, target: Target) -> Iterator[Hit]:
    for path in _code(model):
        try:
            _compiled(path)
        except (SyntaxError, ValueError) as error:
            line = getattr(error, "lineno", None)
            place = Place(line, max(getattr(error, "offset", None) or 1, 1)) if line else None
            yield Hit(
                f"{path.name} does not compile: {getattr(error, 'msg', error)}", place, file=path
            )
        except (OSError, RecursionError, MemoryError) as error:
            yield Hit(f"{path.name} cannot be read: {type(error).__name__}", file=path)


@rule(
    "CD306",
    "code-without-a-model",
    Severity.ERROR,
    "The Python backend looks for a class TritonPythonModel with a method execute.",
    bad=Example(
        config='backend: "python"',
        files={"1/model.py": "class Model:\n    def execute(self, requests): ...\n"},
    ),
    good=Example(config='backend: "python"', files={"1/model.py": "python"}),
)
def code_without_a_model(model: Model, target: Target) -> Iterator[Hit]:
    for path in _code(model):
        try:
            tree = _parsed(path)
        except (SyntaxError, ValueError, OSError, RecursionError, MemoryError):
            continue
        bound = dict(_bindings(tree))
        found = bound.get("TritonPythonModel")
        if _DYNAMIC & set(_names(tree)):
            continue  # it may make anything of itself
        if "TritonPythonModel" not in bound and "*" not in bound:
            yield Hit("there is no class TritonPythonModel", file=path)
        elif isinstance(found, ast.ClassDef) and not found.bases and not _has_execute(found):
            place = Place(found.lineno, found.col_offset + 1)
            yield Hit("TritonPythonModel has no method execute", place, file=path)


@rule(
    "CD309",
    "tensors-not-named",
    Severity.ERROR,
    "A TorchScript file does not say what its inputs and outputs are, so the config must.",
    bad=Example('backend: "pytorch"\noutput []', files={"1/model.pt": "1000 bytes"}),
    good=Example('backend: "pytorch"', files={"1/model.pt": "1000 bytes"}),
)
def tensors_not_named(model: Model, target: Target) -> Iterator[Hit]:
    config = model.config
    if model.backend == "pytorch" and config.platform != "torch_aoti":
        lacking = [side for side in ("input", "output") if not getattr(config, side)]
        if lacking and model.served:
            message = f"a PyTorch model needs its {' and '.join(lacking)} in the config"
            yield Hit(message, model.place("backend") or model.place("platform"))


@rule(
    "CD310",
    "environment-missing",
    Severity.ERROR,
    "The Python backend unpacks the environment that EXECUTION_ENV_PATH names before it starts the model.",
    bad=Example(
        config='backend: "python"\n'
        + _ENVIRONMENT.replace("PLACE", "$$TRITON_MODEL_DIRECTORY/env.tar.gz"),
        files={"1/model.py": "python"},
    ),
    good=Example(
        config='backend: "python"\n'
        + _ENVIRONMENT.replace("PLACE", "/opt/environments/shop.tar.gz"),
        files={"1/model.py": "python"},
    ),
)
def environment_missing(model: Model, target: Target) -> Iterator[Hit]:
    """Only what should travel with the model is looked for; other places may exist on the server alone."""
    value = model.parameter("EXECUTION_ENV_PATH")
    if model.backend != "python" or not value.startswith(_MODEL_DIRECTORY):
        return
    inside = value.removeprefix(_MODEL_DIRECTORY).lstrip("/")
    if not (model.folder / inside).exists():
        message = f"the environment {inside} is not in the model's folder"
        yield Hit(
            message,
            model.parameter_place("EXECUTION_ENV_PATH"),
            remedy="pack it there with conda-pack",
        )


@rule(
    "CD307",
    "unknown-agent",
    Severity.ERROR,
    "A repository agent is a library of the server, and is run before the model is read.",
    bad='model_repository_agents { agents { name: "sha256" } }',
    good='model_repository_agents { agents { name: "checksum" } }',
)
def unknown_agent(model: Model, target: Target) -> Iterator[Hit]:
    for index, agent in enumerate(model.config.model_repository_agents.agents):
        if agent.name not in target.agents:
            known = f"it has {', '.join(sorted(target.agents))}" if target.agents else "it has none"
            place = model.place("model_repository_agents", "agents", index)
            yield Hit(f"the server has no repository agent {agent.name!r}; {known}", place)


@rule(
    "CD308",
    "unknown-runtime",
    Severity.ERROR,
    "runtime names the library that runs the model, in its folder or in its backend's; most models leave it out.",
    bad='runtime: "libonnxruntime.so"',
    good='runtime: "libtriton_onnxruntime.so"',
)
def unknown_runtime(model: Model, target: Target) -> Iterator[Hit]:
    name = model.config.runtime
    places = [model.folder, *model.served.values()]
    is_python = name == "model.py"  # a backend written in Python: looked for in its own folder only
    if not name or (not is_python and any(inside(place, name).is_file() for place in places)):
        return
    if is_python and model.backend == "pytorch":
        return  # a PyTorch model that brings its own code
    libraries = {
        f"libtriton_{each}.so" for each in {model.backend, *KNOWN_BACKENDS, *target.backends}
    }
    if name not in libraries and not (is_python and model.backend not in BACKEND_FILES):
        right = f'runtime: "libtriton_{model.backend}.so"' if model.backend else None
        yield model.hit(f"there is no runtime {name!r}", "runtime", right=right)


# Names whose use means that reading the code does not show what it defines.
_DYNAMIC = {"globals", "exec", "eval", "setattr", "__dict__"}
_FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)


def _has_execute(node: ast.ClassDef) -> bool:
    return "execute" in dict(_bindings(node))


def _bindings(node: ast.Module | ast.ClassDef) -> Iterator[tuple[str, ast.AST]]:
    """(name, what it stands for) of a module or a class; what functions bind inside themselves is not theirs."""
    waiting: deque[ast.AST] = deque(node.body)
    while waiting:
        each = waiting.popleft()
        if isinstance(each, (*_FUNCTIONS, ast.ClassDef)):
            yield each.name, each
        elif isinstance(each, (ast.Import, ast.ImportFrom)):
            yield from ((alias.asname or alias.name, each) for alias in each.names)
        elif isinstance(each, ast.Name) and isinstance(each.ctx, ast.Store):
            yield each.id, each
        else:
            waiting += ast.iter_child_nodes(each)


def _names(tree: ast.Module) -> Iterator[str]:
    """Every name that is used, and every attribute that is set."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Name):
            yield node.id
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            yield "setattr" if node.attr == "execute" else node.attr


def _code(model: Model) -> list[Path]:
    if model.backend != "python" or model.parameter("EXECUTION_ENV_PATH"):
        return []  # an environment of its own may have another Python
    paths = [model.model_file(folder) for folder in model.served.values()]
    return [path for path in paths if path.is_file() and 0 < path.stat().st_size <= _MAX_CODE_BYTES]


def _parsed(path: Path) -> ast.Module:
    """The syntax tree; nothing is run."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return ast.parse(path.read_bytes(), str(path))


def _compiled(path: Path) -> None:
    """Compile, which finds what the grammar alone lets pass; nothing is run."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        compile(path.read_bytes(), str(path), "exec", dont_inherit=True)
