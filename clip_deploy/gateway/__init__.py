"""The gateway: images and words come in over HTTP, vectors and search results go out; the model stays in Triton.

``create_app`` is the whole of it; the home of FastAPI.
"""

from clip_deploy.gateway.app import create_app
from clip_deploy.gateway.settings import GatewaySettings

__all__ = ["GatewaySettings", "create_app"]
