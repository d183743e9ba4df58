"""Triton's own schema of config.pbtxt, from ``tritonclient``, without the rest of it.

``tritonclient.grpc`` imports gRPC, which takes longer than linting fifty models; the schema alone needs protobuf only.
It is put where a later import of the package looks first, so that there is one schema in a process, whoever came first.
"""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from typing import Any

from google.protobuf import json_format, text_format

_NAME = "tritonclient.grpc.model_config_pb2"


def _load() -> Any:
    if _NAME in sys.modules:
        return sys.modules[_NAME]
    package = importlib.util.find_spec("tritonclient")
    assert package is not None  # part of the base installation
    assert package.submodule_search_locations
    file = Path(package.submodule_search_locations[0]) / "grpc" / "model_config_pb2.py"
    spec = importlib.util.spec_from_file_location(_NAME, file)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[_NAME] = module
    spec.loader.exec_module(module)
    return module


model_config_pb2: Any = _load()
ModelConfig: Any = model_config_pb2.ModelConfig
DataType: Any = model_config_pb2.DataType


def dtype_name(number: int) -> str:
    """TYPE_FP32 and so on; the number itself where the schema knows none, which protobuf lets pass."""
    return enum_name(DataType, number)


def enum_name(kind: Any, number: int) -> str:
    """The name of an enum's value, or the number where it has none."""
    try:
        return str(kind.Name(number))
    except ValueError:
        return str(number)


def as_json(config: Any) -> str:
    """A config as Triton's load API takes it, with the names of config.pbtxt."""
    return str(json_format.MessageToJson(config, preserving_proto_field_name=True))


def as_text(message: Any) -> str:
    """The inside of a message as config.pbtxt writes it."""
    return str(text_format.MessageToString(message, as_utf8=True))
