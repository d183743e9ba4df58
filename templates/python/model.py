"""An exported encoder in ONNX Runtime, inside Triton's Python backend. Plain Python, copied beside the graph.

Triton collects single requests into a batch; the session runs once for all of them. Parameters of config.pbtxt, named as
in Triton's own ONNX Runtime backend: ``intra_op_thread_count`` and ``inter_op_thread_count`` (0 or absent: the cores of
this process, shared among the model's instances).
"""

import json
import os

import numpy as np
import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    def initialize(self, args):
        config = json.loads(args["model_config"])
        self.input_name = config["input"][0]["name"]
        self.output_name = config["output"][0]["name"]
        path = os.path.join(args["model_repository"], args["model_version"], "model.onnx")
        self.session = open_session(path, config)

    def execute(self, requests):
        """One response per request, in order; inputs ``[rows, …]`` become embeddings ``[rows, embed_dim]``."""
        inputs = [self.rows_of(request) for request in requests]
        try:
            outputs = self.embed(inputs)
        except Exception:
            # One request may hold what the graph refuses (a token id beyond the vocabulary): only that one fails.
            return [self.respond_alone(rows) for rows in inputs]
        return [self.respond(rows) for rows in outputs]

    def rows_of(self, request):
        # DLPack, and not as_numpy(): Triton up to 24.10 was built before NumPy 2 and misreads its arrays.
        return np.from_dlpack(pb_utils.get_input_tensor_by_name(request, self.input_name))

    def embed(self, inputs):
        batch = inputs[0] if len(inputs) == 1 else np.concatenate(inputs)
        embeddings = self.session.run([self.output_name], {self.input_name: batch})[0]
        if len(embeddings) != len(batch):
            raise ValueError(f"{len(batch)} rows went in and {len(embeddings)} came out")
        return np.split(embeddings, np.cumsum([len(rows) for rows in inputs])[:-1])

    def respond_alone(self, rows):
        try:
            return self.respond(self.embed([rows])[0])
        except Exception as error:
            return refusal(f"{self.input_name} was refused: {error}")

    def respond(self, embeddings):
        if not np.isfinite(embeddings).all():
            return refusal(f"{self.output_name} is not finite: {self.input_name} holds NaN or infinity")
        return pb_utils.InferenceResponse([pb_utils.Tensor.from_dlpack(self.output_name, embeddings)])


def open_session(path, config):
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.log_severity_level = 3
    options.intra_op_num_threads = number(config, "intra_op_thread_count") or threads_per_instance(config)
    options.inter_op_num_threads = number(config, "inter_op_thread_count")
    # ONNX Runtime 1.32 dies when it rearranges an FP16 graph for the CPU, which runs it in FP32 anyway.
    skipped = ["NchwcTransformer"] if text(config, "clip_deploy.precision") == "fp16" else None
    return onnxruntime.InferenceSession(
        path, options, providers=["CPUExecutionProvider"], disabled_optimizers=skipped
    )


def threads_per_instance(config):
    instances = sum(group.get("count", 1) for group in config.get("instance_group", [])) or 1
    return max(1, len(os.sched_getaffinity(0)) // instances)


def number(config, key):
    value = text(config, key) or "0"
    if not value.isdecimal():
        raise pb_utils.TritonModelException(f"parameter {key} is {value!r}, not a whole number")
    return int(value)


def text(config, key):
    return config.get("parameters", {}).get(key, {}).get("string_value", "")


def refusal(message):
    return pb_utils.InferenceResponse(error=pb_utils.TritonError(message))
