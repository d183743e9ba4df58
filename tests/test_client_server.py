"""Both clients against a real Triton: equal bits, a queue that is full, and another model behind the same address."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path

import numpy as np
import pytest

from clip_deploy import repository as repositories
from clip_deploy.artifacts import exported_models
from clip_deploy.client import AsyncTritonInferenceClient, TritonInferenceClient
from clip_deploy.engines import BACKENDS
from clip_deploy.errors import ModelChanged, ServerBusy, ServerUnavailable
from clip_deploy.inputs.photographs import photographs
from clip_deploy.repository import assemble
from clip_deploy.servers import LAUNCHERS, Ports, ServerHandle, ServerOptions
from clip_deploy.spec import EncoderSpec, ServingSpec, Tower
from tests.conftest import HERE

pytestmark = [pytest.mark.server, pytest.mark.export]

PICTURES = photographs(None).paths


def _start(repository: Path, ports: Ports) -> ServerHandle:
    found = repositories.read(repository)
    return LAUNCHERS["embedded"].start(found, ServerOptions(ports=ports), print)


def test_both_clients_get_the_same_bits_from_a_real_server(tiny_server: ServerHandle):
    texts = ["a photo of a cat", "a rocket", ""]

    async def awaited():
        async with AsyncTritonInferenceClient(tiny_server.grpc) as client:
            return [
                np.asarray(answer)
                for answer in (
                    await client.embed_images(PICTURES),
                    await client.embed_texts(texts),
                    await client.score(PICTURES[:3], texts),
                    await client.request_embedding(PICTURES[0], request_id="7f3a"),
                )
            ], await client.deployment()

    with TritonInferenceClient(tiny_server.grpc) as client:
        blocking = (
            [
                np.asarray(answer)
                for answer in (
                    client.embed_images(PICTURES),
                    client.embed_texts(texts),
                    client.score(PICTURES[:3], texts),
                    client.request_embedding(PICTURES[0], request_id="7f3a"),
                )
            ],
            client.deployment(),
        )
    others = asyncio.run(awaited())
    assert all(np.array_equal(one, other) for one, other in zip(blocking[0], others[0]))
    assert blocking[1] == others[1]
    assert blocking[1].towers == (Tower.IMAGE, Tower.TEXT)
    assert not blocking[1].trained


def test_a_full_queue_and_another_model_at_the_same_address(
    tiny_exports: dict[str, Path], tmp_path: Path
):
    from clip_deploy.export import export

    export(EncoderSpec(str(HERE / "models" / "tiny-clip.json"), "random:1", max_batch=8), tmp_path)
    for name, exports in (("first", tiny_exports["tiny-clip"]), ("second", tmp_path)):
        for model in exported_models([exports]):
            serving = ServingSpec(max_batch=1, max_queue_size=2)
            assemble(BACKENDS["python"].build(model), serving, tmp_path / name / "models")

    async def scene():
        first = _start(tmp_path / "first" / "models", Ports())
        with first:
            client = AsyncTritonInferenceClient(first.grpc)
            pixels = await client.prepare_images(PICTURES[:1])
            alone = await client.embed(Tower.IMAGE, pixels)
            calls = [client.embed(Tower.IMAGE, pixels, request_id=str(i)) for i in range(64)]
            answers = await asyncio.gather(*calls, return_exceptions=True)
            busy = [answer for answer in answers if isinstance(answer, ServerBusy)]
            right = [answer for answer in answers if isinstance(answer, np.ndarray)]
            assert busy
            assert right
            assert len(busy) + len(right) == 64
            assert "Exceeds maximum queue size" in str(busy[0])
            assert all(np.array_equal(answer, alone) for answer in right)
            assert np.array_equal(await client.embed(Tower.IMAGE, pixels), alone)
        with pytest.raises(ServerUnavailable):
            await client.embed(Tower.IMAGE, pixels)
        with _start(tmp_path / "first" / "models", first.ports):
            deadline = time.monotonic() + 15
            while True:
                try:
                    assert np.array_equal(await client.embed(Tower.IMAGE, pixels), alone)
                    break
                except ServerUnavailable:
                    assert time.monotonic() < deadline
                    await asyncio.sleep(0.02)
        with _start(tmp_path / "second" / "models", first.ports):
            await asyncio.sleep(2.5)  # gRPC tries again after 2 seconds at most
            for _ in range(2):
                with pytest.raises(ModelChanged):
                    await client.embed(Tower.IMAGE, pixels)
        await client.close()

    asyncio.run(scene())
