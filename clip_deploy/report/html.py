"""Pages that read without a server, a network or a font of their own: templates of ``templates/report``, filled."""

from __future__ import annotations

from typing import Any

import jinja2

from clip_deploy.resources import templates_dir


def filled(template: str, **values: Any) -> str:
    """A template of ``templates/report`` with its values; every text is escaped, charts come as they are.

    ``values`` named ``charts`` or ending in ``_chart`` are SVG.
    """
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(templates_dir() / "report"),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    return environment.get_template(template).render(values)
