"""A model repository → the files that run it for good: containers, their health, alerts and a dashboard."""

from clip_deploy.operations.alerts import THRESHOLDS
from clip_deploy.operations.rendering import render
from clip_deploy.operations.settings import Gateway, Settings
from clip_deploy.operations.writing import Written, write

__all__ = ["THRESHOLDS", "Gateway", "Settings", "Written", "render", "write"]
