"""A model repository → a running Triton. A launcher is a row; none ever stands in for another."""

from __future__ import annotations

from clip_deploy.servers import container, embedded
from clip_deploy.servers.handle import Ports, ServerHandle
from clip_deploy.servers.launchers import Launcher, ServerOptions

LAUNCHERS: dict[str, Launcher] = {row.name: row for row in (embedded.LAUNCHER, container.LAUNCHER)}

__all__ = ["LAUNCHERS", "Launcher", "Ports", "ServerHandle", "ServerOptions"]
