"""Engine builds → a model repository that Triton loads: rendered, judged, assembled."""

from clip_deploy.repository.assembly import assemble, read, read_config
from clip_deploy.repository.rendering import render

__all__ = ["assemble", "read", "read_config", "render"]
