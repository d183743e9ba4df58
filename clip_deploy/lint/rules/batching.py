"""CD5xx: batching, queues, parameters and the response cache."""

from __future__ import annotations

import difflib
from typing import TYPE_CHECKING

from clip_deploy.contract import PREFIX
from clip_deploy.lint.findings import Example, Hit, Severity, rule

if TYPE_CHECKING:
    from collections.abc import Iterator

    from clip_deploy.lint.model import Model
    from clip_deploy.lint.target import Target

_LONG_DELAY_US = 1_000_000
_DELAY = 1  # ModelQueuePolicy.TimeoutAction.DELAY


@rule(
    "CD501",
    "preferred-above-max",
    Severity.ERROR,
    "A preferred batch size lies between 1 and max_batch_size.",
    bad="dynamic_batching { preferred_batch_size: [ 4, 16 ] }",
    good="dynamic_batching { max_queue_delay_microseconds: 5000 }",
)
def preferred_above_max(model: Model, target: Target) -> Iterator[Hit]:
    most = model.config.max_batch_size
    sizes = list(model.config.dynamic_batching.preferred_batch_size)
    wrong = [size for size in sizes if not 1 <= size <= most]
    if wrong:  # compared before Triton completes a config, with the 0 that was not written
        kept = [size for size in sizes if 1 <= size <= most]
        right = f"preferred_batch_size: [ {', '.join(map(str, kept))} ]" if kept else ""
        message = f"preferred batch size {wrong[0]} with max_batch_size {most}"
        yield model.hit(message, "dynamic_batching", "preferred_batch_size", right=right)
    oldest = model.config.sequence_batching.oldest.preferred_batch_size
    for size in oldest:
        if not 1 <= size <= most:
            yield Hit(
                f"preferred batch size {size} with max_batch_size {most}",
                model.place("sequence_batching"),
            )


@rule(
    "CD502",
    "preferred-without-need",
    Severity.WARNING,
    "preferred_batch_size makes requests wait for just these sizes; it pays only for engines with a profile for each.",
    bad="dynamic_batching { preferred_batch_size: [ 4, 8 ] max_queue_delay_microseconds: 1000 }",
    good="dynamic_batching { max_queue_delay_microseconds: 1000 }",
)
def preferred_without_need(model: Model, target: Target) -> Iterator[Hit]:
    sizes = list(model.config.dynamic_batching.preferred_batch_size)
    if (
        sizes
        and model.backend != "tensorrt"
        and all(1 <= size <= model.config.max_batch_size for size in sizes)
    ):
        message = (
            f"preferred sizes {', '.join(map(str, sizes))}: leave them out and let the delay decide"
        )
        yield model.hit(message, "dynamic_batching", "preferred_batch_size", right="")


@rule(
    "CD503",
    "never-batches",
    Severity.WARNING,
    "dynamic_batching does nothing where max_batch_size is below 2: every request runs alone.",
    bad="max_batch_size: 1\ndynamic_batching { max_queue_delay_microseconds: 5000 }",
    good="max_batch_size: 8\ndynamic_batching { max_queue_delay_microseconds: 5000 }",
)
def never_batches(model: Model, target: Target) -> Iterator[Hit]:
    if model.config.HasField("dynamic_batching") and model.max_batch < 2 and not model.is_ensemble:
        message = f"dynamic batching with max_batch_size {model.max_batch} never forms a batch"
        place = model.place("dynamic_batching")
        yield Hit(message, place, remedy="raise max_batch_size, or take dynamic_batching out")


@rule(
    "CD504",
    "max-batch-negative",
    Severity.ERROR,
    "max_batch_size is 0 (no batching) or more.",
    bad="max_batch_size: -1",
    good="max_batch_size: 8",
)
def max_batch_negative(model: Model, target: Target) -> Iterator[Hit]:
    if model.config.max_batch_size < 0:
        yield Hit(f"max_batch_size {model.config.max_batch_size}", model.place("max_batch_size"))


@rule(
    "CD505",
    "long-delay",
    Severity.WARNING,
    "A lone request waits the whole queue delay; the field counts microseconds.",
    bad="dynamic_batching { max_queue_delay_microseconds: 5000000 }",
    good="dynamic_batching { max_queue_delay_microseconds: 5000 }",
)
def long_delay(model: Model, target: Target) -> Iterator[Hit]:
    delay = model.config.dynamic_batching.max_queue_delay_microseconds
    if delay >= _LONG_DELAY_US:
        right = f"max_queue_delay_microseconds: {delay // 1000}"
        where = ("dynamic_batching", "max_queue_delay_microseconds")
        yield model.hit(f"a delay of {delay / 1e6:g} seconds", *where, right=right)


@rule(
    "CD506",
    "queue-contradiction",
    Severity.ERROR,
    "Priorities, order and timeouts of a queue exclude one another in some combinations.",
    bad="dynamic_batching { priority_levels: 2 default_priority_level: 3 }",
    good="dynamic_batching { priority_levels: 2 default_priority_level: 1 }",
)
def queue_contradiction(model: Model, target: Target) -> Iterator[Hit]:
    batching = model.config.dynamic_batching
    levels, default = batching.priority_levels, batching.default_priority_level
    if levels and not 1 <= default <= levels:
        yield Hit(
            f"default_priority_level {default} is not one of 1 to {levels}",
            model.place("dynamic_batching"),
        )
    wrong = [
        level for level in batching.priority_queue_policy if levels and not 1 <= level <= levels
    ]
    if wrong:
        yield Hit(
            f"a queue policy for priority {wrong[0]}, and there are {levels}",
            model.place("dynamic_batching", "priority_queue_policy"),
        )
    if batching.preserve_ordering:
        place = model.place("dynamic_batching", "preserve_ordering")
        policies = [batching.default_queue_policy, *batching.priority_queue_policy.values()]
        if levels > 1:
            yield Hit(f"preserve_ordering with {levels} priorities", place)
        if any(p.default_timeout_microseconds and p.timeout_action == _DELAY for p in policies):
            yield Hit("preserve_ordering with a timeout that delays requests", place)


@rule(
    "CD507",
    "timeout-without-effect",
    Severity.WARNING,
    "A timeout_action does nothing without a timeout.",
    bad="dynamic_batching { default_queue_policy { timeout_action: DELAY } }",
    good="dynamic_batching { default_queue_policy { timeout_action: DELAY default_timeout_microseconds: 100000 } }",
)
def timeout_without_effect(model: Model, target: Target) -> Iterator[Hit]:
    policy = model.config.dynamic_batching.default_queue_policy
    if (
        policy.timeout_action == _DELAY
        and not policy.default_timeout_microseconds
        and not policy.allow_timeout_override
    ):
        yield Hit(
            "a timeout_action without default_timeout_microseconds",
            model.place("dynamic_batching", "default_queue_policy", "timeout_action"),
        )


@rule(
    "CD508",
    "no-batching",
    Severity.NOTE,
    "Without dynamic_batching every request runs alone, however large max_batch_size is.",
    bad="max_batch_size: 8",
    good="max_batch_size: 8\ndynamic_batching { max_queue_delay_microseconds: 5000 }",
)
def no_batching(model: Model, target: Target) -> Iterator[Hit]:
    config = model.config
    if (
        config.max_batch_size < 2
        or config.HasField("dynamic_batching")
        or config.HasField("sequence_batching")
    ):
        return
    if not model.is_ensemble and config.input and config.output:
        yield Hit(
            f"max_batch_size {config.max_batch_size} without dynamic_batching: single requests are never batched",
            model.place("max_batch_size"),
            remedy="add dynamic_batching { max_queue_delay_microseconds: 5000 }",
        )


@rule(
    "CD509",
    "response-cache",
    Severity.WARNING,
    "The response cache needs --cache-config on the server, and slows down a model whose inputs differ.",
    bad="response_cache { enable: true }",
    good="response_cache { enable: false }",
)
def response_cache(model: Model, target: Target) -> Iterator[Hit]:
    if model.config.response_cache.enable:
        yield Hit(
            "the cache pays only for inputs that repeat, and the server must be started with --cache-config",
            model.place("response_cache"),
        )


@rule(
    "CD510",
    "response-cache-refused",
    Severity.ERROR,
    "Triton refuses the response cache for sequence batching and for decoupled models.",
    bad="response_cache { enable: true }\nmodel_transaction_policy { decoupled: true }",
    good="model_transaction_policy { decoupled: true }",
)
def response_cache_refused(model: Model, target: Target) -> Iterator[Hit]:
    config = model.config
    if not config.response_cache.enable:
        return
    kind = "sequence batching" if config.HasField("sequence_batching") else ""
    kind = kind or ("a decoupled model" if config.model_transaction_policy.decoupled else "")
    if kind:
        yield Hit(f"the response cache does not go with {kind}", model.place("response_cache"))


# Parameters of the ONNX Runtime backend: what a value must be (None: anything).
_ONNXRUNTIME = {
    "intra_op_thread_count": int,
    "inter_op_thread_count": int,
    "execution_mode": int,
    "enable_mem_arena": bool,
    "enable_mem_pattern": bool,
    "memory.enable_memory_arena_shrinkage": None,
    "session.use_device_allocator_for_initializers": None,
    "cudnn_conv_algo_search": int,
    "gpu_mem_limit": None,
    "arena_extend_strategy": int,
    "do_copy_in_default_stream": None,
}
_RENAMED = {
    "intra_op_num_threads": "intra_op_thread_count",
    "inter_op_num_threads": "inter_op_thread_count",
    "num_threads": "intra_op_thread_count",
}


@rule(
    "CD511",
    "unknown-parameter",
    Severity.WARNING,
    "A backend ignores parameters that it does not know, and says nothing.",
    bad='parameters { key: "intra_op_num_threads" value { string_value: "4" } }',
    good='parameters { key: "intra_op_thread_count" value { string_value: "4" } }',
)
def unknown_parameter(model: Model, target: Target) -> Iterator[Hit]:
    if model.backend != "onnxruntime":
        return
    for key, index in model.written_parameters.items():
        if key in _ONNXRUNTIME or key.startswith(PREFIX):
            continue
        right = _RENAMED.get(key) or next(
            iter(difflib.get_close_matches(key, _ONNXRUNTIME, n=1, cutoff=0.75)), None
        )
        if right is None:
            continue
        message = f"the ONNX Runtime backend has no parameter {key!r}; did you mean {right}?"
        yield model.hit(message, "parameters", index, "key", right=f'key: "{right}"')


@rule(
    "CD512",
    "parameter-value",
    Severity.ERROR,
    "The backend reads this parameter as a number or a switch and refuses the model when it is neither.",
    bad='parameters { key: "intra_op_thread_count" value { string_value: "four" } }',
    good='parameters { key: "intra_op_thread_count" value { string_value: "4" } }',
)
def parameter_value(model: Model, target: Target) -> Iterator[Hit]:
    if model.backend != "onnxruntime":
        return
    for key, index in model.written_parameters.items():
        value = model.parameter(key)
        wanted = _wanted(key, value.strip().lower())
        if wanted:
            message = f"{key} takes {wanted}, not {value!r}"
            yield Hit(message, model.place("parameters", index, "value"))


def _wanted(key: str, value: str) -> str | None:
    """What a parameter takes, where the value is something else."""
    kind = _ONNXRUNTIME.get(key)
    if kind is bool:
        return None if value in ("0", "1", "true", "false") else "0 or 1"
    if key == "execution_mode":
        return None if value in ("0", "1") else "0 or 1"
    is_number = kind is not int or value.lstrip("+-")[:1].isdecimal()
    return None if is_number else "a whole number"


@rule(
    "CD514",
    "accelerator",
    Severity.WARNING,
    "The TensorRT accelerator of ONNX Runtime builds engines while the server starts or answers, for minutes each.",
    bad=Example(
        config='optimization { execution_accelerators { gpu_execution_accelerator: [ { name: "tensorrt" } ] } }',
    ),
    good="optimization { graph { level: 1 } }",
)
def accelerator(model: Model, target: Target) -> Iterator[Hit]:
    accelerators = model.config.optimization.execution_accelerators
    names = [each.name for each in accelerators.gpu_execution_accelerator]
    if model.backend == "onnxruntime" and "tensorrt" in names:
        yield Hit(
            "the TensorRT accelerator builds engines at run time: build a plan ahead, for the tensorrt backend",
            model.place("optimization", "execution_accelerators", "gpu_execution_accelerator"),
        )


@rule(
    "CD515",
    "unknown-accelerator",
    Severity.ERROR,
    "The backend refuses a model that asks for an accelerator it does not have.",
    bad='optimization { execution_accelerators { cpu_execution_accelerator: [ { name: "mkl" } ] } }',
    good='optimization { execution_accelerators { cpu_execution_accelerator: [ { name: "openvino" } ] } }',
)
def unknown_accelerator(model: Model, target: Target) -> Iterator[Hit]:
    if model.backend != "onnxruntime":
        return
    accelerators = model.config.optimization.execution_accelerators
    for side, known in (("gpu", ("tensorrt", "cuda")), ("cpu", ("openvino",))):
        field = f"{side}_execution_accelerator"
        if side == "gpu" and not target.gpu:
            continue  # not looked at where no instance runs on a GPU
        for each in getattr(accelerators, field):
            if each.name not in known:
                message = f"there is no {side.upper()} accelerator {each.name!r}; use {' or '.join(known)}"
                yield Hit(message, model.place("optimization", "execution_accelerators", field))
