"""The torch-free client: numpy, Pillow, tokenizers and tritonclient.

from clip_deploy.client import TritonInferenceClient
"""

from clip_deploy.client.connection import Connection
from clip_deploy.client.inference import TritonInferenceClient
from clip_deploy.client.served import ServedModel

__all__ = ["Connection", "ServedModel", "TritonInferenceClient"]
