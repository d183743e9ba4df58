"""Pictures and sentences → embeddings, through a Triton server; no torch on this side."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Any

import numpy as np

from clip_deploy.client.connection import Connection
from clip_deploy.client.served import ServedModel
from clip_deploy.errors import ConfigError
from clip_deploy.inputs.images import DECODES, LIMITS, to_pixels
from clip_deploy.spec import Tower

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence
    from types import TracebackType

    from numpy.typing import NDArray

    from clip_deploy.inputs.images import ImageLimits, ImageSource


class TritonInferenceClient:
    """A CLIP model behind a Triton server.

    How pictures are prepared, how texts are tokenized and how the two are scored is read from the server, once.
    Safe to share between threads: make one per process. Close it, or use it as a context manager.

        >>> with TritonInferenceClient("127.0.0.1:8001") as client:  # doctest: +SKIP
        ...     vector = client.request_embedding(Image.open("cat.jpg"))

    Args:
        url: ``host:port`` of the server's gRPC endpoint.
        timeout_s: the deadline of each call.
        limits: what one picture may cost.
        decode: ``exact``, open_clip's own pixels, or ``fast``: large JPEG files in a fraction of the time.
    """

    def __init__(
        self,
        url: str,
        *,
        timeout_s: float = 30.0,
        limits: ImageLimits = LIMITS,
        decode: str = "exact",
    ) -> None:
        if decode not in DECODES:
            raise ConfigError(f"decode {decode!r} is unknown", remedy=f"use {' or '.join(DECODES)}")
        self.connection = Connection(url, timeout_s=timeout_s)
        self._limits = limits
        self._decode = decode
        self._models: dict[Tower, ServedModel] = {}
        self._lock = threading.Lock()

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

    def request_embedding(self, image: ImageSource) -> list[float]:
        """The embedding of one picture, of unit length.

        Raises:
            InputError: the picture is damaged, too large, or not one.
            ServerError: the server gave no usable answer; a vector is never made up.
        """
        return self.embed_images([image])[0].tolist()  # type: ignore[no-any-return]

    def embed_images(self, images: Iterable[ImageSource]) -> NDArray[np.float32]:
        """Embeddings of pictures, float32 ``[n, embed_dim]``, of unit length.

        Raises:
            InputError: a picture is damaged, too large, or not one; nothing is sent.
            ServerError: the server gave no usable answer.
        """
        preprocess = self.model(Tower.IMAGE).contract.preprocess
        assert preprocess is not None  # an image encoder's contract has it
        return self.embed(Tower.IMAGE, to_pixels(images, preprocess, self._limits, self._decode))

    def embed_texts(self, texts: Sequence[str]) -> NDArray[np.float32]:
        """Embeddings of texts, float32 ``[n, embed_dim]``, of unit length.

        Raises:
            InputError: a text is too long, or not a string; nothing is sent.
            ServerError: the server gave no usable answer.
        """
        tokenizer = self.model(Tower.TEXT).tokenizer
        assert tokenizer is not None  # a text encoder's config has it
        return self.embed(Tower.TEXT, tokenizer(texts))

    def score(self, images: Iterable[ImageSource], texts: Sequence[str]) -> NDArray[np.float64]:
        """How well each text describes each picture, ``[images, texts]``, as the model itself was trained to say it.

        CLIP: each row sums to 1. SigLIP: each value is a probability of its own.

        Raises:
            ConfigError: the server's two encoders come from different weights.
        """
        image, text = self.model(Tower.IMAGE).contract, self.model(Tower.TEXT).contract
        if image.weights_sha256 != text.weights_sha256:
            raise ConfigError(
                f"the encoders at {self.connection.url} come from different weights",
                remedy="serve both towers of one export",
            )
        cosines = (
            self.embed_images(images).astype(np.float64)
            @ self.embed_texts(texts).astype(np.float64).T
        )
        logits = cosines * image.scoring.scale + image.scoring.bias
        if image.scoring.kind == "sigmoid":
            return np.asarray(1 / (1 + np.exp(-logits)))
        weights = np.exp(logits - logits.max(axis=1, keepdims=True))
        return np.asarray(weights / weights.sum(axis=1, keepdims=True))

    def embed(self, tower: Tower, inputs: NDArray[Any]) -> NDArray[np.float32]:
        """Embeddings of prepared inputs: pixels ``[n, 3, height, width]`` or token ids ``[n, context_length]``."""
        model = self.model(tower)
        contract = model.contract
        if len(inputs) == 0:
            return np.empty((0, contract.embed_dim), np.float32)
        answers = [
            model.checked(
                self.connection.infer(
                    model.name, {contract.input.name: rows}, contract.output.name
                ),
                len(rows),
            )
            for rows in model.requests(inputs)
        ]
        return np.concatenate(answers)

    def model(self, tower: Tower) -> ServedModel:
        """The encoder behind a tower, as the server describes it."""
        with self._lock:
            if tower not in self._models:
                self._models[tower] = ServedModel.from_config(
                    self.connection.config(tower.model_name)
                )
            return self._models[tower]
