"""Small, complete stand-ins for what torch would make: exports with a contract, a reference and a tokenizer."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
from tokenizers import Tokenizer, models, pre_tokenizers, processors

from clip_deploy.artifacts import (
    REFERENCE,
    TOKENIZER,
    BuiltPlan,
    EngineBuild,
    ExportedModel,
    GraphFile,
)
from clip_deploy.compare import Reference
from clip_deploy.contract import Contract
from clip_deploy.engines import BACKENDS
from clip_deploy.engines.openvino.building import BuiltNetwork
from clip_deploy.engines.tensorrt import PLAN, plan_folder
from clip_deploy.files import digest
from clip_deploy.spec import BatchProfile, Precision, Preprocess, Scoring, TensorSpec, Tokens, Tower

OPENAI_MEAN = (0.48145466, 0.4578275, 0.40821073)
OPENAI_STD = (0.26862954, 0.26130258, 0.27577711)
CLIP_PREPROCESS = Preprocess((224, 224), OPENAI_MEAN, OPENAI_STD, "shortest", "bicubic")
WEIGHTS = "a" * 64


def word_tokenizer(context_length: int = 8) -> tuple[str, Tokens]:
    """A tokenizer of a few words: pads with 0, begins with 1, ends with 2."""
    words = ["<pad>", "<start>", "<end>", "<other>", "a", "photo", "of", "cat", "dog"]
    built = Tokenizer(
        models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="<other>")
    )
    built.pre_tokenizer = pre_tokenizers.Whitespace()
    built.post_processor = processors.TemplateProcessing(
        single="<start> $A <end>", special_tokens=[("<start>", 1), ("<end>", 2)]
    )
    built.enable_truncation(context_length)
    built.enable_padding(length=context_length, pad_id=0, pad_token="<pad>")
    data = built.to_str()
    return data, Tokens(context_length, 0, "lower", hashlib.sha256(data.encode()).hexdigest())


def contract(tower: Tower, **changes: Any) -> Contract:
    """ViT-B-32's image tower, or a text tower that reads ``word_tokenizer``."""
    image = tower is Tower.IMAGE
    values: dict[str, Any] = {
        "tower": tower,
        "model": "ViT-B-32",
        "pretrained": "laion2b_s34b_b79k",
        "trained": True,
        "precision": Precision.FP32,
        "input": TensorSpec(tower.input_name, "FP32", (3, 224, 224))
        if image
        else TensorSpec(tower.input_name, "INT32", (8,)),
        "output": TensorSpec(tower.output_name, "FP32", (512,)),
        "scoring": Scoring("softmax", 100.0),
        "weights_sha256": WEIGHTS,
        "graph_sha256": "b" * 64,
        "preprocess": CLIP_PREPROCESS if image else None,
        "tokens": None if image else word_tokenizer()[1],
    }
    return Contract(**(values | changes))


def exported(
    folder: Path,
    tower: Tower = Tower.IMAGE,
    *,
    max_batch: int = 32,
    graph: bytes = b"not a graph",
    **changes: Any,
) -> ExportedModel:
    """An export on disk, in ``folder/<model name>``; what opens its graph gives a real one."""
    directory = folder / tower.model_name
    directory.mkdir(parents=True)
    (directory / "model.onnx").write_bytes(graph)
    if tower is Tower.TEXT:
        (directory / TOKENIZER).write_text(word_tokenizer()[0], "utf-8")
    described = contract(tower, graph_sha256=digest([directory / "model.onnx"]), **changes)
    random = np.random.default_rng(0)
    inputs = (
        random.integers(0, 8, (3, 8)).astype(np.int32)
        if tower is Tower.TEXT
        else random.random((3, 3, 224, 224), np.float32)
    )
    outputs = unit(random.standard_normal((3, described.embed_dim)))
    Reference(inputs, outputs, ("one", "two", "three")).save(directory / REFERENCE, tower)
    files = {path.name: digest([path]) for path in sorted(directory.iterdir())}
    graph = GraphFile("model.onnx", 18, 8, described.graph_sha256, 11)
    source = {"architecture": "ViT-B-32", "activation": "GELU", "checkpoint_sha256": None}
    parity = {"min_cosine": 1.0, "max_error": 1e-7}
    model = ExportedModel(
        directory, "key", described, graph, max_batch, source, parity, {"torch": "2.14.1"}, files
    )
    model.write_manifest()
    return model


def unit(rows: np.ndarray) -> np.ndarray:
    """Rows of length 1, float32."""
    return (rows / np.linalg.norm(rows, axis=1, keepdims=True)).astype(np.float32)


def plan_bytes(*version: int, product: bytes = b"ftrt") -> bytes:
    """What begins like a TensorRT plan of that version."""
    return product + bytes(20) + bytes(version) + bytes(64)


def planned(model: ExportedModel, profile: str = "1:8:32") -> ExportedModel:
    """The export with a plan beside it, as build-trt leaves it."""
    folder = plan_folder(model)
    folder.mkdir()
    (folder / PLAN).write_bytes(plan_bytes(10, 16, 1, 11))
    provenance = {"graph_sha256": model.graph.sha256, "tensorrt": "TensorRT 10.16.1.11"}
    sha256 = digest([folder / PLAN])
    BuiltPlan(folder, PLAN, sha256, 92, BatchProfile.parse(profile), 0.9, provenance).write()
    return model


def built(backend: str, model: ExportedModel) -> EngineBuild:
    """An export as a backend's files; TensorRT's plan and OpenVINO's IR are made up."""
    with mock.patch("clip_deploy.engines.openvino.building.build", networked):
        return BACKENDS[backend].build(planned(model) if backend == "tensorrt" else model)


def networked(model: ExportedModel, *_: Any, **__: Any) -> BuiltNetwork:
    """What is like an IR beside the export."""
    folder = model.directory / "openvino" / "bf16"
    folder.mkdir(parents=True)
    for name in ("model.xml", "model.bin", "engine.json"):
        (folder / name).write_text(name)
    return BuiltNetwork(folder, "key", Precision.BF16, "bf16", {}, {}, {}, {})
