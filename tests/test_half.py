"""FP16 graphs: what stays in FP32, what a rehearsal sees that ONNX Runtime's CPU hides, and exports end to end."""

from __future__ import annotations

import importlib.util
import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from clip_deploy.artifacts import exported_models
from clip_deploy.cli import main
from clip_deploy.errors import ConfigError, ExportError
from clip_deploy.resources import photographs_dir
from clip_deploy.spec import EncoderSpec, Precision, Tower
from tests.conftest import HERE, SHARED
from tests.factories import unit

pytestmark = pytest.mark.export

TRAINED = SHARED / "fixtures" / "tiny-clip"
ROWS = np.linspace(-2, 2, 24, dtype=np.float32).reshape(3, 8)


def _write(folder: Path, body: str, *weights: tuple[str, np.ndarray]) -> Path:
    """A graph from ``x`` float[batch, 8] to ``y``, with its weights outside, as torch's exporter leaves it."""
    import onnx
    from onnx import numpy_helper, parser

    from clip_deploy.export import graph, half

    model = parser.parse_model(
        f'<ir_version: 8, opset_import: ["": 18]> g (float[batch, 8] x) => (float[batch, 8] y) {{ {body} }}'
    )
    for number, node in enumerate(model.graph.node):
        node.name = f"{node.op_type} {number}"
    for name, values in weights:
        model.graph.initializer.append(numpy_helper.from_array(values.astype(np.float32), name))
    onnx.checker.check_model(model)
    half._save(model, folder / graph.FILE)
    return folder / graph.FILE


def _run(path: Path, rows: np.ndarray) -> np.ndarray:
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.log_severity_level = 3
    session = onnxruntime.InferenceSession(
        str(path), options, disabled_optimizers=["NchwcTransformer"]
    )
    return session.run(None, {session.get_inputs()[0].name: rows})[0]


def _rehearse(path: Path, rows: np.ndarray) -> np.ndarray:
    from clip_deploy.export import half

    rehearsal = half.rehearsal(path)
    try:
        return _run(rehearsal, rows)
    finally:
        half.forget_rehearsal(rehearsal)


def test_a_rehearsal_overflows_where_onnx_runtimes_cpu_does_not(tmp_path: Path, monkeypatch):
    """The reason for rehearsals: on a CPU, an FP16 graph whose values pass 65504 gives right answers."""
    from clip_deploy.export import half

    monkeypatch.setattr(half, "NEAR_THE_LIMIT", float("inf"))
    big, small = np.eye(8) * 400, np.eye(8) / 400
    path = _write(tmp_path, "a = MatMul(x, w) b = MatMul(a, w) c = MatMul(b, v) y = MatMul(c, v)",
                  ("w", big), ("v", small))  # fmt: skip
    half.convert(tmp_path, "x", [ROWS])
    assert np.isfinite(_run(path, ROWS)).all()
    assert not np.isfinite(_rehearse(path, ROWS)).all()


def test_a_rehearsal_rounds_as_numpys_half_precision_does(tmp_path: Path):
    from clip_deploy.export import half

    path = _write(tmp_path, "a = Mul(x, w) b = Add(a, v) y = Mul(b, b)",
                  ("w", np.linspace(0.1, 3, 8)), ("v", np.linspace(1, 2, 8)))  # fmt: skip
    half.convert(tmp_path, "x", [ROWS])
    w, v = (
        np.linspace(*ends, 8, dtype=np.float32).astype(np.float16) for ends in ((0.1, 3), (1, 2))
    )
    expected = ROWS.astype(np.float16) * w + v
    expected = (expected * expected).astype(np.float32)
    assert np.array_equal(_rehearse(path, ROWS), expected)
    assert not np.array_equal(expected, (ROWS * w.astype(np.float32) + v.astype(np.float32)) ** 2)


def test_nodes_near_the_limit_stay_in_fp32(tmp_path: Path):
    from clip_deploy.export import half

    path = _write(tmp_path, "a = MatMul(x, w) b = MatMul(a, v) y = MatMul(b, w)",
                  ("w", np.eye(8) * 20000), ("v", np.eye(8) / 20000))  # fmt: skip
    done = half.convert(tmp_path, "x", [ROWS])
    assert list(done.kept) == ["MatMul 0", "MatMul 1", "MatMul 2"]
    assert "reach 4e+04" in done.kept["MatMul 0"]
    assert np.allclose(_rehearse(path, ROWS), ROWS * 20000, rtol=1e-6)


def test_sums_that_may_leave_the_range_stay_in_fp32(tmp_path: Path):
    """Products of 5000 that cancel out: the result is small, and a GPU that sums in FP16 passes infinity on its way."""
    from clip_deploy.export import half

    signs = np.where(np.arange(8) % 2, 1.0, -1.0)
    weights = np.repeat((signs * 5000)[:, None], 8, axis=1)
    _write(tmp_path, "a = MatMul(x, w) y = Identity(a)", ("w", weights))
    rows = np.full((3, 8), 1.8, np.float32)
    assert half.convert(tmp_path, "x", [rows]).kept == {
        "MatMul 0": "its partial sums may reach 7.2e+04, and FP16 ends at 65504"
    }


def test_inputs_beyond_the_range_keep_what_reads_them_in_fp32(tmp_path: Path):
    from clip_deploy.export import half

    path = _write(tmp_path, "a = Div(x, w) y = Identity(a)", ("w", np.full(8, 1e5)))
    assert "Div 0" in half.convert(tmp_path, "x", [ROWS * 1e5]).kept
    assert np.allclose(_rehearse(path, ROWS * 1e5), ROWS, rtol=1e-3)


def test_whole_numbers_become_fp32_and_not_whole_means(tmp_path: Path):
    from clip_deploy.export import half

    body = """i = Cast<to = 7>(x) k = Constant<value_int = 3000>() j = Add(i, k) f = Cast<to = 1>(j) axes = Constant<value_ints = [1]>()
    m = ReduceMean(f, axes) s = Softmax(f) y = Mul(s, m)"""
    path = _write(tmp_path, body)
    rows = np.arange(24, dtype=np.float32).reshape(3, 8)
    whole = _run(path, rows)
    half.convert(tmp_path, "x", [rows])
    assert np.allclose(_rehearse(path, rows), whole, rtol=2e-3)


def test_constants_of_every_form_are_converted_and_branches_are_refused(tmp_path: Path):
    from clip_deploy.export import half

    body = """k = Constant<value_float = 0.3>() v = Constant<value_floats = [1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0, 8.0]>()
    a = Mul(x, k) y = Add(a, v)"""
    path = _write(tmp_path, body)
    half.convert(tmp_path, "x", [ROWS])
    assert np.allclose(_rehearse(path, ROWS), ROWS * 0.3 + np.arange(1, 9), rtol=2e-3)
    branches = """c = Constant<value = bool {1}>()
    y = If (c) <then_branch = t () => (float[batch, 8] o) { o = Identity(x) },
                else_branch = e () => (float[batch, 8] q) { q = Neg(x) }>"""
    other = tmp_path / "other"
    other.mkdir()
    _write(other, branches)
    with pytest.raises(ExportError, match="has branches"):
        half.convert(other, "x", [ROWS])


def test_ranges_are_measured_on_all_inputs_given(tmp_path: Path):
    from clip_deploy.export import half

    body = "a = Mul(x, x) y = Sub(a, x)"
    for name, inputs, kept in (("quiet", [ROWS], 0), ("loud", [ROWS, ROWS * 100], 2)):
        folder = tmp_path / name
        folder.mkdir()
        _write(folder, body)
        assert len(half.convert(folder, "x", inputs).kept) == kept


def test_masks_of_minus_infinity_are_no_overflow(tmp_path: Path):
    from clip_deploy.export import half

    mask = np.zeros(8)
    mask[4:] = -np.inf
    path = _write(tmp_path, "a = Add(x, m) y = Softmax(a)", ("m", mask))
    done = half.convert(tmp_path, "x", [ROWS])
    assert list(done.kept.values()) == [half.KEPT_OPERATORS["Softmax"]]
    assert np.abs(_rehearse(path, ROWS)[:, 4:]).max() == 0


def test_neighbours_in_fp32_pass_their_values_on_unrounded(tmp_path: Path):
    """The converter alone rounds between them; a norm rounded to FP16 is no norm of 1."""
    from clip_deploy.export import half

    body = "a = MatMul(x, w) n = ReduceL2<axes = [1]>(a) y = Div(a, n)".replace(
        "ReduceL2<axes = [1]>(a)", "ReduceL2(a, axes)"
    )
    body = f"axes = Constant<value_ints = [1]>() {body}"
    path = _write(tmp_path, body, ("w", np.random.default_rng(0).standard_normal((8, 8))))
    done = half.convert(tmp_path, "x", [ROWS])
    assert set(done.kept.values()) == {"the final normalisation"}
    assert np.abs(np.linalg.norm(_rehearse(path, ROWS), axis=1) - 1).max() < 1e-6


def _half_spec(name: str, **changes) -> EncoderSpec:
    model = str(HERE / "models" / f"{name}.json")
    return replace(EncoderSpec(model, "random", precision=Precision.FP16, max_batch=8), **changes)


@pytest.mark.parametrize("name", ["tiny-clip", "tiny-sigmoid"])
def test_both_towers_export_in_fp16(tmp_path: Path, tiny_exports: dict[str, Path], name: str):
    import onnx
    from onnx import TensorProto

    from clip_deploy.export import export

    export(_half_spec(name), tmp_path)
    singles = {model.name: model for model in exported_models([tiny_exports[name]])}
    for model in exported_models([tmp_path]):
        assert model.contract.precision is Precision.FP16
        assert model.contract.input == singles[model.name].contract.input
        assert model.parity["min_cosine"] > 0.9999
        assert set(model.parity["ranks"].values()) == {1.0}
        assert 0 < model.conversion["largest_fp16_value"] < 8188
        graph = onnx.load(model.graph_files[0]).graph
        ids = model.contract.tower is Tower.TEXT
        wanted = TensorProto.INT32 if ids else TensorProto.FLOAT
        assert graph.input[0].type.tensor_type.elem_type == wanted
        assert graph.output[0].type.tensor_type.elem_type == TensorProto.FLOAT
        kept = model.conversion["kept_fp32"]
        for node in graph.node:
            if node.op_type in ("LayerNormalization", "Softmax"):
                assert node.name in kept
        assert model.graph.size_bytes < 0.55 * singles[model.name].graph.size_bytes


@pytest.mark.parametrize("name", ["tiny-resnet", "tiny-convnext"])
def test_convolutional_towers_export_in_fp16_and_parse(tmp_path: Path, name: str):
    """Miniatures of RN50 and of a ConvNeXt: convolutions, other norms, attention pooling."""
    from clip_deploy.export import export

    (model,) = export(_half_spec(name, towers=(Tower.IMAGE,)), tmp_path)
    assert model.parity["min_cosine"] > 0.9999
    if importlib.util.find_spec("tensorrt_rtx"):
        from clip_deploy.engines.tensorrt.checking import check

        assert check(model).complaints == ()


def _loud_checkpoint(folder: Path) -> Path:
    """Random weights whose MLPs work with values of 1e5 inside, and give what the quiet ones give."""
    import torch

    from tests.test_export import _torch_model

    state = _torch_model("tiny-clip").state_dict()
    for name in state:
        if "mlp.c_fc" in name:
            state[name] *= 1e5
        elif name.endswith("mlp.c_proj.weight"):
            state[name] /= 1e5
    torch.save(state, folder / "loud.pt")
    return folder / "loud.pt"


def test_a_model_whose_values_pass_the_limit_keeps_those_nodes_in_fp32(tmp_path: Path, monkeypatch):
    from clip_deploy.export import export, half

    spec = _half_spec("tiny-clip", pretrained=str(_loud_checkpoint(tmp_path)))
    for model in export(spec, tmp_path / "build"):
        reasons = [r for r in model.conversion["kept_fp32"].values() if "FP16 ends at" in r]
        assert reasons
    monkeypatch.setattr(half, "NEAR_THE_LIMIT", float("inf"))
    with pytest.raises(ExportError, match="does not agree with torch"):
        export(spec, tmp_path / "other")
    assert not list((tmp_path / "other").iterdir())


def test_searches_that_find_other_things_fail_the_export():
    from clip_deploy.export import parity

    expected = unit(np.random.default_rng(0).standard_normal((12, 16)))
    parity.check_ranks(expected, expected, None, Tower.IMAGE)
    with pytest.raises(ExportError, match="image→image"):
        parity.check_ranks(expected[::-1], expected, expected, Tower.IMAGE)


def test_calibration_images_are_for_fp16_alone(capsys: pytest.CaptureFixture[str]):
    with pytest.raises(ConfigError, match="calibration"):
        EncoderSpec("ViT-B-32", "random", calibration_images=Path("x"))
    assert main(["export", "ViT-B-32", "--precision", "half"]) == 2
    assert "precision 'half' is unknown" in capsys.readouterr().err


def test_calibration_images_of_ones_own_are_measured_too(tmp_path: Path, monkeypatch):
    from clip_deploy.export import export, half

    measured = []
    convert = half.convert

    def watch(folder, name, inputs):
        measured.append([len(array) for array in inputs])
        return convert(folder, name, inputs)

    monkeypatch.setattr(half, "convert", watch)
    spec = _half_spec("tiny-clip", towers=(Tower.IMAGE,), calibration_images=photographs_dir())
    (first,) = export(spec, tmp_path)
    assert measured == [[10, 10]]
    assert first.key != export(replace(spec, calibration_images=None), tmp_path)[0].key


@pytest.mark.skipif(not TRAINED.is_dir(), reason="needs ../shared/fixtures/tiny-clip")
def test_a_trained_model_ranks_as_before(tmp_path: Path):
    arguments = ["export", str(TRAINED / "tiny-clip.json"), "--precision", "fp16"]
    arguments += ["--pretrained", str(TRAINED / "tiny-clip.safetensors")]
    arguments += ["--images", str(TRAINED / "photos"), "--out", str(tmp_path), "--json"]
    assert main([*arguments, str(tmp_path / "report.json")]) == 0
    for model in json.loads((tmp_path / "report.json").read_text()):
        assert model["parity"]["min_cosine"] > 0.99999
        assert set(model["parity"]["ranks"].values()) == {1.0}
