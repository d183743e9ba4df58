"""CD513, CD516–518: sequence batching, and tensors that the batcher makes of others."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from clip_deploy.lint.disk import inside
from clip_deploy.lint.findings import Example, Hit, Severity, rule
from clip_deploy.lint.model import row_bytes
from clip_deploy.triton_schema import dtype_name, enum_name, model_config_pb2

if TYPE_CHECKING:
    from collections.abc import Iterator

    from clip_deploy.lint.model import Model
    from clip_deploy.lint.target import Target

_KINDS = model_config_pb2.ModelSequenceBatching.Control
_PAIRS = ("int32_false_true", "fp32_false_true", "bool_false_true")
_IDS = ("TYPE_UINT64", "TYPE_INT64", "TYPE_UINT32", "TYPE_INT32", "TYPE_STRING")

_START = "sequence_batching {{ control_input {{ name: 'START' control {{ kind: CONTROL_SEQUENCE_START {} }} }} }}"
_STATE = (
    "sequence_batching {{ state {{ input_name: 'in' output_name: 'out' data_type: TYPE_FP32 dims: [ 4 ]\n"
    "  initial_state {{ name: 'zeros' data_type: TYPE_FP32 dims: [ {} ] zero_data: true }} }} }}"
)
_COUNT = "batch_input {{ kind: BATCH_ELEMENT_COUNT target_name: 'count' data_type: {} source_input: 'pixel_values' }}"


def _on_python(config: str) -> Example:
    """A model of the Python backend, which has tensors of whatever name."""
    return Example('backend: "python"\n' + config, files={"1/model.py": "python"})


@rule(
    "CD513",
    "sequence-contradiction",
    Severity.ERROR,
    "Sequence batching has limits of its own that Triton checks when it reads the config.",
    bad="sequence_batching { direct { minimum_slot_utilization: 2.0 } }",
    good="sequence_batching { direct { minimum_slot_utilization: 0.5 } }",
)
def sequence_contradiction(model: Model, target: Target) -> Iterator[Hit]:
    batching = model.config.sequence_batching
    share = batching.direct.minimum_slot_utilization
    if share < 0.0 or share > 1.0:
        yield Hit(
            f"minimum_slot_utilization {share:g} is not between 0 and 1",
            model.place("sequence_batching"),
        )


@rule(
    "CD516",
    "sequence-control",
    Severity.ERROR,
    "Each kind of control is sent to one named tensor: START, END and READY as one pair of values, CORRID as an id.",
    bad=_on_python(_START.format("fp32_false_true: [ 1 ]")),
    good=_on_python(_START.format("fp32_false_true: [ 0, 1 ]")),
)
def sequence_control(model: Model, target: Target) -> Iterator[Hit]:
    names: list[str] = []
    kinds: list[int] = []
    for index, tensor in enumerate(model.config.sequence_batching.control_input):
        place = model.place("sequence_batching", "control_input", index)
        if not tensor.name:
            yield Hit("a control input needs a name", place)
        elif tensor.name in names:
            yield Hit(f"the control input {tensor.name!r} stands twice", place)
        names.append(tensor.name)
        for control in tensor.control:
            kind = enum_name(_KINDS.Kind, control.kind)
            if control.kind in kinds:
                yield Hit(f"{kind} is sent to two tensors", place)
            kinds.append(control.kind)
            if complaint := _complaint(control):
                yield Hit(f"{kind} {complaint}", place)


def _complaint(control: Any) -> str | None:
    given = [name for name in _PAIRS if len(getattr(control, name))]
    if control.kind == _KINDS.CONTROL_SEQUENCE_CORRID:
        if given:
            return f"takes a data_type and no {given[0]}"
        right = dtype_name(control.data_type) in _IDS
        return None if right else f"needs a data_type of {', '.join(_IDS)}"
    if len(given) != 1:
        return f"needs one of {', '.join(_PAIRS)}" if not given else f"has {' and '.join(given)}"
    count = len(getattr(control, given[0]))
    return None if count == 2 else f"needs two values in {given[0]}, not {count}"


@rule(
    "CD517",
    "sequence-state",
    Severity.ERROR,
    "An initial state has a name, the state's type, and a size for each of its axes.",
    bad=_on_python(_STATE.format("8")),
    good=_on_python(_STATE.format("4")),
)
def sequence_state(model: Model, target: Target) -> Iterator[Hit]:
    for index, state in enumerate(model.config.sequence_batching.state):
        place = model.place("sequence_batching", "state", index)
        if len(state.initial_state) > 1:
            yield Hit(
                f"the state {state.input_name!r} has {len(state.initial_state)} beginnings", place
            )
        for initial in state.initial_state[:1]:
            if complaint := _initial_complaint(model, state, initial):
                yield Hit(f"the initial state of {state.input_name!r} {complaint}", place)


def _initial_complaint(model: Model, state: Any, initial: Any) -> str | None:
    if not initial.name:
        return "needs a name"
    if initial.data_type != state.data_type:
        here, there = dtype_name(initial.data_type), dtype_name(state.data_type)
        return f"is {here}, the state {there}"
    dims, wanted = list(initial.dims), list(state.dims)
    if len(dims) != len(wanted) or any(d < 1 or w not in (-1, d) for d, w in zip(dims, wanted)):
        return f"has dims {dims}, the state {wanted}"
    kind = initial.WhichOneof("state_data")
    if kind is None:
        return "needs zero_data or a data_file"
    if kind == "data_file":
        path = inside(model.folder / "initial_state", initial.data_file)
        size = row_bytes(initial.data_type, dims)
        if not path.is_file():
            return f"is in initial_state/{initial.data_file}, which is not there"
        if path.stat().st_size < size:
            return f"needs {size:,} bytes, and initial_state/{initial.data_file} has {path.stat().st_size:,}"
    return None


@rule(
    "CD518",
    "batch-tensor",
    Severity.ERROR,
    "A batch input or output is made from one input of the model, and a batch input is INT32 or FP32.",
    bad=_on_python(_COUNT.format("TYPE_INT64")),
    good=_on_python(_COUNT.format("TYPE_INT32")),
)
def batch_tensor(model: Model, target: Target) -> Iterator[Hit]:
    config = model.config
    inputs = {tensor.name for tensor in config.input}
    outputs = {tensor.name for tensor in config.output}
    for side, rows in (("batch_input", config.batch_input), ("batch_output", config.batch_output)):
        for index, row in enumerate(rows):
            strange = [name for name in row.source_input if name not in inputs]
            targets = list(row.target_name)
            if not targets:
                complaint = "needs a target_name; without one the server crashes"
            elif len(row.source_input) != 1:
                complaint = f"needs one source_input, not {len(row.source_input)}"
            elif strange:
                complaint = f"is made from {strange[0]!r}, which is no input of the model"
            elif side == "batch_input" and dtype_name(row.data_type) not in (
                "TYPE_INT32",
                "TYPE_FP32",
            ):
                complaint = f"is TYPE_INT32 or TYPE_FP32, not {dtype_name(row.data_type)}"
            elif side == "batch_output" and not set(targets) <= outputs:
                complaint = f"goes to {sorted(set(targets) - outputs)[0]!r}, which is no output of the model"
            elif len(set(targets)) < len(targets) and side == "batch_output":
                complaint = "names a target twice"
            else:
                continue
            yield Hit(f"this {side} {complaint}", model.place(side, index))
