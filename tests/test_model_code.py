"""templates/python/model.py with a stand-in for Triton's Python backend and for the session: every request gets its own."""

from __future__ import annotations

import importlib.util
import json
import sys
import types

import numpy as np
import pytest

from clip_deploy.resources import templates_dir


class _Tensor:
    def __init__(self, name: str, array: np.ndarray) -> None:
        self.name, self.array = name, array

    def __dlpack__(self, **options):
        return self.array.__dlpack__()

    def __dlpack_device__(self):
        return self.array.__dlpack_device__()

    @classmethod
    def from_dlpack(cls, name: str, array: np.ndarray) -> _Tensor:
        return cls(name, np.from_dlpack(array))


class _Response:
    def __init__(self, tensors=(), error=None) -> None:
        self.tensors, self.error = tensors, error


class _ModelError(Exception):
    pass


@pytest.fixture
def model_module(monkeypatch: pytest.MonkeyPatch):
    backend = types.ModuleType("triton_python_backend_utils")
    backend.get_input_tensor_by_name = lambda request, name: request[name]
    backend.InferenceResponse, backend.Tensor = _Response, _Tensor
    backend.TritonError, backend.TritonModelException = str, _ModelError
    monkeypatch.setitem(sys.modules, "triton_python_backend_utils", backend)
    spec = importlib.util.spec_from_file_location(
        "served_model", templates_dir() / "python" / "model.py"
    )
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


class _Session:
    """Gives each row twice its value; refuses rows with 99, as a graph refuses an unknown token id."""

    def __init__(self) -> None:
        self.batches: list[int] = []

    def __call__(self, rows):
        self.batches.append(len(rows))
        if (rows == 99).any():
            raise ValueError("indices element out of data bounds, idx=99")
        return rows.astype(np.float32) * 2


@pytest.fixture
def model(model_module, monkeypatch: pytest.MonkeyPatch):
    session = _Session()
    monkeypatch.setattr(model_module, "open_engine", lambda folder, config: session)
    served = model_module.TritonPythonModel()
    config = {"input": [{"name": "input_ids"}], "output": [{"name": "text_embeds"}]}
    served.initialize(
        {"model_config": json.dumps(config), "model_repository": "/models/m", "model_version": "3"}
    )
    return served


def _requests(*rows: list[list[float]]) -> list[dict]:
    return [{"input_ids": _Tensor("input_ids", np.array(r, np.float32))} for r in rows]


def _answers(responses: list[_Response]) -> list:
    return [response.error or response.tensors[0].array.tolist() for response in responses]


def test_one_run_serves_all_requests_of_a_batch(model):
    answers = _answers(model.execute(_requests([[1, 2]], [[3, 4], [5, 6]], [[7, 8]])))
    assert answers == [[[2, 4]], [[6, 8], [10, 12]], [[14, 16]]]
    assert model.run.batches == [4]


def test_a_bad_request_gets_its_error_and_its_neighbours_their_vectors(model):
    first, bad, last = _answers(model.execute(_requests([[1, 2]], [[3, 99]], [[5, 6]])))
    assert (first, last) == ([[2, 4]], [[10, 12]])
    assert bad == "input_ids was refused: indices element out of data bounds, idx=99"


def test_an_answer_that_is_not_finite_is_refused(model):
    first, bad = _answers(model.execute(_requests([[1, 2]], [[float("nan"), 1]])))
    assert first == [[2, 4]]
    assert "not finite" in bad


def test_rows_that_get_lost_are_an_error_not_somebody_elses_vector(model):
    model.run = lambda rows: np.zeros((1, 2), np.float32)
    assert all(
        "2 rows went in" in answer
        for answer in _answers(model.execute(_requests([[1, 2], [3, 4]])))
    )


@pytest.mark.parametrize(
    ("config", "threads"),
    [
        ({}, 4),
        ({"instance_group": [{"count": 2}]}, 2),
        ({"instance_group": [{"count": 3}, {"count": 6}]}, 1),
    ],
)
def test_instances_share_the_cores(
    model_module, monkeypatch: pytest.MonkeyPatch, config: dict, threads: int
):
    monkeypatch.setattr(model_module.os, "sched_getaffinity", lambda pid: {0, 1, 2, 3})
    assert model_module.threads_per_instance(config) == threads


def test_thread_counts_come_from_parameters(model_module):
    config = {
        "parameters": {
            "intra_op_thread_count": {"string_value": "3"},
            "bad": {"string_value": "many"},
        }
    }
    assert model_module.number(config, "intra_op_thread_count") == 3
    assert model_module.number(config, "inter_op_thread_count") == 0
    with pytest.raises(_ModelError, match="'many', not a whole number"):
        model_module.number(config, "bad")


class _Request:
    """An OpenVINO infer request that doubles its rows, and remembers them."""

    def __init__(self) -> None:
        self.runs: list[int] = []

    def infer(self, inputs, share_inputs):
        self.start_async(inputs, share_inputs)
        return [self.answer]

    def start_async(self, inputs, share_inputs):
        self.runs.append(len(inputs[0]))
        self.answer = inputs[0] * 2

    def wait(self):
        pass

    def get_output_tensor(self, index):
        return types.SimpleNamespace(data=self.answer)


@pytest.mark.parametrize(
    ("rows", "together", "apart"),
    [(1, [1], [[], []]), (7, [7], [[], []]), (8, [], [[4], [4]]), (13, [], [[7], [6]])],
)
def test_few_rows_run_together_and_many_in_equal_parts_in_order(
    model_module, rows: int, together: list, apart: list
):
    lone, streams = _Request(), [_Request(), _Request()]
    batch = np.arange(rows, dtype=np.float32)[:, None]
    answer = model_module.Streams(lone, streams)(batch)
    assert np.array_equal(answer, batch * 2)
    assert (lone.runs, [stream.runs for stream in streams]) == (together, apart)


def test_a_batch_reuses_its_memory_and_still_answers_each_request_its_own(model):
    for first in (10, 20):
        answers = _answers(model.execute(_requests([[first, 1]], [[first, 2]])))
        assert answers == [[[2 * first, 2]], [[2 * first, 4]]]
    (place,) = model.batches.values()
    model.execute(_requests([[1, 1]], [[2, 2]]))
    assert model.batches.popitem()[1] is place
