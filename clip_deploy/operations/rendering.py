"""Settings → the text of every file of a deployment."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import quote

import jinja2

from clip_deploy import __version__
from clip_deploy.errors import ConfigError
from clip_deploy.operations.alerts import alerts_of
from clip_deploy.operations.dashboard import dashboard
from clip_deploy.resources import templates_dir

if TYPE_CHECKING:
    from clip_deploy.operations.settings import Settings

COMPOSE = "compose.yaml"
# A file of the deployment → the template in templates/deploy that it comes from.
_COMMON = {
    COMPOSE: "compose.yaml.j2",
    "prometheus/prometheus.yml": "prometheus.yml.j2",
    "prometheus/alerts.yml": "alerts.yml.j2",
    "grafana/datasource.yaml": "datasource.yaml.j2",
    "grafana/dashboards.yaml": "dashboards.yaml.j2",
}
_OF_GATEWAY = {"gateway/Dockerfile": "gateway.Dockerfile.j2"}
DASHBOARD = "grafana/dashboard.json"


def render(settings: Settings, out: Path, *, templates: Path | None = None) -> dict[str, str]:
    """Every file by its path below ``out``; nothing is written.

    Args:
        settings: what was chosen.
        out: where the files are to lie; paths to models and the index are relative to it.
        templates: the user's own folder; a file in it replaces the shipped one of the same name.

    Raises:
        ConfigError: a template that does not render.
    """
    parts = {"triton"} | ({"gateway"} if settings.gateway else set())
    parts |= {"gpu"} if settings.gpus != "none" else set()
    context = {
        "version": __version__,
        "settings": settings,
        "gateway": settings.gateway,
        "models": _from(settings.repository.path, out),
        "index": _index(settings, out),
        "tokens": _tokens(settings, out),
        "ready_urls": [
            f"http://127.0.0.1:8000/v2/models/{quote(model.name)}/ready"
            for model in settings.repository.models
        ],
        "alerts": alerts_of(parts, settings.thresholds),
    }
    environment = _environment(templates)
    names = _COMMON | (_OF_GATEWAY if settings.gateway else {})
    files = {path: _filled(environment, name, context) for path, name in names.items()}
    board = dashboard(settings.name, parts, settings.thresholds)
    return files | {DASHBOARD: json.dumps(board, indent=2, ensure_ascii=False) + "\n"}


def _environment(templates: Path | None) -> jinja2.Environment:
    shipped = templates_dir() / "deploy"
    if templates is not None and not any(
        (templates / path.name).is_file() for path in shipped.iterdir()
    ):
        raise ConfigError(
            f"{templates} holds no template of a deployment",
            remedy=f"put a file of the name of one in {shipped} there",
        )
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader([str(p) for p in (templates, shipped) if p]),
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
        autoescape=False,  # noqa: S701  # YAML, not HTML; strings go through `quoted`
    )
    environment.filters["quoted"] = quoted
    environment.filters["literal"] = literal
    return environment


def _filled(environment: jinja2.Environment, name: str, context: dict[str, Any]) -> str:
    try:
        return environment.get_template(name).render(context)
    except jinja2.TemplateError as error:
        line = f", line {error.lineno}" if isinstance(error, jinja2.TemplateSyntaxError) else ""
        raise ConfigError(
            f"{name}{line}: {error.message}", remedy="correct the template"
        ) from error


def quoted(value: object) -> str:
    """A YAML string."""
    return json.dumps(str(value), ensure_ascii=False)


def literal(value: object) -> str:
    """A YAML string in which Compose replaces nothing."""
    return quoted(str(value).replace("$", "$$"))


def _from(path: Path, out: Path) -> str:
    """A path as Compose reads it: relative to the folder of compose.yaml."""
    relative = os.path.relpath(path.resolve(), out.resolve())
    return relative if relative.startswith(".") else f"./{relative}"


def _index(settings: Settings, out: Path) -> str | None:
    gateway = settings.gateway
    if gateway is None or gateway.index is None:
        return None
    return _from(Path(gateway.index), out) if gateway.index_is_a_folder else gateway.index


def _tokens(settings: Settings, out: Path) -> str | None:
    gateway = settings.gateway
    return _from(gateway.token_file, out) if gateway and gateway.token_file else None
