"""The two clients: equal methods, one that blocks and one that is awaited. What they do is written in ``encoders``."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from clip_deploy.client.connection import Connection
from clip_deploy.client.encoders import Encoders
from clip_deploy.client.lines import BlockingLine, LoopLine, run
from clip_deploy.inputs.images import LIMITS

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence
    from types import TracebackType

    import numpy as np
    from numpy.typing import NDArray

    from clip_deploy.client.served import Deployment, ServedModel
    from clip_deploy.inputs.images import ImageLimits, ImageSource
    from clip_deploy.spec import Tower


class AsyncTritonInferenceClient(Encoders):
    """A CLIP model behind a Triton server, for an event loop.

    The methods of ``TritonInferenceClient``, awaited. Pictures and texts are prepared in a few threads of its own,
    never on the loop; a task that is cancelled cancels its call. Make one per event loop and use it for all requests:
    it keeps one channel. Which model answers, and what a client can know of it: see ``clip_deploy.client.encoders``.

        >>> async with AsyncTritonInferenceClient("127.0.0.1:8001") as client:  # doctest: +SKIP
        ...     vector = await client.request_embedding(upload)

    Args:
        url: ``host:port`` of the server's gRPC endpoint.
        timeout_s: the deadline of a whole call that names none.
        limits: what one picture may cost.
        decode: ``exact``, open_clip's own pixels, or ``fast``: large JPEG files in a fraction of the time.
        retries: how often a request is sent again when the connection broke under it; nothing else is.
    """

    def __init__(
        self,
        url: str,
        *,
        timeout_s: float = 30.0,
        limits: ImageLimits = LIMITS,
        decode: str = "exact",
        retries: int = 1,
    ) -> None:
        self._own = LoopLine(url)
        super().__init__(
            self._own, timeout_s=timeout_s, limits=limits, decode=decode, retries=retries
        )

    async def __aenter__(self) -> AsyncTritonInferenceClient:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        await self.close()

    async def close(self) -> None:
        """Close the channel."""
        await self._own.close()


class TritonInferenceClient:
    """A CLIP model behind a Triton server.

    How pictures are prepared, how texts are tokenized and how the two are scored is read from the server. Safe to share
    between threads: make one per process, after it was forked. Close it, or use it as a context manager. Which model
    answers, and what a client can know of it: see ``clip_deploy.client.encoders``.

        >>> with TritonInferenceClient("127.0.0.1:8001") as client:  # doctest: +SKIP
        ...     vector = client.request_embedding(Image.open("cat.jpg"))

    Args:
        url: ``host:port`` of the server's gRPC endpoint.
        timeout_s: the deadline of a whole call that names none.
        limits: what one picture may cost.
        decode: ``exact``, open_clip's own pixels, or ``fast``: large JPEG files in a fraction of the time.
        retries: how often a request is sent again when the connection broke under it; nothing else is.
    """

    def __init__(
        self,
        url: str,
        *,
        timeout_s: float = 30.0,
        limits: ImageLimits = LIMITS,
        decode: str = "exact",
        retries: int = 1,
    ) -> None:
        self.connection = Connection(url, timeout_s=timeout_s)
        self._encoders = Encoders(
            BlockingLine(self.connection),
            timeout_s=timeout_s,
            limits=limits,
            decode=decode,
            retries=retries,
        )

    def __enter__(self) -> TritonInferenceClient:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def close(self) -> None:
        """Close the channel."""
        self.connection.close()

    def request_embedding(
        self, image: ImageSource, *, request_id: str = "", timeout_s: float | None = None
    ) -> list[float]:
        return run(
            self._encoders.request_embedding(image, request_id=request_id, timeout_s=timeout_s)
        )

    def embed_images(
        self,
        images: Iterable[ImageSource],
        *,
        request_id: str = "",
        timeout_s: float | None = None,
    ) -> NDArray[np.float32]:
        return run(self._encoders.embed_images(images, request_id=request_id, timeout_s=timeout_s))

    def embed_texts(
        self, texts: Sequence[str], *, request_id: str = "", timeout_s: float | None = None
    ) -> NDArray[np.float32]:
        return run(self._encoders.embed_texts(texts, request_id=request_id, timeout_s=timeout_s))

    def score(
        self,
        images: Iterable[ImageSource],
        texts: Sequence[str],
        *,
        request_id: str = "",
        timeout_s: float | None = None,
    ) -> NDArray[np.float64]:
        return run(self._encoders.score(images, texts, request_id=request_id, timeout_s=timeout_s))

    def embed(
        self,
        tower: Tower,
        inputs: NDArray[Any],
        *,
        request_id: str = "",
        timeout_s: float | None = None,
    ) -> NDArray[np.float32]:
        return run(self._encoders.embed(tower, inputs, request_id=request_id, timeout_s=timeout_s))

    def prepare_images(self, images: Iterable[ImageSource]) -> NDArray[Any]:
        return run(self._encoders.prepare_images(images))

    def prepare_texts(self, texts: Sequence[str]) -> NDArray[np.int32]:
        return run(self._encoders.prepare_texts(texts))

    def model(self, tower: Tower) -> ServedModel:
        return run(self._encoders.model(tower))

    def deployment(self) -> Deployment:
        return run(self._encoders.deployment())


for _name, _method in list(vars(TritonInferenceClient).items()):
    if not _name.startswith("_") and _method.__doc__ is None:
        _method.__doc__ = getattr(Encoders, _name).__doc__  # said once, shown by both
