"""clip-deploy: an OpenCLIP model becomes a verified deployment on NVIDIA Triton Inference Server."""

__version__ = "0.1.0"
