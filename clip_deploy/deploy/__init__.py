"""The whole way of a deployment from one file: clip-deploy.toml → every step, with what is up to date left out."""

from clip_deploy.deploy.nouns import RUNGS, Checks, Deployment, Publishing
from clip_deploy.deploy.pipeline import Watcher, deploy
from clip_deploy.deploy.reading import FILE, chosen, deployments, read
from clip_deploy.deploy.results import DeployReport, Outcome, Rung, StepResult
from clip_deploy.deploy.steps import STEPS

__all__ = [
    "FILE",
    "RUNGS",
    "STEPS",
    "Checks",
    "DeployReport",
    "Deployment",
    "Outcome",
    "Publishing",
    "Rung",
    "StepResult",
    "Watcher",
    "chosen",
    "deploy",
    "deployments",
    "read",
]
