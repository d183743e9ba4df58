"""An exported encoder inside Triton's Python backend: in ONNX Runtime or OpenVINO. Plain Python, copied beside the graph.

Triton collects single requests into a batch; the engine runs once for all of them. Parameters of config.pbtxt, named as
in Triton's own ONNX Runtime backend: ``intra_op_thread_count`` and ``inter_op_thread_count`` (0 or absent: the cores of
this process, shared among the model's instances), and for OpenVINO its own ``NUM_STREAMS``. ``render-config`` writes
``clip_deploy.engine`` and ``INFERENCE_PRECISION_HINT``; a CPU that cannot do what they say is an error, not another choice.
"""

import json
import os

import numpy as np
import triton_python_backend_utils as pb_utils

# Fewer rows than this on one core of their own take longer than on all cores together.
ROWS_PER_STREAM = 4


class TritonPythonModel:
    def initialize(self, args):
        config = json.loads(args["model_config"])
        self.input_name = config["input"][0]["name"]
        self.output_name = config["output"][0]["name"]
        self.batches = {}
        folder = os.path.join(args["model_repository"], args["model_version"])
        self.run = open_engine(folder, config)

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
        batch = inputs[0] if len(inputs) == 1 else self.joined(inputs)
        embeddings = self.run(batch)
        if len(embeddings) != len(batch):
            raise ValueError(f"{len(batch)} rows went in and {len(embeddings)} came out")
        return np.split(embeddings, np.cumsum([len(rows) for rows in inputs])[:-1])

    def joined(self, inputs):
        """All rows in one array whose memory is kept: fresh memory for every batch costs a tenth of a millisecond a picture."""
        count = sum(len(rows) for rows in inputs)
        shape, dtype = inputs[0].shape[1:], inputs[0].dtype
        place = self.batches.get(shape)
        if place is None or len(place) < count:
            place = self.batches[shape] = np.empty((count, *shape), dtype)
        return np.concatenate(inputs, out=place[:count])

    def respond_alone(self, rows):
        try:
            return self.respond(self.embed([rows])[0])
        except Exception as error:
            return refusal(f"{self.input_name} was refused: {error}")

    def respond(self, embeddings):
        if not np.isfinite(embeddings).all():
            return refusal(f"{self.output_name} is not finite: {self.input_name} holds NaN or infinity")
        return pb_utils.InferenceResponse([pb_utils.Tensor.from_dlpack(self.output_name, embeddings)])


def open_engine(folder, config):
    """The engine as a function: a batch → embeddings."""
    name = text(config, "clip_deploy.engine") or "onnxruntime"
    if name not in ENGINES:
        raise pb_utils.TritonModelException(f"parameter clip_deploy.engine is {name!r}, not one of {', '.join(ENGINES)}")
    return ENGINES[name](folder, config)


def open_onnxruntime(folder, config):
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.log_severity_level = 3
    options.intra_op_num_threads = threads(config)
    options.inter_op_num_threads = number(config, "inter_op_thread_count")
    # ONNX Runtime 1.32 dies when it rearranges an FP16 graph for the CPU, which runs it in FP32 anyway.
    skipped = ["NchwcTransformer"] if text(config, "clip_deploy.precision") == "fp16" else None
    session = onnxruntime.InferenceSession(
        os.path.join(folder, "model.onnx"), options, providers=["CPUExecutionProvider"], disabled_optimizers=skipped
    )
    name = session.get_inputs()[0].name
    return lambda batch: session.run(None, {name: batch})[0]


def open_openvino(folder, config):
    import openvino

    core = openvino.Core()
    hint = text(config, "INFERENCE_PRECISION_HINT")
    if hint not in ("bf16", "f32"):
        raise pb_utils.TritonModelException(f"parameter INFERENCE_PRECISION_HINT is {hint!r}, not bf16 or f32")
    if hint == "bf16" and "BF16" not in core.get_property("CPU", "OPTIMIZATION_CAPABILITIES"):
        raise pb_utils.TritonModelException("this CPU has no bfloat16: render the model with --precision fp32")
    model = core.read_model(os.path.join(folder, "model.xml"))
    most = max(config["max_batch_size"], 1)
    streams = number(config, "NUM_STREAMS") or max(1, min(threads(config), most // ROWS_PER_STREAM))

    def opened(count):
        # Unpinned: the threads of two instances would else share a core, and a pinned thread waits for whoever is there.
        options = {
            "INFERENCE_PRECISION_HINT": hint,
            "INFERENCE_NUM_THREADS": threads(config),
            "NUM_STREAMS": count,
            "ENABLE_CPU_PINNING": False,
        }
        compiled = core.compile_model(model, "CPU", options)
        if (got := compiled.get_property("INFERENCE_PRECISION_HINT").get_type_name()) != hint:
            raise pb_utils.TritonModelException(f"OpenVINO computes in {got}, not in {hint}")
        return [compiled.create_infer_request() for _ in range(count)]

    together = opened(1)
    run = Streams(together[0], opened(streams) if streams > 1 else together)
    return within_vocabulary(run, model) if model.inputs[0].element_type.get_type_name() == "i32" else run


def within_vocabulary(run, model):
    """Refuses token ids that the model has no row for: ONNX Runtime does so itself, OpenVINO gives some vector."""
    tables = [reader.input_value(0) for reader in readers(model.inputs[0]) if reader.get_type_name() == "Gather"]
    if not tables:
        raise pb_utils.TritonModelException("the network does not show which token ids there are")
    size = min(table.get_partial_shape()[0].get_length() for table in tables)

    def checked(batch):
        if batch.min() < 0 or batch.max() >= size:
            raise ValueError(f"a token id outside 0 to {size - 1}")
        return run(batch)

    return checked


def readers(output):
    """What reads a value, as it is or converted to another type."""
    for place in output.get_target_inputs():
        node = place.get_node()
        if node.get_type_name() == "Convert":
            yield from readers(node.output(0))
        else:
            yield node


class Streams:
    """Runs a few rows on all cores together, and many in equal parts on streams of their own.

    Together is soonest for a lone request. Apart is more in all: cores that share each layer wait for one another, and
    on a busy machine for whoever else runs on one of them.
    """

    def __init__(self, together, apart):
        self.together, self.apart = together, apart

    def __call__(self, batch):
        if len(batch) < ROWS_PER_STREAM * len(self.apart):
            return self.together.infer([batch], share_inputs=True)[0]
        for request, rows in zip(self.apart, np.array_split(batch, len(self.apart))):
            request.start_async([rows], share_inputs=True)
        for request in self.apart:
            request.wait()
        return np.concatenate([request.get_output_tensor(0).data for request in self.apart])


ENGINES = {"onnxruntime": open_onnxruntime, "openvino": open_openvino}


def threads(config):
    return number(config, "intra_op_thread_count") or threads_per_instance(config)


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
