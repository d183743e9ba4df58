"""The files that run a repository for good: held against Compose's schema, real promtool, and hands that change them."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from dataclasses import replace
from importlib import resources
from pathlib import Path

import pytest

from clip_deploy import operations
from clip_deploy import repository as repositories
from clip_deploy.cli import main
from clip_deploy.engines import BACKENDS
from clip_deploy.errors import ClipDeployError, ConfigError, ServerError
from clip_deploy.operations import THRESHOLDS, Gateway, Settings
from clip_deploy.operations.alerts import ALERTS
from clip_deploy.operations.dashboard import ROWS, dashboard
from clip_deploy.operations.writing import RECORD
from clip_deploy.repository import assemble
from clip_deploy.spec import ServingSpec, Tower
from tests.factories import exported
from tests.lint_examples import tower_graph

yaml = pytest.importorskip("yaml", reason="needs pip install 'clip-deploy[dev]'")


def _repository(folder: Path, backend: str = "onnxruntime", towers=tuple(Tower), **serving):
    for tower in towers:
        export = exported(folder / "build", tower, graph=tower_graph(tower))
        assemble(BACKENDS[backend].build(export), ServingSpec(**serving), folder / "models")
    return repositories.read(folder / "models")


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory):
    pytest.importorskip("onnx", reason="needs pip install 'clip-deploy[lint]'")
    return _repository(tmp_path_factory.mktemp("operations"))


@pytest.fixture
def index(tmp_path: Path) -> Path:
    folder = tmp_path / 'an index, $HOME and "more"'
    folder.mkdir()
    return folder


def _compose(settings: Settings, out: Path) -> dict:
    return yaml.safe_load(operations.render(settings, out)["compose.yaml"])


def _kinds(models, index: Path) -> dict[str, Settings]:
    """Every kind of deployment."""
    tokens = index.parent / "tokens"
    tokens.write_text("0123456789abcdef\n")
    return {
        "plain": Settings(models),
        "without gateway": Settings(models, gateway=None),
        "without GPU": Settings(models, gpus="none"),
        "two GPUs": Settings(models, gpus="0,2", digest="sha256:" + "0" * 64),
        "an index in a folder": Settings(models, gateway=Gateway(index=str(index))),
        "Elasticsearch": Settings(models, gateway=Gateway(index="http://search:9200/pictures")),
        "on the network": Settings(
            models,
            host="192.0.2.1",
            reload=True,
            arguments=("--log-verbose=1", "--trace-config=mode=$x"),
            gateway=Gateway(token_file=tokens, hosts=("search.example",)),
        ),
        "another image": Settings(models, image="registry.example:5000/triton:mine", memory="12g"),
    }


KINDS = (
    *("plain", "without gateway", "without GPU", "two GPUs", "an index in a folder"),
    *("Elasticsearch", "on the network", "another image"),
)


@pytest.mark.parametrize("kind", KINDS)
def test_compose_files_follow_the_compose_specification(kind: str, models, index, tmp_path: Path):
    pytest.importorskip("check_jsonschema", reason="needs pip install 'clip-deploy[dev]'")
    import jsonschema

    schemas = resources.files("check_jsonschema") / "builtin_schemas" / "vendor"
    schema = json.loads((schemas / "compose-spec.json").read_text("utf-8"))
    jsonschema.validate(_compose(_kinds(models, index)[kind], tmp_path / "deploy"), schema)


@pytest.mark.parametrize("kind", KINDS)
def test_no_container_may_more_than_it_needs(kind: str, models, index, tmp_path: Path):
    settings = _kinds(models, index)[kind]
    files = operations.render(settings, tmp_path / "deploy")
    for name, service in yaml.safe_load(files["compose.yaml"])["services"].items():
        assert service["read_only"] is True
        assert service["cap_drop"] == ["ALL"]
        assert service["security_opt"] == ["no-new-privileges:true"]
        assert service["restart"] == "unless-stopped"
        assert service["mem_limit"]
        assert not service.get("privileged")
        assert {port["host_ip"] for port in service["ports"]} <= {settings.host, "127.0.0.1"}
        binds = [volume for volume in service.get("volumes", []) if volume["type"] == "bind"]
        assert all(volume["read_only"] for volume in binds)
        if name == "gateway":
            assert "USER 10001:10001" in files["gateway/Dockerfile"].splitlines()
        else:
            assert re.fullmatch(r"[1-9]\d*:\d+", service["user"])
        assert ":" in service["image"]  # a tag, always
        assert not service["image"].endswith(":latest")


def test_health_is_asked_of_every_model_and_never_of_the_server(models, tmp_path: Path):
    services = _compose(Settings(models), tmp_path)["services"]
    urls = [word for word in services["triton"]["healthcheck"]["test"] if word.startswith("http")]
    assert urls == [
        f"http://127.0.0.1:8000/v2/models/clip_{tower}_encoder/ready" for tower in ("image", "text")
    ]
    assert services["gateway"]["depends_on"] == {"triton": {"condition": "service_healthy"}}
    assert "/readyz" in services["gateway"]["healthcheck"]["test"][-1]


def test_paths_lead_from_the_compose_file_to_models_and_index(models, index, tmp_path: Path):
    out = tmp_path / "far" / "away"
    services = _compose(Settings(models, gateway=Gateway(index=str(index))), out)["services"]
    for service, there in (("triton", models.path), ("gateway", index)):
        (bind,) = services[service]["volumes"]
        assert (out / bind["source"].replace("$$", "$")).resolve() == there.resolve()
        assert bind["bind"] == {"create_host_path": False}


def test_gpus_are_asked_for_as_chosen(models, tmp_path: Path):
    def asked(gpus: str):
        triton = _compose(Settings(models, gpus=gpus), tmp_path)["services"]["triton"]
        return triton.get("deploy", {}).get("resources", {}).get("reservations", {}).get("devices")

    assert asked("none") is None
    assert asked("all") == [{"driver": "nvidia", "count": "all", "capabilities": ["gpu"]}]
    assert asked("0,2") == [{"driver": "nvidia", "device_ids": ["0", "2"], "capabilities": ["gpu"]}]


def test_the_digest_stands_beside_the_tag(models):
    digest = "sha256:" + "a" * 64
    image = Settings(models, digest=digest, release="26.03").full_image
    assert image == f"nvcr.io/nvidia/tritonserver:26.03-py3@{digest}"


def test_memory_follows_the_models(models):
    assert Settings(models).memory_limit == "5g"
    assert Settings(models, memory="12g").memory_limit == "12g"


@pytest.mark.parametrize(
    ("changes", "complaint"),
    [
        ({"name": "Not A Name"}, "project name"),
        ({"digest": "sha256:abc"}, "no digest"),
        ({"gpus": "0,x"}, "--gpus"),
        ({"gpus": ""}, "--gpus"),
        ({"user": "0:0"}, "root"),
        ({"user": "me"}, "by number"),
        ({"shm_size": "much"}, "no size"),
        ({"memory": "-1g"}, "no size"),
        ({"host": "localhost"}, "no IP address"),
        ({"host": "0.0.0.0"}, "anybody"),
        ({"http_port": 8001}, "equal"),
        ({"grpc_port": 8080}, "equal"),
    ],
)
def test_what_could_not_run_is_refused(models, changes: dict, complaint: str):
    with pytest.raises(ConfigError, match=re.escape(complaint)):
        replace(Settings(models), **changes)


@pytest.mark.parametrize(
    ("changes", "complaint"),
    [
        ({"index": "/nowhere"}, "--index: there is nothing"),
        ({"index": "http://localhost:9200/x"}, "the container itself"),
        ({"index": "http://127.0.0.1:9200/x"}, "the container itself"),
        ({"token_file": Path("/nowhere")}, "--token-file: there is nothing"),
    ],
)
def test_a_gateway_that_could_not_run_is_refused(changes: dict, complaint: str):
    with pytest.raises(ConfigError, match=complaint):
        Gateway(**changes)


def test_a_release_that_nobody_knows_is_refused(models, tmp_path: Path):
    with pytest.raises(ConfigError, match="not known"):
        operations.render(Settings(models, release="99.99"), tmp_path)


def test_models_that_the_container_cannot_serve_are_refused(tmp_path: Path):
    pytest.importorskip("onnx")
    with pytest.raises(ServerError, match="cannot load backend python"):
        Settings(own := _repository(tmp_path / "a", "python"))
    assert Settings(own, image="mine:1").full_image == "mine:1"
    with pytest.raises(ConfigError, match="asks for a GPU"):
        Settings(_repository(tmp_path / "b", kind="gpu"), gpus="none")
    with pytest.raises(ConfigError, match="needs clip_text_encoder"):
        Settings(_repository(tmp_path / "c", towers=(Tower.IMAGE,)))


def test_files_that_tritons_user_cannot_read_are_named(tmp_path: Path):
    pytest.importorskip("onnx")
    found = _repository(tmp_path)
    assert Settings(found, user="4242:4242").unreadable() is None
    config = found.path / "clip_image_encoder" / "config.pbtxt"
    config.chmod(0o600)
    assert Settings(found, user="4242:4242").unreadable() == config


def test_rendering_again_changes_nothing(models, tmp_path: Path):
    files = operations.render(Settings(models), tmp_path)
    first = operations.write(files, tmp_path)
    again = operations.write(files, tmp_path)
    assert set(first.written) == set(again.unchanged) == {tmp_path / name for name in files}
    assert not again.written


def test_a_file_that_somebody_changed_is_not_overwritten(models, tmp_path: Path):
    operations.write(operations.render(Settings(models), tmp_path), tmp_path)
    compose, alerts = tmp_path / "compose.yaml", tmp_path / "prometheus" / "alerts.yml"
    compose.write_text(compose.read_text() + "# mine\n")
    (tmp_path / "compose.override.yaml").write_text("# mine, too\n")
    before = alerts.read_text()
    other = operations.render(Settings(models, name="other"), tmp_path)
    with pytest.raises(ConfigError, match=r"compose\.yaml: not as it was rendered") as caught:
        operations.write(other, tmp_path)
    assert "compose.override.yaml" in caught.value.remedy
    assert compose.read_text().endswith("# mine\n")
    assert alerts.read_text() == before  # all or none
    operations.write(other, tmp_path, force=True)
    assert "# mine" not in compose.read_text()
    assert (tmp_path / "compose.override.yaml").read_text() == "# mine, too\n"


def test_a_folder_of_somebody_elses_is_not_overwritten(models, tmp_path: Path):
    (tmp_path / "compose.yaml").write_text("services: {}\n")
    with pytest.raises(ConfigError, match="somebody changed it"):
        operations.write(operations.render(Settings(models), tmp_path), tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["compose.yaml"]


def test_what_is_no_longer_part_of_it_goes_unless_somebody_changed_it(models, tmp_path: Path):
    dockerfile = tmp_path / "gateway" / "Dockerfile"
    alone = operations.render(Settings(models, gateway=None), tmp_path)
    operations.write(operations.render(Settings(models), tmp_path), tmp_path)
    assert operations.write(alone, tmp_path).removed == (dockerfile,)
    assert not dockerfile.exists()
    operations.write(operations.render(Settings(models), tmp_path), tmp_path)
    dockerfile.write_text("FROM mine\n")
    assert operations.write(alone, tmp_path).kept == (dockerfile,)
    assert dockerfile.read_text() == "FROM mine\n"


@pytest.mark.parametrize("text", ["", "[]", '{"sha256": 3}', '{"sha256": []}'])
def test_a_damaged_record_is_said(models, tmp_path: Path, text: str):
    (tmp_path / RECORD).write_text(text)
    with pytest.raises(ConfigError, match="is damaged"):
        operations.write(operations.render(Settings(models), tmp_path), tmp_path)


def test_a_record_cannot_have_files_elsewhere_removed(models, tmp_path: Path):
    out, other = tmp_path / "out", tmp_path / "precious"
    out.mkdir()
    other.write_text("x")
    digest = "2d711642b726b04401627ca9fbac32f5c8530fb1903cc4db02258717921a4881"  # of "x"
    record = {"sha256": {"../precious": digest, str(other): digest}}
    (out / RECORD).write_text(json.dumps(record))
    assert operations.write(operations.render(Settings(models), out), out).removed == ()
    assert other.read_text() == "x"


def test_a_users_template_replaces_the_shipped_one(models, tmp_path: Path):
    mine = tmp_path / "mine"
    mine.mkdir()
    (mine / "prometheus.yml.j2").write_text("# {{ settings.name }}\n")
    files = operations.render(Settings(models), tmp_path, templates=mine)
    assert files["prometheus/prometheus.yml"] == "# clip-deploy\n"
    (mine / "prometheus.yml.j2").write_text("{% if %}")
    with pytest.raises(ConfigError, match=r"prometheus\.yml\.j2, line 1"):
        operations.render(Settings(models), tmp_path, templates=mine)
    with pytest.raises(ConfigError, match="holds no template"):
        operations.render(Settings(models), tmp_path, templates=tmp_path)


def test_thresholds_arrive_in_alerts_and_dashboard(models, tmp_path: Path):
    files = operations.render(Settings(models, thresholds={"queue_ms": 37.5}), tmp_path)
    rules = yaml.safe_load(files["prometheus/alerts.yml"])["groups"][0]["rules"]
    assert next(rule["expr"] for rule in rules if rule["alert"] == "TritonQueueLong").endswith(
        "> 37.5"
    )
    (panel,) = (
        p
        for p in json.loads(files["grafana/dashboard.json"])["panels"]
        if p["title"] == "Queue time"
    )
    assert panel["fieldConfig"]["defaults"]["thresholds"]["steps"][-1]["value"] == 37.5


@pytest.mark.parametrize(
    ("given", "complaint"),
    [
        ({"queue_mss": 1}, "no threshold 'queue_mss'"),
        ({"queue_ms": 0}, "threshold queue_ms is 0"),
        ({"queue_ms": float("nan")}, "threshold queue_ms is nan"),
        ({"failed_share": 1.5}, "never passed"),
    ],
)
def test_a_wrong_threshold_is_refused(models, tmp_path: Path, given: dict, complaint: str):
    with pytest.raises(ConfigError, match=complaint) as caught:
        operations.render(Settings(models, thresholds=given), tmp_path)
    assert "queue_mss" not in given or caught.value.remedy == "use queue_ms"


def test_every_threshold_is_compared_with():
    used = set(re.findall(r"\$(\w+)", " ".join(alert.expression for alert in ALERTS)))
    assert used == set(THRESHOLDS)
    assert {panel.threshold for row in ROWS for panel in row.panels} <= used | {""}


def test_alerts_and_panels_follow_what_there_is(models, tmp_path: Path):
    files = operations.render(Settings(models, gateway=None, gpus="none"), tmp_path)
    assert "gateway/Dockerfile" not in files
    assert not re.search("clip_gateway|nv_gpu|job: gateway", "".join(files.values()))


def test_panels_have_numbers_of_their_own_and_places_that_do_not_overlap():
    board = dashboard("x", {"triton", "gateway", "gpu"}, {})
    panels = board["panels"]
    assert len({panel["id"] for panel in panels}) == len(panels)
    cells = [
        (x, y)
        for panel in panels
        for place in [panel["gridPos"]]
        for x in range(place["x"], place["x"] + place["w"])
        for y in range(place["y"], place["y"] + place["h"])
    ]
    assert len(set(cells)) == len(cells)
    assert max(x for x, _ in cells) < 24


def test_the_command_writes_the_files_and_says_how_to_go_on(
    models, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    out = tmp_path / "deploy"
    arguments = ["render-deploy", "--repository", str(models.path), "--out", str(out)]
    assert main([*arguments, "--threshold", "queue_ms=50", "--gpus", "none"]) == 0
    told = capsys.readouterr()
    assert str(out / "compose.yaml") in told.out.splitlines()
    assert "docker compose up" in told.err
    assert main([*arguments, "--threshold", "queue_ms=50", "--gpus", "none"]) == 0
    assert capsys.readouterr().out == ""


@pytest.mark.parametrize(
    "more",
    [
        ["--target", "helm"],
        ["--threshold", "queue_ms"],
        ["--threshold", "queue_ms=much"],
        ["--no-gateway", "--index", "x"],
        ["--triton-release", "1.2"],
    ],
)
def test_the_command_refuses_in_two_lines(models, tmp_path: Path, capsys, more: list[str]):
    arguments = ["render-deploy", "--repository", str(models.path), "--out", str(tmp_path / "o")]
    assert main([*arguments, *more]) == 2
    assert "fix: " in capsys.readouterr().err
    assert not (tmp_path / "o").exists()


def test_failures_carry_a_remedy(models):
    with pytest.raises(ClipDeployError) as caught:
        Settings(models, user="root")
    assert caught.value.remedy


# What a healthy deployment shows: one sample a minute, for half an hour.
_OF = 'instance="here"'
_MODEL = f'{_OF}, model="m", version="1"'
_ROUTE = f'{_OF}, route="/api/v1/search/image", method="POST"'
HEALTHY = {
    f'up{{job="triton", {_OF}}}': "1x30",
    f'up{{job="gateway", {_OF}}}': "1x30",
    f"nv_inference_request_success{{{_MODEL}}}": "0+150x30",
    f'nv_inference_request_failure{{{_MODEL}, reason="BACKEND"}}': "0x30",
    f'nv_inference_request_failure{{{_MODEL}, reason="REJECTED"}}': "0x30",
    f'nv_inference_request_failure{{{_MODEL}, reason="CANCELED"}}': "0+15x30",
    f"nv_inference_queue_duration_us{{{_MODEL}}}": "0+750000x30",
    f"nv_inference_count{{{_MODEL}}}": "0+150x30",
    f"nv_inference_exec_count{{{_MODEL}}}": "0+50x30",
    f"nv_inference_pending_request_count{{{_MODEL}}}": "3x30",
    f"nv_cpu_memory_used_bytes{{{_OF}}}": "50x30",
    f"nv_cpu_memory_total_bytes{{{_OF}}}": "100x30",
    f'nv_gpu_memory_used_bytes{{{_OF}, gpu_uuid="g"}}': "50x30",
    f'nv_gpu_memory_total_bytes{{{_OF}, gpu_uuid="g"}}': "100x30",
    f'nv_gpu_utilization{{{_OF}, gpu_uuid="g"}}': "0.5x30",
    f"clip_gateway_ready{{{_OF}}}": "1x30",
    f'clip_gateway_requests_total{{{_ROUTE}, status="200"}}': "0+150x30",
    f'clip_gateway_requests_total{{{_ROUTE}, status="502"}}': "0x30",
    f'clip_gateway_requests_total{{{_ROUTE}, status="503"}}': "0x30",
    f'clip_gateway_requests_total{{{_OF}, route="/readyz", method="GET", status="503"}}': "0+9x30",
    f'clip_gateway_refused_total{{{_OF}, reason="model-changed"}}': "0x30",
    f'clip_gateway_request_seconds_bucket{{{_OF}, route="/api/v1/search/image", le="0.1"}}': "0+150x30",
    f'clip_gateway_request_seconds_bucket{{{_OF}, route="/api/v1/search/image", le="5"}}': "0+150x30",
    f'clip_gateway_request_seconds_bucket{{{_OF}, route="/api/v1/search/image", le="+Inf"}}': "0+150x30",
}
# Alert → how the series that begin so differ when it must fire; other alerts that then fire as well.
ILL: dict[str, tuple[dict[str, str], set[str]]] = {
    "TritonDown": ({'up{job="triton"': "0x30"}, set()),
    "TritonRequestsFail": (
        {f'nv_inference_request_failure{{{_MODEL}, reason="BACKEND"': "0+15x30"},
        set(),
    ),
    "TritonQueueRejects": (
        {f'nv_inference_request_failure{{{_MODEL}, reason="REJECTED"': "0+15x30"},
        set(),
    ),
    "TritonQueueLong": ({"nv_inference_queue_duration_us": "0+30000000x30"}, set()),
    "TritonPendingPilesUp": ({"nv_inference_pending_request_count": "300x30"}, set()),
    "TritonBatchesDoNotForm": (
        {"nv_inference_exec_count": "0+150x30", "nv_inference_queue_duration_us": "0+30000000x30"},
        {"TritonQueueLong"},
    ),
    "HostMemoryFull": ({"nv_cpu_memory_used_bytes": "96x30"}, set()),
    "GpuMemoryFull": ({"nv_gpu_memory_used_bytes": "96x30"}, set()),
    "GpuSaturated": ({"nv_gpu_utilization": "0.99x30"}, set()),
    "GatewayDown": ({'up{job="gateway"': "0x30"}, set()),
    "GatewayNotReady": ({"clip_gateway_ready": "0x30"}, set()),
    "GatewayModelChanged": ({"clip_gateway_refused_total": "0+1x30"}, set()),
    "GatewayFails": (
        {f'clip_gateway_requests_total{{{_ROUTE}, status="502"': "0+15x30"},
        set(),
    ),
    "GatewayTurnsAway": (
        {f'clip_gateway_requests_total{{{_ROUTE}, status="503"': "0+15x30"},
        set(),
    ),
    "GatewaySlow": (
        {f'clip_gateway_request_seconds_bucket{{{_OF}, route="/api/v1/search/image", le="0.1"': "0x30"},
        set(),
    ),
}  # fmt: skip


def _case(changes: dict[str, str], firing: set[str]) -> dict:
    series = [
        {
            "series": name,
            "values": next((v for k, v in changes.items() if name.startswith(k)), values),
        }
        for name, values in HEALTHY.items()
    ]
    expected = [{"labels": f'{{alertname="{name}"}}', "value": 1} for name in sorted(firing)]
    asked = 'count by (alertname) (ALERTS{alertstate="firing"})'
    return {
        "interval": "1m",
        "input_series": series,
        "promql_expr_test": [{"expr": asked, "eval_time": "28m", "exp_samples": expected}],
    }


def _promtool(*arguments: str, cwd: Path) -> None:
    if shutil.which("promtool") is None:
        pytest.skip("needs promtool: apt-get install prometheus")
    done = subprocess.run(
        ["promtool", *arguments], cwd=cwd, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.processes
def test_each_alert_fires_on_its_own_failure_and_none_on_health(models, tmp_path: Path):
    assert set(ILL) == {alert.name for alert in ALERTS}
    operations.write(operations.render(Settings(models), tmp_path), tmp_path)
    alone = {"nv_inference_exec_count": "0+150x30"}  # batches of one, and nobody waits
    cases = [_case({}, set()), _case(alone, set())]
    cases += [_case(changes, {name} | others) for name, (changes, others) in ILL.items()]
    tests = {"rule_files": ["alerts.yml"], "evaluation_interval": "1m", "tests": cases}
    (tmp_path / "prometheus" / "tests.yml").write_text(yaml.safe_dump(tests))
    _promtool("check", "config", "prometheus/prometheus.yml", cwd=tmp_path)
    _promtool("test", "rules", "tests.yml", cwd=tmp_path / "prometheus")


@pytest.mark.processes
def test_every_panel_asks_in_promql(tmp_path: Path):
    curves = [e for row in ROWS for panel in row.panels for _, e in panel.curves]
    rules = [
        {"record": f"panel:{i}", "expr": expression.replace("$__rate_interval", "1m")}
        for i, expression in enumerate(curves)
    ]
    file = tmp_path / "panels.yml"
    file.write_text(yaml.safe_dump({"groups": [{"name": "panels", "rules": rules}]}))
    _promtool("check", "rules", file.name, cwd=tmp_path)
