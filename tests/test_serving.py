"""The embedded Triton: it serves what was exported, and says in words what is wrong with a repository it cannot serve."""

from __future__ import annotations

import json
import os
import runpy
import shutil
import signal
import socket
import subprocess
import sys
import time
from dataclasses import astuple
from pathlib import Path
from xml.etree import ElementTree

import numpy as np
import pytest

from clip_deploy import repository as repositories
from clip_deploy.artifacts import exported_models
from clip_deploy.cli import main
from clip_deploy.client import Connection, TritonInferenceClient
from clip_deploy.compare import Reference, agreement
from clip_deploy.engines import BACKENDS
from clip_deploy.errors import ServerError, ServerTimeout, ServerUnavailable
from clip_deploy.report import Status
from clip_deploy.repository import assemble
from clip_deploy.resources import photographs_dir
from clip_deploy.servers import LAUNCHERS, ServerHandle, ServerOptions
from clip_deploy.smoke import smoke_test
from clip_deploy.spec import EncoderSpec, ServingSpec, Tower
from tests.conftest import HERE, SHARED

pytestmark = [pytest.mark.server, pytest.mark.export]

EXAMPLES = HERE.parent / "examples"
TRAINED = SHARED / "fixtures" / "tiny-clip"
# A model that needs neither torch nor ONNX: it gives its input back.
ECHO = """
import numpy as np
import triton_python_backend_utils as pb_utils

class TritonPythonModel:
    def execute(self, requests):
        rows = [np.from_dlpack(pb_utils.get_input_tensor_by_name(request, "x")) for request in requests]
        return [pb_utils.InferenceResponse([pb_utils.Tensor.from_dlpack("y", r)]) for r in rows]
"""
ECHO_CONFIG = """
name: "echo"
backend: "python"
max_batch_size: 4
input { name: "x" data_type: TYPE_FP32 dims: [ 2 ] }
output { name: "y" data_type: TYPE_FP32 dims: [ 2 ] }
"""


def _start(repository: Path, **options) -> ServerHandle:
    return LAUNCHERS["embedded"].start(
        repositories.read(repository), ServerOptions(**options), print
    )


def _echo(folder: Path, code: str = ECHO, config: str = ECHO_CONFIG) -> Path:
    version = folder / "models" / "echo" / "1"
    version.mkdir(parents=True)
    (version / "model.py").write_text(code)
    (version.parent / "config.pbtxt").write_text(config)
    return folder / "models"


def _copy(repository: Path, folder: Path) -> Path:
    return Path(shutil.copytree(repository, folder / "models"))


def _edit(path: Path, old: str, new: str) -> None:
    text = path.read_text("utf-8")
    assert old in text
    path.write_text(text.replace(old, new), "utf-8")


def _row(report, name: str, model: str = "clip_image_encoder"):
    return next(
        check for check in report.checks if check.name == name and check.model in (model, "")
    )


@pytest.fixture
def client(tiny_server: ServerHandle):
    with TritonInferenceClient(tiny_server.grpc) as client:
        yield client


# What is served is right


@pytest.mark.parametrize("tower", Tower)
def test_the_served_model_gives_torchs_answers(
    client: TritonInferenceClient, tiny_exports: dict[str, Path], tower: Tower
):
    reference = Reference.read(
        tiny_exports["tiny-clip"] / tower.model_name / "reference.npz", tower
    )
    assert agreement(client.embed(tower, reference.inputs), reference.outputs).min_cosine > 0.999999


def test_files_and_sentences_give_torchs_answers(
    client: TritonInferenceClient, tiny_exports: dict[str, Path]
):
    image = Reference.read(
        tiny_exports["tiny-clip"] / "clip_image_encoder" / "reference.npz", Tower.IMAGE
    )
    text = Reference.read(
        tiny_exports["tiny-clip"] / "clip_text_encoder" / "reference.npz", Tower.TEXT
    )
    paths = [photographs_dir() / name for name in image.labels]
    assert agreement(client.embed_images(paths), image.outputs).min_cosine > 0.999999
    assert agreement(client.embed_texts(text.labels), text.outputs).min_cosine > 0.999999
    assert client.request_embedding(paths[0]) == client.embed_images(paths[:1])[0].tolist()


def test_one_bad_request_of_a_batch_fails_alone(client: TritonInferenceClient):
    from concurrent.futures import ThreadPoolExecutor

    good = client.model(Tower.TEXT).tokenizer(["a cat"])
    bad = np.full_like(good, 60_000)
    alone = client.embed(Tower.TEXT, good)

    def ask(i: int):
        try:
            return client.embed(Tower.TEXT, bad if i % 4 == 0 else good)
        except ServerError as error:
            return error

    with ThreadPoolExecutor(16) as pool:
        answers = list(pool.map(ask, range(16)))
    for i, answer in enumerate(answers):
        if i % 4 == 0:
            assert "idx=60000" in str(answer)
        else:
            assert agreement(answer, alone).max_error < 1e-5


def test_pixels_that_are_not_finite_are_refused(client: TritonInferenceClient):
    with pytest.raises(ServerError, match="not finite"):
        client.embed(Tower.IMAGE, np.full((1, 3, 64, 64), np.nan, np.float32))


def test_plain_tritonclient_gets_the_same_vector(
    tiny_server: ServerHandle, client: TritonInferenceClient, capsys, monkeypatch
):
    """The example knows nothing of clip-deploy; the server end of it is ours."""
    picture = photographs_dir() / "rocket.jpg"
    monkeypatch.setattr(sys, "argv", ["plain_client.py", tiny_server.grpc, str(picture), "64"])
    names = runpy.run_path(str(EXAMPLES / "plain_client.py"), run_name="__main__")
    assert names["embedding"].shape == (1, 32)
    assert np.abs(names["embedding"][0] - client.request_embedding(picture)).max() < 1e-5
    assert "image_embeds" in capsys.readouterr().out


# The smoke test


def test_the_smoke_test_passes_and_reports_to_everybody(
    tiny_repository: Path, tmp_path: Path, capsys
):
    places = ["--json", str(tmp_path / "smoke.json"), "--junit", str(tmp_path / "smoke.xml")]
    assert (
        main(["smoke-test", str(tiny_repository), "--images", str(photographs_dir()), *places]) == 0
    )
    out = capsys.readouterr().out
    assert "smoke test: 22 passed, 6 skipped" in out
    report = json.loads((tmp_path / "smoke.json").read_text())
    assert report["ok"] is True
    histogram = next(c for c in report["checks"] if c["name"] == "batches form")["data"]
    assert histogram["inferences"] == 100
    assert histogram["executions"] == sum(histogram["histogram"].values()) < 100
    assert sum(int(size) * count for size, count in histogram["histogram"].items()) == 100
    suite = ElementTree.parse(tmp_path / "smoke.xml").find("testsuite")
    assert (suite.get("failures"), suite.get("skipped")) == ("0", "6")


def test_a_running_server_is_tested_by_its_address(
    tiny_server: ServerHandle, tiny_repository: Path, capsys
):
    assert (
        main(["smoke-test", str(tiny_repository), "--url", tiny_server.grpc, "--concurrency", "20"])
        == 0
    )
    assert "20 requests in" in capsys.readouterr().out


def test_without_a_repository_what_cannot_be_compared_is_skipped(tiny_server: ServerHandle, capsys):
    assert main(["smoke-test", "--url", tiny_server.grpc, "--concurrency", "20"]) == 0
    out = capsys.readouterr().out
    assert "skipped: no reference at hand" in out
    assert "answers equal torch's" in out
    assert "20 of 20 right" in out


def test_somebody_elses_server_is_recognised(client: TritonInferenceClient, tiny_repository: Path):
    report = smoke_test(
        client, repository=repositories.read(tiny_repository), identity="ours", concurrency=2
    )
    assert _row(report, "the expected server answers").status is Status.FAILED


def test_an_address_where_nobody_answers_fails(capsys):
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    assert main(["smoke-test", "--url", f"127.0.0.1:{port}"]) == 6
    assert "no server answers at" in capsys.readouterr().err


def test_a_model_that_is_missing_or_strange_is_named(
    client: TritonInferenceClient, tiny_repository: Path, tmp_path: Path
):
    models = _copy(tiny_repository, tmp_path)
    (models / "clip_text_encoder" / "1").rename(models / "clip_text_encoder" / "2")
    report = smoke_test(client, repository=repositories.read(models), concurrency=2)
    row = _row(report, "exactly the expected models are ready")
    assert row.status is Status.FAILED
    assert row.figure == "clip_text_encoder:2 is absent; clip_text_encoder:1 was not expected"


@pytest.fixture(scope="module")
def other_weights(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An export of the same architecture with other weights."""
    from clip_deploy.export import export

    out = tmp_path_factory.mktemp("other")
    export(EncoderSpec(str(HERE / "models" / "tiny-clip.json"), "random:1", max_batch=8), out)
    return out


def test_a_wrong_graph_fails_the_smoke_test(
    tiny_repository: Path, other_weights: Path, tmp_path: Path, capsys
):
    """Plausible vectors, of unit length, from the wrong weights: only the reference tells."""
    models = _copy(tiny_repository, tmp_path)
    shutil.copy(
        other_weights / "clip_image_encoder" / "model.onnx", models / "clip_image_encoder" / "1"
    )
    assert (
        main(
            [
                "smoke-test",
                str(models),
                "--concurrency",
                "20",
                "--json",
                str(tmp_path / "smoke.json"),
            ]
        )
        == 7
    )
    failed = {
        (c["model"], c["name"])
        for c in json.loads((tmp_path / "smoke.json").read_text())["checks"]
        if c["status"] == "failed"
    }
    assert failed == {
        ("clip_image_encoder", "the files are as exported"),
        ("clip_image_encoder", "answers equal torch's"),
        ("clip_image_encoder", "a crowd is answered, each right"),
    }
    assert "the smoke test failed" in capsys.readouterr().err


def _smoke(repository: Path, concurrency: int = 20):
    found = repositories.read(repository)
    with _start(repository) as handle, TritonInferenceClient(handle.grpc) as client:
        return smoke_test(
            client, repository=found, identity=handle.identity, concurrency=concurrency
        )


@pytest.mark.parametrize(
    ("old", "new", "check"),
    [
        (
            "return np.split(embeddings,",
            "embeddings = embeddings - 0.01 * embeddings.mean(axis=0)\n        return np.split(embeddings,",
            "rows of a batch are independent",
        ),
        (
            "return np.split(embeddings,",
            "embeddings = np.repeat(embeddings[:1], len(embeddings), axis=0)\n        return np.split(embeddings,",
            "answers equal torch's",
        ),
        (
            "return np.split(embeddings,",
            "embeddings = embeddings * np.float32(1.5)\n        return np.split(embeddings,",
            "vectors are finite, of length 1, distinct",
        ),
        (
            "return [self.respond(rows)",
            "import time; self.calls = getattr(self, 'calls', 0) + 1; time.sleep(2 * (self.calls == 3))\n        return [self.respond(rows)",
            "the first answer is not slow",
        ),
    ],
    ids=["rows mix", "first row only", "not normalised", "slow at first"],
)
def test_a_model_that_answers_wrongly_fails_the_right_row(
    tiny_repository: Path, tmp_path: Path, old: str, new: str, check: str
):
    models = _copy(tiny_repository, tmp_path)
    _edit(models / "clip_image_encoder" / "1" / "model.py", old, new)
    report = _smoke(models)
    assert check in {row.name for row in report.failed}
    assert not report.ok
    assert all(row.model == "clip_image_encoder" for row in report.failed)


def test_batches_that_do_not_form_fail_the_smoke_test(tiny_repository: Path, tmp_path: Path):
    models = _copy(tiny_repository, tmp_path)
    _edit(
        models / "clip_image_encoder" / "config.pbtxt",
        "dynamic_batching {\n  max_queue_delay_microseconds: 5000\n}",
        "",
    )
    report = _smoke(models)
    assert [(row.model, row.name) for row in report.failed] == [
        ("clip_image_encoder", "batches form")
    ]
    assert "20 requests in 20 batches" in report.failed[0].figure


def test_a_config_that_says_something_else_than_the_manifest_fails(
    tiny_repository: Path, tmp_path: Path
):
    models = _copy(tiny_repository, tmp_path)
    _edit(models / "clip_image_encoder" / "config.pbtxt", '"shortest"', '"squash"')
    report = _smoke(models)
    assert [row.name for row in report.failed] == ["all descriptions agree"]
    assert "config and manifest differ in resize_mode" in report.failed[0].figure


def test_a_model_without_batching_is_served_and_tested(
    tiny_exports: dict[str, Path], tmp_path: Path
):
    for model in exported_models([tiny_exports["tiny-sigmoid"]]):
        assemble(BACKENDS["python"].build(model), ServingSpec(max_batch=0), tmp_path / "models")
    report = _smoke(tmp_path / "models")
    assert report.ok, [row.figure for row in report.failed]
    assert _row(report, "batches form").figure == "the model takes one row at a time"


def test_a_full_queue_refuses_at_once_and_says_so(tiny_exports: dict[str, Path], tmp_path: Path):
    (model, *_) = exported_models([tiny_exports["tiny-clip"]])
    serving = ServingSpec(max_queue_size=1, max_batch=2, queue_delay_us=200_000)
    assemble(BACKENDS["python"].build(model), serving, tmp_path / "models")
    report = _smoke(tmp_path / "models", concurrency=60)
    row = _row(report, "a crowd is answered, each right")
    assert row.status is Status.FAILED
    assert "maximum queue size" in row.figure


@pytest.mark.skipif(
    not TRAINED.is_dir(), reason="needs ../shared/fixtures/tiny-clip, a small trained CLIP"
)
def test_a_trained_model_finds_captions_and_mixed_towers_do_not(
    tmp_path: Path, other_weights: Path, capsys
):
    from clip_deploy.export import export

    weights = str(TRAINED / "tiny-clip.safetensors")
    spec = EncoderSpec(
        str(TRAINED / "tiny-clip.json"), weights, max_batch=8, images=TRAINED / "photos"
    )
    for model in export(spec, tmp_path / "build"):
        assemble(BACKENDS["python"].build(model), ServingSpec(), tmp_path / "models")
    report = _smoke(tmp_path / "models")
    assert report.ok, [row.figure for row in report.failed]
    assert _row(report, "photographs find their captions", "both encoders").figure.startswith(
        "40 of 40"
    )
    arguments = [
        "smoke-test",
        str(tmp_path / "models"),
        "--images",
        str(TRAINED / "photos"),
        "--concurrency",
        "10",
    ]
    assert main(arguments) == 0
    assert "40 of 40 of your pictures" in capsys.readouterr().out
    code = tmp_path / "models" / "clip_text_encoder" / "1" / "model.py"
    _edit(
        code,
        "return np.split(embeddings,",
        "embeddings = embeddings[:, ::-1].copy()\n        return np.split(embeddings,",
    )
    row = _row(_smoke(tmp_path / "models"), "photographs find their captions", "both encoders")
    assert row.status is Status.FAILED


def test_an_fp16_graph_is_served_and_passes(tmp_path: Path):
    """On a CPU its arithmetic is FP32; the config, the tolerances and the loading are those of FP16."""
    from clip_deploy.export import export
    from clip_deploy.spec import EncoderSpec, Precision
    from tests.conftest import HERE

    model = str(HERE / "models" / "tiny-clip.json")
    spec = EncoderSpec(model, "random", precision=Precision.FP16, max_batch=8)
    for exported in export(spec, tmp_path / "build"):
        assemble(BACKENDS["python"].build(exported), ServingSpec(), tmp_path / "models")
    report = _smoke(tmp_path / "models")
    assert report.ok, report.summary()
    assert "fp16" in report.facts["clip_image_encoder"]


# Life of a server


def test_the_server_listens_on_loopback_only(tiny_server: ServerHandle):
    loopback = {
        "0100007F",
        "0000000000000000FFFF00000100007F",
    }  # 127.0.0.1, as IPv4 and as IPv6 writes it
    rows = [
        line.split()
        for table in ("tcp", "tcp6")
        for line in Path(f"/proc/net/{table}").read_text().splitlines()[1:]
    ]
    listening = [row[1].split(":") for row in rows if row[3] == "0A"]
    for port in (tiny_server.ports.http, tiny_server.ports.grpc, tiny_server.ports.metrics):
        addresses = {address for address, number in listening if int(number, 16) == port}
        assert addresses
        assert addresses <= loopback


def test_the_server_is_the_one_that_was_started(
    tiny_server: ServerHandle, client: TritonInferenceClient
):
    assert client.connection.server().name == tiny_server.identity
    assert tiny_server.is_ours()


def test_serving_ends_cleanly_on_sigterm(tiny_repository: Path, tmp_path: Path):
    command = [sys.executable, "-m", "clip_deploy", "serve", str(tiny_repository)]
    command += [
        "--http-port",
        "0",
        "--grpc-port",
        "0",
        "--metrics-port",
        "0",
        "--log",
        str(tmp_path / "log"),
    ]
    served = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    addresses = {}
    while "log" not in addresses:
        key, value = served.stdout.readline().split(maxsplit=1)
        addresses[key] = value.strip()
    with Connection(addresses["gRPC"]) as connection:
        assert connection.is_ready("clip_image_encoder")
        assert connection.server().name == addresses["id"]
    served.send_signal(signal.SIGTERM)
    _, err = served.communicate(timeout=60)
    assert served.returncode == 0, err
    with (
        Connection(addresses["gRPC"], timeout_s=2) as connection,
        pytest.raises((ServerUnavailable, ServerTimeout)),
    ):
        connection.server()


def test_a_server_that_is_killed_is_reported(tiny_repository: Path, tmp_path: Path):
    with (
        _start(tiny_repository) as handle,
        TritonInferenceClient(handle.grpc, timeout_s=5) as client,
    ):
        client.request_embedding(photographs_dir() / "cat.jpg")
        os.killpg(handle.process.pid, signal.SIGKILL)
        handle.process.wait()
        with pytest.raises(ServerUnavailable) as caught:
            client.request_embedding(photographs_dir() / "cat.jpg")
        assert caught.value.remedy
        assert "ended with code -9" in str(handle.failure())


def test_a_deadline_is_kept(tmp_path: Path):
    slow = ECHO.replace("        rows", "        import time; time.sleep(6)\n        rows")
    with (
        _start(_echo(tmp_path, slow)) as handle,
        Connection(handle.grpc, timeout_s=0.5) as connection,
    ):
        start = time.monotonic()
        with pytest.raises(ServerTimeout, match=r"within 0\.5 s"):
            connection.infer("echo", {"x": np.zeros((1, 2), np.float32)}, "y")
        assert time.monotonic() - start < 5


def test_a_port_in_use_is_named(tiny_repository: Path, capsys):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        assert (
            main(
                [
                    "serve",
                    str(tiny_repository),
                    "--http-port",
                    str(port),
                    "--grpc-port",
                    "0",
                    "--metrics-port",
                    "0",
                ]
            )
            == 6
        )
    err = capsys.readouterr().err
    assert f"error: another program listens on 127.0.0.1:{port}" in err
    assert "fix: give another port" in err


def test_a_server_that_is_not_ready_in_time_is_ended(tmp_path: Path):
    code = ECHO + "\n    def initialize(self, args):\n        import time; time.sleep(60)\n"
    start = time.monotonic()
    with pytest.raises(ServerError, match="not ready after 3 s") as caught:
        _start(_echo(tmp_path, code), timeout_s=3)
    assert "--timeout" in caught.value.remedy
    assert time.monotonic() - start < 60


@pytest.mark.parametrize(
    ("code", "config", "cause", "remedy"),
    [
        (
            ECHO,
            ECHO_CONFIG + "instance_group { kind: KIND_GPU }",
            "echo asks for a GPU",
            "--instance-kind",
        ),
        (ECHO, ECHO_CONFIG.replace('"echo"', '"other"'), "names the model other", "equal"),
        (
            ECHO,
            ECHO_CONFIG + "dynamic_batching { preferred_batch_size: 8 }",
            "prefers a batch larger",
            "max_batch_size",
        ),
        (
            ECHO + "\nimport nowhere_to_be_found",
            ECHO_CONFIG,
            "imports nowhere_to_be_found",
            "pip install",
        ),
        (ECHO + "\ndef x(: pass", ECHO_CONFIG, "SyntaxError", "log"),
        (
            ECHO
            + "\n    def initialize(self, args):\n        raise RuntimeError('no weights here')",
            ECHO_CONFIG,
            "no weights here",
            "log",
        ),
        (
            ECHO + "\n    def initialize(self, args):\n        import os; os._exit(3)",
            ECHO_CONFIG,
            "died while loading",
            "memory",
        ),
        (
            ECHO,
            ECHO_CONFIG
            + 'model_warmup { name: "w" batch_size: 1 inputs { key: "x" value { data_type: TYPE_FP32 dims: 2 input_data_file: "gone" } } }',
            "warmup data",
            "render",
        ),
        (None, ECHO_CONFIG, "a model's code is missing", "render"),
    ],
    ids=["gpu", "name", "preferred", "import", "syntax", "raises", "dies", "warmup", "no code"],
)
def test_a_repository_that_triton_refuses_is_explained(
    tmp_path: Path, code, config: str, cause: str, remedy: str
):
    models = _echo(tmp_path, code or "", config)
    if code is None:
        (models / "echo" / "1" / "model.py").unlink()
    start = time.monotonic()
    with pytest.raises(ServerError, match=cause) as caught:
        _start(models)
    assert remedy in caught.value.remedy
    assert time.monotonic() - start < 45


def test_arrays_that_numpy_two_would_spoil_are_refused_before_the_start(tmp_path: Path):
    """Seen on a real server: as_numpy() gives the first element everywhere, and Tensor() an empty output."""
    if np.__version__.startswith("1."):
        pytest.skip("NumPy 1 is what this Triton was built for")
    code = ECHO.replace(
        'np.from_dlpack(pb_utils.get_input_tensor_by_name(request, "x"))',
        'pb_utils.get_input_tensor_by_name(request, "x").as_numpy()',
    )
    with pytest.raises(ServerError, match=r"uses \.as_numpy, which gives wrong values") as caught:
        _start(_echo(tmp_path, code))
    assert "numpy<2" in caught.value.remedy


def test_a_damaged_graph_is_explained(tiny_repository: Path, tmp_path: Path):
    models = _copy(tiny_repository, tmp_path)
    graph = models / "clip_image_encoder" / "1" / "model.onnx"
    graph.write_bytes(graph.read_bytes()[:10_000])
    with pytest.raises(ServerError, match="not a complete ONNX file") as caught:
        _start(models)
    assert "export the model again" in caught.value.remedy


def test_a_missing_graph_is_explained(tiny_repository: Path, tmp_path: Path):
    models = _copy(tiny_repository, tmp_path)
    (models / "clip_image_encoder" / "1" / "model.onnx").unlink()
    with pytest.raises(ServerError, match="a graph that a model opens is missing"):
        _start(models)


def test_two_servers_live_side_by_side(tiny_repository: Path, tiny_server: ServerHandle):
    with _start(tiny_repository) as second:
        assert second.identity != tiny_server.identity
        assert set(astuple(second.ports)).isdisjoint(astuple(tiny_server.ports))
        for handle in (second, tiny_server):
            assert handle.is_ours()
