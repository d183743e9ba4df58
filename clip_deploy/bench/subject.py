"""What is put under load: one encoder on a server, requests for it written beforehand, and the right answers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from clip_deploy.client.prepared import prepare
from clip_deploy.compare import agreement
from clip_deploy.errors import CheckFailed

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from clip_deploy.client import TritonInferenceClient
    from clip_deploy.smoke.subject import Target


@dataclass(frozen=True, slots=True)
class BenchSubject:
    """One encoder under load.

    Args:
        url: ``host:port`` of the server's gRPC endpoint.
        target: the encoder.
        requests: one of a single row for each input, in the bytes that are sent.
        expected: the right answers, float32 ``[len(requests), embed_dim]``.
        pid: the server's process, where we started it on this machine.
    """

    url: str
    target: Target
    requests: tuple[bytes, ...]
    expected: NDArray[np.float32]
    pid: int | None = None


def bench_subject(
    client: TritonInferenceClient,
    target: Target,
    *,
    inputs: NDArray[Any] | None = None,
    pid: int | None = None,
) -> BenchSubject:
    """Prepare an encoder for loads.

    The reference's own inputs are expected to give torch's answers. Other inputs are expected to give what the served
    model answers when it is asked alone, once the reference has shown that its answers are right.

    Args:
        inputs: rows ``[n, …]`` as the model reads them; None takes the target's own.
        pid: the server's process, where we started it on this machine.

    Raises:
        CheckFailed: the served model does not give torch's answers.
        ServerError: it gives none.
    """
    reference = target.reference
    if reference is not None:
        faults = agreement(_alone(client, target, reference.inputs), reference.outputs).faults(
            target.limits
        )
        if faults:
            raise CheckFailed(
                f"{target.name} does not give torch's answers: {faults[0]}",
                remedy="its speed means nothing; run clip-deploy smoke-test",
            )
    asked = target.inputs if inputs is None else inputs
    known = reference is not None and inputs is None
    expected = reference.outputs if known and reference else _alone(client, target, asked)
    return BenchSubject(
        client.connection.url,
        target,
        prepare(target.served, target.version, asked),
        np.ascontiguousarray(expected, np.float32),
        pid,
    )


def _alone(
    client: TritonInferenceClient, target: Target, inputs: NDArray[Any]
) -> NDArray[np.float32]:
    """Answers to every row in a request of its own."""
    answers = [target.ask(client.connection, inputs[i : i + 1]) for i in range(len(inputs))]
    return np.concatenate([target.served.checked(answer, 1) for answer in answers])
