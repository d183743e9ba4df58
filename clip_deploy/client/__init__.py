"""The torch-free clients: numpy, Pillow, tokenizers and tritonclient.

from clip_deploy.client import AsyncTritonInferenceClient, TritonInferenceClient
"""

from clip_deploy.client.connection import Connection
from clip_deploy.client.inference import AsyncTritonInferenceClient, TritonInferenceClient
from clip_deploy.client.served import Deployment, ServedModel

__all__ = [
    "AsyncTritonInferenceClient",
    "Connection",
    "Deployment",
    "ServedModel",
    "TritonInferenceClient",
]
