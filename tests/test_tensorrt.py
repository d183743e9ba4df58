"""TensorRT plans without a GPU: what is refused and why, what is read back, and the real parser and Polygraphy on a CPU."""

from __future__ import annotations

import ast
import ctypes
import importlib.util
import json
import os
import subprocess
import sys
import types
from pathlib import Path

import pytest

from clip_deploy import releases
from clip_deploy.artifacts import BuiltPlan
from clip_deploy.cli import main
from clip_deploy.engines import BACKENDS
from clip_deploy.engines.tensorrt import PLAN, building, container, device, plan_folder
from clip_deploy.engines.tensorrt.building import BuildOptions, Made, keep
from clip_deploy.engines.tensorrt.reading import Layers, PlanFacts, require
from clip_deploy.errors import ConfigError, EngineError, MissingDependency
from clip_deploy.progress import silent
from clip_deploy.repository import assemble, render
from clip_deploy.spec import BatchProfile, Precision, ServingSpec, Tower
from tests.factories import built, exported, plan_bytes, planned
from tests.lint_examples import GRAPHS, tower_graph

HERE = Path(__file__).parent
ENGINES = HERE.parent / "clip_deploy" / "engines"


# --- what is asked ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "text", ["8", "1:8", "1:8:", "a:b:c", "2:4:8", "0:1:2", "1:9:8", "1:8:32:64"]
)
def test_a_profile_that_is_none_is_refused(text: str):
    with pytest.raises(ConfigError) as caught:
        BatchProfile.parse(text)
    assert "1:8:32" in caught.value.remedy or "begin at 1" in caught.value.remedy


def test_a_profile_has_the_largest_batch_that_was_checked(tmp_path: Path):
    model = exported(tmp_path, max_batch=16)
    assert str(BuildOptions().profile_for(model)) == "1:4:16"
    assert str(BuildOptions(BatchProfile(1, 2, 8)).profile_for(model)) == "1:2:8"
    with pytest.raises(ConfigError, match="checked up to 16"):
        BuildOptions(BatchProfile(1, 8, 32)).profile_for(model)


def test_options_that_nobody_has_are_refused():
    with pytest.raises(ConfigError, match="turing"):
        BuildOptions(hardware="turing+")
    with pytest.raises(ConfigError, match=r"99\.01"):
        BuildOptions(release="99.01")


# --- the machine and the release -------------------------------------------------------------------------------------


def test_a_machine_without_a_driver_is_told_before_anything_heavy_is_imported(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    def no_library(name: str) -> None:
        raise OSError(name)

    monkeypatch.setattr(ctypes, "CDLL", no_library)
    for name in ("tensorrt", "polygraphy", "onnx"):
        monkeypatch.setitem(sys.modules, name, None)
    exported(tmp_path)
    assert main(["build-trt", str(tmp_path)]) == 3
    err = capsys.readouterr().err
    assert "no NVIDIA driver" in err
    assert "--check" in err


@pytest.mark.parametrize(
    ("present", "version", "complaint"),
    [
        (set(), (0,), "tensorrt is not installed"),
        ({"tensorrt"}, (10, 16), "polygraphy is not installed"),
        ({"tensorrt", "polygraphy"}, (10, 4, 0), "TensorRT 10.4.0 is too old"),
    ],
)
def test_what_a_gpu_machine_lacks_is_named(
    monkeypatch, present: set, version: tuple, complaint: str
):
    monkeypatch.setattr(building, "device", lambda: {"gpu": "H200"})
    find = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util,
        "find_spec",
        lambda name: (
            (object() if name in present else None)
            if name in ("tensorrt", "polygraphy")
            else find(name)
        ),
    )
    monkeypatch.setattr(building, "installed_version", lambda: version)
    with pytest.raises(MissingDependency, match=complaint):
        building.require_machine()


class _Cuda:
    """NVIDIA's driver library, as far as it is asked."""

    def __init__(self, count: int = 1, initialised: int = 0) -> None:
        self.count, self.initialised = count, initialised

    def cuInit(self, flags):
        return self.initialised

    def cuDeviceGetCount(self, out):
        out._obj.value = self.count
        return 0

    def cuDeviceGet(self, out, index):
        return 0

    def cuDeviceGetName(self, buffer, size, handle):
        buffer.value = b"NVIDIA H200"

    def cuDriverGetVersion(self, out):
        out._obj.value = 12080

    def cuDeviceGetAttribute(self, out, which, handle):
        out._obj.value = {75: 9, 76: 0}[which]


def test_the_gpu_is_asked_of_the_driver_itself(monkeypatch):
    monkeypatch.setattr(device, "_driver", lambda: "570.86")
    monkeypatch.setattr(ctypes, "CDLL", lambda name: _Cuda())
    assert device.device() == {
        "gpu": "NVIDIA H200",
        "compute_capability": "9.0",
        "driver_cuda": "12.8",
        "driver": "570.86",
    }
    for cuda in (_Cuda(count=0), _Cuda(initialised=100)):
        monkeypatch.setattr(ctypes, "CDLL", lambda name, cuda=cuda: cuda)
        assert device.device() is None


def test_a_release_with_another_tensorrt_is_refused_with_the_one_that_fits():
    known = [each for each in releases.releases().values() if each.tensorrt]
    for each in known:
        version = tuple(int(part) for part in each.tensorrt.split(".")[:3])
        building.require_release(each.name, version)
    oldest, newest = known[0], known[-1]
    version = tuple(int(part) for part in newest.tensorrt.split(".")[:3])
    with pytest.raises(EngineError) as caught:
        building.require_release(oldest.name, version)
    fitting = [each.name for each in releases.with_tensorrt(version)]
    assert newest.name in fitting
    assert f"fits {', '.join(fitting)}" in str(caught.value)
    building.require_release(newest.name, (10, 12, 0), moves_on=True)
    with pytest.raises(EngineError):
        building.require_release(oldest.name, version, moves_on=True)
    assert f"--in-container --triton-release {oldest.name}" in caught.value.remedy


def test_a_release_whose_tensorrt_is_unknown_is_held_between_its_neighbours():
    rows = list(releases.releases().values())
    unknown = next(
        (row for row in rows[1:-1] if row.tensorrt is None and row.tensorrt_bounds()), None
    )
    if unknown is None:
        pytest.skip("every release between two known ones is known")
    least, most = unknown.tensorrt_bounds()
    told: list[str] = []
    building.require_release(unknown.name, least, warn=told.append)
    assert least == most or "not known for certain" in told[0]
    building.require_release(unknown.name, most)
    with pytest.raises(EngineError):
        building.require_release(unknown.name, (1, 0, 0))
    building.require_release(None, (1, 0, 0))


# --- what is read back -----------------------------------------------------------------------------------------------


def _layer(name: str, *types: str) -> dict:
    return {"Name": name, "Outputs": [{"Name": "t", "Format/Datatype": t} for t in types]}


@pytest.mark.parametrize(
    ("layers", "share"),
    [
        ({"Layers": [_layer("a", "Half"), _layer("b", "Row major linear FP16 format")]}, 1.0),
        ({"Layers": [_layer("a", "Float"), _layer("b", "Half"), _layer("ids", "Int32")]}, 0.5),
        ({"Layers": [_layer("a", "Float"), _layer("b", "Row major linear FP32")]}, 0.0),
        ({"Layers": ["names only", "no types"], "Bindings": ["x"]}, None),
        ({}, None),
    ],
)
def test_the_half_share_of_an_inspectors_layers(layers: dict, share: float | None):
    assert Layers.read(json.dumps(layers)).half_share == share


def _facts(model, shape: BatchProfile, layers: Layers | None = None, **changes) -> PlanFacts:
    contract = model.contract
    values = {
        "tensors": {
            t.name: (side, t.dtype, (-1, *t.shape))
            for side, t in (("input", contract.input), ("output", contract.output))
        },
        "profile": {
            contract.input.name: tuple(
                (size, *contract.input.shape) for size in (shape.least, shape.best, shape.most)
            )
        },
        "layers": Layers(100, 90) if layers is None else layers,
    }
    return PlanFacts(**(values | changes))


def test_a_plan_that_is_not_what_was_asked_is_refused(tmp_path: Path):
    half = exported(tmp_path, graph=b"x" * 1000, precision=Precision.FP16)
    profile = BatchProfile(1, 8, 32)
    size = half.graph.size_bytes
    fused, fallen, one_cast = Layers(3, 0), Layers(100, 0), Layers(400, 1)
    require(_facts(half, profile), half, profile, size)
    require(_facts(half, profile, fused), half, profile, size)  # the size tells
    require(_facts(half, profile, tensors=None, profile=None), half, profile, size)
    for facts, bytes_, complaint in (
        (_facts(half, profile, fallen), size, "0 of 100 layers"),
        (_facts(half, profile, one_cast), size, "1 of 400 layers"),
        (_facts(half, profile, fused), 2 * size, "0 of 3 layers"),
        (_facts(half, profile, Layers()), 2 * size, "0 of 0 layers"),
        (_facts(half, BatchProfile(1, 8, 16)), size, "its profile is"),
        (_facts(half, profile, tensors={}), size, "its tensors are"),
    ):
        with pytest.raises(EngineError, match=complaint):
            require(facts, half, profile, bytes_)


def test_fp32_plans_need_no_half(tmp_path: Path):
    model, profile = exported(tmp_path), BatchProfile(1, 8, 32)
    fallen = _facts(model, profile, Layers(100, 0))
    require(fallen, model, profile, 10**9)
    half = exported(tmp_path / "half", precision=Precision.FP16)
    with pytest.raises(EngineError, match="FP16 was asked for"):
        require(fallen, half, profile, 10**9)


def _builder(data: bytes, fail: Exception | None = None, cache: bytes | None = None):
    def run(model, profile, options, folder):
        (folder / PLAN).write_bytes(data)
        if cache is not None:
            before = folder / building.TIMING
            before.write_bytes((before.read_bytes() if before.is_file() else b"") + cache)
        if fail:
            raise fail
        gpu = {"gpu": "NVIDIA H200", "compute_capability": "9.0"}
        return Made(_facts(model, profile), gpu)

    return run


def test_a_plan_is_kept_with_its_provenance_and_rendered(tmp_path: Path):
    model = exported(tmp_path / "build")
    cache = tmp_path / "timing.cache"
    cache.write_bytes(b"\0kernels")
    options = BuildOptions(BatchProfile(1, 4, 16), timing_cache=cache, hardware="ampere+")
    builder = _builder(plan_bytes(10, 16, 1, 11), cache=b" and more")
    plan = keep(model, options, builder, silent)
    assert cache.read_bytes() == b"\0kernels and more"
    assert sorted(path.name for path in plan_folder(model).iterdir()) == ["engine.json", PLAN]
    assert plan == BuiltPlan.read(plan_folder(model))
    assert plan.provenance["tensorrt"] == "TensorRT 10.16.1.11"
    assert plan.provenance["graph_sha256"] == model.graph.sha256
    assert plan.provenance["hardware_compatibility"] == "ampere+"
    assert len(plan.provenance["timing_cache_sha256"]) == 64
    assemble(BACKENDS["tensorrt"].build(model), ServingSpec(), tmp_path / "models")
    folder = tmp_path / "models" / model.name
    config = (folder / "config.pbtxt").read_text()
    assert 'backend: "tensorrt"' in config
    assert "max_batch_size: 16" in config
    assert "KIND_GPU" in config
    assert plan.sha256 in config
    assert sorted(path.name for path in (folder / "1").iterdir()) == [
        *("engine.json", "manifest.json", "model.plan", "reference.npz")
    ]


@pytest.mark.parametrize(
    "builder",
    [
        _builder(plan_bytes(1, 7, 1, 116, product=b"vtrt")),
        _builder(b"not a plan at all, but long enough"),
        _builder(plan_bytes(10, 16, 1, 11), fail=EngineError("it broke", remedy="mend it")),
    ],
    ids=["TensorRT for RTX", "rubbish", "a failure"],
)
def test_a_build_that_fails_leaves_the_former_plan(tmp_path: Path, builder):
    model = planned(exported(tmp_path))
    before = (plan_folder(model) / PLAN).read_bytes()
    with pytest.raises(EngineError):
        keep(model, BuildOptions(), builder, silent)
    assert (plan_folder(model) / PLAN).read_bytes() == before
    assert [path.name for path in model.directory.iterdir() if path.name.startswith(".")] == []


def test_a_failed_build_leaves_the_timing_cache(tmp_path: Path):
    cache = tmp_path / "timing.cache"
    cache.write_bytes(b"\0kernels")
    broken = _builder(plan_bytes(10, 16, 1, 11), fail=EngineError("a", remedy="b"), cache=b"x")
    with pytest.raises(EngineError):
        keep(exported(tmp_path), BuildOptions(timing_cache=cache), broken, silent)
    assert cache.read_bytes() == b"\0kernels"


@pytest.mark.parametrize("kind", ["a folder", "a missing folder", "a text"])
def test_a_timing_cache_that_cannot_be_one_is_refused(tmp_path: Path, kind: str):
    path = tmp_path / "cache"
    if kind == "a folder":
        path.mkdir()
    elif kind == "a missing folder":
        path = tmp_path / "nowhere" / "cache"
    else:
        path.write_text("shopping list\n")
    with pytest.raises(ConfigError, match="timing cache"):
        BuildOptions(timing_cache=path)


def test_a_plan_of_another_version_than_the_release_is_not_kept(tmp_path: Path):
    """Whoever built it: the plan's own header decides."""
    model, options = exported(tmp_path), BuildOptions(release="26.05")
    with pytest.raises(EngineError, match=r"carries TensorRT .* and 10\.4\.0 builds here"):
        keep(model, options, _builder(plan_bytes(10, 4, 0, 1)), silent)
    assert not plan_folder(model).exists()


def test_a_damaged_export_is_not_built(tmp_path: Path):
    model = exported(tmp_path)
    (model.directory / "model.onnx").write_bytes(b"something else")
    with pytest.raises(ConfigError, match=r"is damaged: model\.onnx"):
        keep(model, BuildOptions(), _builder(plan_bytes(10, 16, 1, 11)), silent)


@pytest.mark.parametrize(
    "damage", ["no plan", "another graph", "another plan", "no manifest", "rubbish", "other kinds"]
)
def test_a_plan_that_is_not_the_exports_is_not_rendered(tmp_path: Path, damage: str):
    model = exported(tmp_path)
    if damage != "no plan":
        planned(model)
    folder = plan_folder(model)
    if damage == "another graph":
        text = (folder / "engine.json").read_text().replace(model.graph.sha256, "0" * 64)
        (folder / "engine.json").write_text(text)
    elif damage == "another plan":
        (folder / PLAN).write_bytes(plan_bytes(11, 0, 0, 1))
    elif damage == "no manifest":
        (folder / "engine.json").unlink()
    elif damage == "rubbish":
        (folder / "engine.json").write_text("[" * 5000)
    elif damage == "other kinds":
        whole = json.loads((folder / "engine.json").read_text())
        for field in ("profile", "sha256", "provenance", "size_bytes", "file", "half_share"):
            (folder / "engine.json").write_text(json.dumps(whole | {field: [5]}))
            with pytest.raises(ConfigError, match="is damaged"):
                BuiltPlan.read(folder)
        (folder / "engine.json").write_text(json.dumps(whole | {"file": "../../x"}))
    with pytest.raises(ConfigError) as caught:
        BACKENDS["tensorrt"].build(model)
    assert "build-trt" in caught.value.remedy


def test_the_profile_bounds_what_is_served(tmp_path: Path):
    build = BACKENDS["tensorrt"].build(planned(exported(tmp_path), "1:4:8"))
    assert "max_batch_size: 8" in render(build, ServingSpec())
    with pytest.raises(ConfigError, match="checked up to 8"):
        render(build, ServingSpec(max_batch=16))
    with pytest.raises(ConfigError, match="does not run as instance kind cpu"):
        render(build, ServingSpec(kind="cpu"))


def test_cuda_graphs_are_for_tensorrt_and_off_by_default(tmp_path: Path):
    build = built("tensorrt", exported(tmp_path / "a"))
    assert "graphs" not in render(build, ServingSpec())
    assert "cuda { graphs: true }" in render(build, ServingSpec(cuda_graphs=True))
    with pytest.raises(ConfigError, match="CUDA graphs with backend python"):
        render(built("python", exported(tmp_path / "b")), ServingSpec(cuda_graphs=True))


# --- inside the serving image ----------------------------------------------------------------------------------------


def test_trtexec_is_told_to_be_strongly_typed_where_that_is_a_flag(tmp_path: Path):
    model, profile = exported(tmp_path), BatchProfile(1, 8, 32)
    ten = container.trtexec_command(model, profile, BuildOptions(release="26.05"))
    eleven = container.trtexec_command(model, profile, BuildOptions(release="26.06"))
    assert "--stronglyTyped" in ten
    assert "--stronglyTyped" not in eleven
    for command in (ten, eleven):
        assert "--minShapes=pixel_values:1x3x224x224" in command
        assert "--maxShapes=pixel_values:32x3x224x224" in command
        assert not any("fp16" in part.lower() or "workspace" in part for part in command)


def test_the_container_sees_the_export_read_only_and_no_network(tmp_path: Path):
    model = exported(tmp_path)
    options = BuildOptions(release="26.05", timing_cache=tmp_path / "t", hardware="same-cc")
    command = container.docker_command(model, BatchProfile(1, 8, 32), options, tmp_path / "plan")
    assert f"--volume={model.directory}:/export:ro" in command
    assert "--network=none" in command
    assert "nvcr.io/nvidia/tritonserver:26.05-py3" in command
    assert "--timingCacheFile=/plan/timing.cache" in command
    assert len([part for part in command if part.startswith("--volume")]) == 2
    assert "--hardwareCompatibilityLevel=sameComputeCapability" in command


def test_a_container_needs_a_release_and_docker(tmp_path: Path, capsys, monkeypatch):
    exported(tmp_path)
    assert main(["build-trt", str(tmp_path), "--in-container"]) == 2
    assert "--triton-release" in capsys.readouterr().err
    monkeypatch.setattr("shutil.which", lambda name: None)
    arguments = ["build-trt", str(tmp_path), "--in-container", "--triton-release", "26.05"]
    assert main(arguments) == 3
    assert "no docker command" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("code", "output", "kind", "told"),
    [
        (1, b"[I] parsing\n[E] Error[4]: unsupported\n", EngineError, "Error[4]: unsupported"),
        (1, b"\xff\xfe", EngineError, "ended with code 1"),
        (125, b"docker: no device driver\nRun docker --help\n", MissingDependency, "no device driver"),
        (0, b"", EngineError, "no description of its layers"),
    ],
)  # fmt: skip
def test_failures_of_docker_and_trtexec_are_told(
    tmp_path: Path, monkeypatch, code: int, output: bytes, kind: type, told: str
):
    model = exported(tmp_path)
    done = subprocess.CompletedProcess([], code, output, b"")
    monkeypatch.setattr(subprocess, "run", lambda *a, **k: done)
    monkeypatch.setattr("shutil.which", lambda name: "/usr/bin/docker")
    with pytest.raises(kind) as caught:
        container.build(model, BuildOptions(release="26.05"))
    assert told in str(caught.value)
    assert ".tmp" not in caught.value.remedy
    assert not plan_folder(model).exists()


@pytest.mark.parametrize(
    ("version", "layers", "right"),
    [
        ((10, 16, 1, 11), '{"Layers": []}', True),
        ((10, 4, 0, 1), '{"Layers": []}', False),
        ((10, 16, 1, 11), "{", False),
    ],
)
def test_what_a_container_built_is_read_back(
    tmp_path: Path, monkeypatch, version: tuple, layers: str, right: bool
):
    """By the plan's header and the description of its layers; docker is made up."""
    model = exported(tmp_path)

    def docker(command, **kwargs):
        folder = next(p for p in command if p.endswith(":/plan")).split("=", 1)[1][: -len(":/plan")]
        (Path(folder) / PLAN).write_bytes(plan_bytes(*version))
        (Path(folder) / "layers.json").write_text(layers)
        return subprocess.CompletedProcess(command, 0, b"", b"")

    monkeypatch.setattr(container, "device", lambda: None)
    monkeypatch.setattr(subprocess, "run", docker)
    monkeypatch.setattr("shutil.which", lambda name: "/usr/bin/docker")
    if not right:
        with pytest.raises(EngineError):
            container.build(model, BuildOptions(release="26.05"))
        return
    plan = container.build(model, BuildOptions(release="26.05"))
    assert plan.provenance["container"] == "nvcr.io/nvidia/tritonserver:26.05-py3"
    assert plan.provenance["read_back"] == "header and layers"


def test_a_release_before_strong_typing_is_refused(tmp_path: Path, monkeypatch):
    monkeypatch.setattr("shutil.which", lambda name: "/usr/bin/docker")
    with pytest.raises(ConfigError, match="TensorRT 8"):
        container.build(exported(tmp_path), BuildOptions(release="24.02"))


# --- TensorRT 10 and 11 ----------------------------------------------------------------------------------------------

# What TensorRT 11 no longer has, and what 10 calls deprecated: names that no line of ours may touch.
REMOVED = {
    *("FP16", "BF16", "INT8", "FP8", "OBEY_PRECISION_CONSTRAINTS", "PREFER_PRECISION_CONSTRAINTS"),
    *("precision", "set_output_type", "supports_model", "max_workspace_size", "int8_calibrator"),
    *("platform_has_fast_fp16", "EXPLICIT_BATCH", "algorithm_selector", "num_bindings"),
    *("get_binding_shape", "get_profile_shape", "build_engine", "max_batch_size"),
}


# Our names for TensorRT's objects.
_THEIRS = {
    *("trt", "engine", "builder", "network", "config", "parser", "runtime", "inspector", "shapes"),
    *("logger", "error"),
}


def test_nothing_that_tensorrt_11_lacks_is_touched():
    for path in (ENGINES / "tensorrt").glob("*.py"):
        tree = ast.parse(path.read_text("utf-8"))
        used = {
            node.attr
            for node in ast.walk(tree)
            if isinstance(node, ast.Attribute) and isinstance(node.value, (ast.Name, ast.Attribute))
            and ast.unparse(node.value).split(".")[0] in _THEIRS
        }  # fmt: skip
        used |= {
            keyword.arg
            for node in ast.walk(tree)
            if isinstance(node, ast.Call) and ast.unparse(node.func) == "CreateConfig"
            for keyword in node.keywords
        }
        assert not used & (REMOVED | {"fp16", "int8", "bf16"}), path


class _Runtime:
    """Refuses a version-compatible plan, which carries code, unless that is allowed."""

    def __init__(self, engine) -> None:
        self.engine, self.engine_host_code_allowed = engine, False

    def deserialize_cuda_engine(self, data: bytes):
        refused = not data or (data.startswith(b"lean") and not self.engine_host_code_allowed)
        return None if refused else self.engine


def _fake_trt(version: str, share: str):
    """The part of the tensorrt module that reading back touches; anything else is an AttributeError."""
    names = ("pixel_values", "image_embeds")
    shapes = {"pixel_values": (-1, 3, 224, 224), "image_embeds": (-1, 512)}
    modes = types.SimpleNamespace(INPUT="in", OUTPUT="out")
    engine = types.SimpleNamespace(
        num_io_tensors=2,
        get_tensor_name=lambda i: names[i],
        get_tensor_mode=lambda n: "in" if n == names[0] else "out",
        get_tensor_dtype=lambda n: types.SimpleNamespace(name="FLOAT"),
        get_tensor_shape=lambda n: shapes[n],
        get_tensor_profile_shape=lambda n, i: [(s, 3, 224, 224) for s in (1, 8, 32)],
        create_engine_inspector=lambda: types.SimpleNamespace(
            get_engine_information=lambda f: json.dumps({"Layers": [_layer("a", share)]})
        ),
    )
    logger = types.SimpleNamespace(ERROR=1)
    module = types.SimpleNamespace(
        __version__=version,
        Logger=type("Logger", (), {"ERROR": 1, "__init__": lambda self, level: None}),
        Runtime=lambda logger: _Runtime(engine),
        TensorIOMode=modes,
        LayerInformationFormat=types.SimpleNamespace(JSON=logger),
    )
    return module


@pytest.mark.parametrize("version", ["10.12.0", "11.4.1"])
def test_a_plan_is_read_back_on_either_version(tmp_path: Path, version: str):
    facts = building.read_back(_fake_trt(version, "Half"), b"plan")
    model, profile = exported(tmp_path), BatchProfile(1, 8, 32)
    require(facts, model, profile, 100)
    assert facts.layers.half_share == 1.0
    with pytest.raises(EngineError, match="does not load the plan"):
        building.read_back(_fake_trt(version, "Half"), b"")
    with pytest.raises(EngineError, match="does not load the plan"):
        building.read_back(_fake_trt(version, "Half"), b"lean")
    building.read_back(_fake_trt(version, "Half"), b"lean", host_code=True)


# --- the real parser and Polygraphy, on a CPU ------------------------------------------------------------------------

_HAS_RTX = importlib.util.find_spec("tensorrt_rtx") is not None
rtx = pytest.mark.skipif(not _HAS_RTX, reason="needs pip install 'clip-deploy[trt-check]'")


@rtx
def test_a_good_graph_passes_the_check(tmp_path: Path, capsys):
    pytest.importorskip("onnx")
    for tower in Tower:
        exported(tmp_path / "build", tower, graph=tower_graph(tower))
    arguments = [
        "build-trt",
        str(tmp_path / "build"),
        "--check",
        "--json",
        str(tmp_path / "c.json"),
    ]
    assert main(arguments) == 0
    assert "parses and builds, strongly typed" in capsys.readouterr().out.replace("\n", " ")
    rows = json.loads((tmp_path / "c.json").read_text())
    assert [row["complaints"] for row in rows] == [[], []]


@rtx
def test_the_check_looks_at_what_was_exported(tmp_path: Path, capsys):
    pytest.importorskip("onnx")
    model = exported(tmp_path, graph=tower_graph(Tower.IMAGE))
    assert main(["build-trt", str(tmp_path), "--check", "--batch", "1:8:512"]) == 2
    for option in (["--in-container"], ["--triton-release", "26.05"], ["--version-compatible"]):
        assert main(["build-trt", str(tmp_path), "--check", *option]) == 2
    (model.directory / "model.onnx").write_bytes(tower_graph(Tower.TEXT))
    assert main(["build-trt", str(tmp_path), "--check"]) == 2
    assert "is damaged" in capsys.readouterr().err


@rtx
@pytest.mark.parametrize(
    ("body", "names"),
    [
        ("a = Mystery(x) y = Identity(a)", "Mystery"),
        ("h = Cast<to = 10>(x) y = Add(h, x)", "Add"),
    ],
    ids=["an unknown operator", "mixed types"],
)
def test_a_graph_that_tensorrt_refuses_is_named(tmp_path: Path, capsys, body: str, names: str):
    onnx = pytest.importorskip("onnx")
    text = f"""<ir_version: 8, opset_import: ["": 18]>
    clip (float[batch, 3, 224, 224] x) => (float[batch, 3, 224, 224] y) {{ {body} }}"""
    graph = onnx.parser.parse_model(text)
    graph.graph.input[0].name = graph.graph.node[0].input[0] = "pixel_values"
    for node in graph.graph.node:
        node.name = f"the {node.op_type}"
        node.input[:] = ["pixel_values" if name == "x" else name for name in node.input]
    exported(tmp_path, graph=graph.SerializeToString())
    assert main(["build-trt", str(tmp_path), "--check"]) == 5
    err = capsys.readouterr().err
    assert names in err
    assert "Traceback" not in err


@rtx
@pytest.mark.processes
def test_polygraphy_builds_strongly_typed_what_is_asked(tmp_path: Path):
    """The call that builds on a GPU, against the one TensorRT that runs without: Polygraphy can use it instead."""
    pytest.importorskip("polygraphy")
    pytest.importorskip("onnx")
    model = exported(tmp_path, graph=tower_graph(Tower.IMAGE))
    code = f"""
import tensorrt_rtx as trt
from pathlib import Path
from clip_deploy.artifacts import ExportedModel
from clip_deploy.engines.tensorrt.building import BuildOptions, plan_bytes
model = ExportedModel.read(Path({str(model.directory)!r}))
options = BuildOptions(timing_cache=Path({str(tmp_path / "timing")!r}))
data = plan_bytes(trt, model, options.profile_for(model), options, options.timing_cache)
Path({str(tmp_path / "out.plan")!r}).write_bytes(data)
"""
    environment = os.environ | {"POLYGRAPHY_USE_TENSORRT_RTX": "1"}
    done = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout == ""
    assert (tmp_path / "out.plan").read_bytes().startswith(b"vtrt")
    assert main(["inspect", str(tmp_path / "out.plan")]) == 0


@pytest.mark.processes
def test_polygraphys_comparison_tells_rows_apart():
    """What the GPU tests compare with, on made-up rows: it must be able to fail.

    In a process of its own, since torch does not import after Polygraphy has looked for it.
    """
    pytest.importorskip("polygraphy")
    code = """
import numpy as np
from tests.factories import unit
from tests.test_gpu import rows_alike
rows = unit(np.random.default_rng(0).standard_normal((4, 16)))
assert rows_alike(rows, rows, 0.9995)
assert not rows_alike(rows[::-1], rows, 0.9995)
"""
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, cwd=HERE.parent, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


# --- inspect ---------------------------------------------------------------------------------------------------------


def test_inspect_tells_what_a_plan_is(tmp_path: Path, capsys):
    plan = plan_folder(planned(exported(tmp_path))) / PLAN
    assert main(["inspect", str(plan), "--json", "-"]) == 0
    facts = json.loads(capsys.readouterr().out)
    assert facts["kind"] == "TensorRT plan"
    assert facts["built by"] == "TensorRT 10.16.1.11"
    assert facts["profile"] == "1:8:32"
    assert facts["size_bytes"] == plan.stat().st_size


def test_inspect_tells_what_a_graph_is(tmp_path: Path, capsys):
    pytest.importorskip("onnx")
    graph = tmp_path / "model.onnx"
    graph.write_bytes(GRAPHS["graph"].model().SerializeToString())
    assert main(["inspect", str(graph), "--json", "-"]) == 0
    facts = json.loads(capsys.readouterr().out)
    assert facts["inputs"] == ["pixel_values FP32 [-1, 3, 8, 8]"]
    assert facts["outputs"] == ["image_embeds FP32 [-1, 4]"]
    assert (facts["opset"], facts["ir_version"], facts["parameters"]) == (17, 8, 768)
    assert facts["weights by type"]["FP32"] == 768


@pytest.mark.parametrize("manifest", ["[]", "null", '{"schema": 1}', "[" * 9999])
def test_inspect_tells_that_a_manifest_is_damaged(tmp_path: Path, capsys, manifest: str):
    plan = plan_folder(planned(exported(tmp_path))) / PLAN
    (plan.parent / "engine.json").write_text(manifest)
    assert main(["inspect", str(plan), "--json", "-"]) == 0
    facts = json.loads(capsys.readouterr().out)
    assert "damaged" in facts["manifest"]
    assert facts["size_bytes"] == plan.stat().st_size


def test_inspect_refuses_a_name_that_no_file_can_have(capsys):
    assert main(["inspect", "x" * 300]) == 2
    assert "Traceback" not in capsys.readouterr().err


@pytest.mark.parametrize("content", [None, b"", b"hello", b"ftrt"])
def test_inspect_refuses_what_is_neither(tmp_path: Path, capsys, content: bytes | None):
    pytest.importorskip("onnx")
    path = tmp_path / "model.plan"
    if content is not None:
        path.write_bytes(content)
    assert main(["inspect", str(path)]) == 2
    assert "Traceback" not in capsys.readouterr().err
