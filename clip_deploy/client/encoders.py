"""Pictures and sentences → embeddings, through a Triton server: everything that is not waiting.

**Which model answers.** A client remembers the weights that it began with, and names the version that it read in every
request. When the connection was lost, or the server no longer has that version, the model's config is read again
before any answer is believed: the same weights prepared in the same way go on, anything else is ``ModelChanged``, for
good. What cannot be known from here: a server that loads other files *under the same version number* without going
down, and a proxy or a round robin that sends one connection's requests to several servers. ``deployment`` asks afresh;
who calls it every few seconds learns of the first case that soon.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np

from clip_deploy.client import protocol
from clip_deploy.client.protocol import ConnectionLost, Deadline, NotServed
from clip_deploy.client.served import Deployment, ServedModel
from clip_deploy.errors import ConfigError, ModelChanged, ServerUnavailable
from clip_deploy.inputs.images import DECODES, to_pixels
from clip_deploy.spec import Tower

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from numpy.typing import NDArray

    from clip_deploy.client.lines import Line
    from clip_deploy.client.protocol import Question
    from clip_deploy.inputs.images import ImageLimits, ImageSource
    from clip_deploy.triton_schema import ModelConfig

_T = TypeVar("_T")


@dataclass(frozen=True, slots=True)
class _Known:
    """A tower as the server described it when the connection had been lost so many times."""

    model: ServedModel
    version: str
    config: ModelConfig
    losses: int


class Encoders:
    """Both encoders of a CLIP model behind one server; coroutines that wait on a ``Line``."""

    def __init__(
        self, line: Line, *, timeout_s: float, limits: ImageLimits, decode: str, retries: int
    ) -> None:
        if decode not in DECODES:
            raise ConfigError(f"decode {decode!r} is unknown", remedy=f"use {' or '.join(DECODES)}")
        if retries < 0:
            raise ConfigError(f"{retries} retries", remedy="use 0 to switch them off")
        Deadline(timeout_s)  # refuses what is none
        self._line = line
        self._timeout_s, self._limits, self._decode = timeout_s, limits, decode
        self._retries = retries
        self._known: dict[Tower, _Known] = {}
        self._changed: str | None = None

    async def request_embedding(
        self, image: ImageSource, *, request_id: str = "", timeout_s: float | None = None
    ) -> list[float]:
        """The embedding of one picture, of unit length.

        Raises:
            InputError: the picture is damaged, too large, or not one.
            ServerError: the server gave no usable answer; a vector is never made up.
        """
        rows = await self.embed_images([image], request_id=request_id, timeout_s=timeout_s)
        return rows[0].tolist()  # type: ignore[no-any-return]

    async def embed_images(
        self,
        images: Iterable[ImageSource],
        *,
        request_id: str = "",
        timeout_s: float | None = None,
    ) -> NDArray[np.float32]:
        """Embeddings of pictures, float32 ``[n, embed_dim]``, of unit length.

        Args:
            images: paths, bytes of files, open files, Pillow images or uint8 arrays.
            request_id: what the server's log and traces call the request.
            timeout_s: the deadline of the whole call, preparing and retries included; None takes the client's.

        Raises:
            InputError: a picture is damaged, too large, or not one; nothing is sent.
            ServerError: the server gave no usable answer.
        """
        deadline = self._deadline(timeout_s)
        pixels = await self._pixels(images, deadline)
        return await self._embed(Tower.IMAGE, pixels, request_id, deadline)

    async def embed_texts(
        self, texts: Sequence[str], *, request_id: str = "", timeout_s: float | None = None
    ) -> NDArray[np.float32]:
        """Embeddings of texts, float32 ``[n, embed_dim]``, of unit length.

        Raises:
            InputError: a text is too long, or not a string; nothing is sent.
            ServerError: the server gave no usable answer.
        """
        deadline = self._deadline(timeout_s)
        ids = await self._ids(texts, deadline)
        return await self._embed(Tower.TEXT, ids, request_id, deadline)

    async def score(
        self,
        images: Iterable[ImageSource],
        texts: Sequence[str],
        *,
        request_id: str = "",
        timeout_s: float | None = None,
    ) -> NDArray[np.float64]:
        """How well each text describes each picture, ``[images, texts]``, as the model itself was trained to say it.

        CLIP: each row sums to 1. SigLIP: each value is a probability of its own.

        Raises:
            InputError: a picture or a text cannot be embedded; nothing is sent.
            ConfigError: the server's two encoders come from different weights.
            ServerError: the server gave no usable answer.
        """
        deadline = self._deadline(timeout_s)
        image, text = [(await self._current(tower, deadline)).model.contract for tower in Tower]
        self._require_same_weights(image.weights_sha256, text.weights_sha256)
        pixels, ids = await self._pixels(images, deadline), await self._ids(texts, deadline)
        cosines = (await self._embed(Tower.IMAGE, pixels, request_id, deadline)).astype(
            np.float64
        ) @ (await self._embed(Tower.TEXT, ids, request_id, deadline)).astype(np.float64).T
        logits = cosines * image.scoring.scale + image.scoring.bias
        if image.scoring.kind == "sigmoid":
            return np.asarray(1 / (1 + np.exp(-logits)))
        weights = np.exp(logits - logits.max(axis=1, keepdims=True, initial=-np.inf))
        return np.asarray(weights / weights.sum(axis=1, keepdims=True))

    async def embed(
        self,
        tower: Tower,
        inputs: NDArray[Any],
        *,
        request_id: str = "",
        timeout_s: float | None = None,
    ) -> NDArray[np.float32]:
        """Embeddings of prepared inputs: pixels ``[n, 3, height, width]`` or token ids ``[n, context_length]``.

        Raises:
            InputError: the inputs have another shape or type than the model reads; nothing is sent.
            ServerError: the server gave no usable answer.
        """
        return await self._embed(tower, inputs, request_id, self._deadline(timeout_s))

    async def prepare_images(self, images: Iterable[ImageSource]) -> NDArray[Any]:
        """Pictures as ``embed`` reads them, ``[n, 3, height, width]``.

        Raises:
            InputError: a picture is damaged, too large, or not one.
        """
        return await self._pixels(images, self._deadline(None))

    async def prepare_texts(self, texts: Sequence[str]) -> NDArray[np.int32]:
        """Texts as ``embed`` reads them, token ids ``[n, context_length]``.

        Raises:
            InputError: a text is too long, or not a string.
        """
        return await self._ids(texts, self._deadline(None))

    async def model(self, tower: Tower) -> ServedModel:
        """The encoder behind a tower, as the server describes it."""
        return (await self._current(tower, self._deadline(None))).model

    async def deployment(self) -> Deployment:
        """What the server serves now: asked afresh, both towers ready, of the same weights, those of this client.

        Raises:
            ServerUnavailable: a tower is not ready, or nobody answers.
            ConfigError: the two encoders come from different weights.
            ModelChanged: the server now serves other weights than this client began with.
        """
        deadline = self._deadline(None)
        self._require_unchanged()
        for tower in Tower:
            known = await self._read(tower, deadline)
            name, version = known.model.name, known.version
            if not await self._ask(protocol.ready(name, version), deadline):
                raise ServerUnavailable(
                    f"{name} version {version} at {self._line.url} is not ready",
                    remedy="wait until it is loaded; see the server's log",
                )
        contracts = [self._known[tower].model.contract for tower in Tower]
        self._require_same_weights(*(contract.weights_sha256 for contract in contracts))
        return Deployment.of(contracts)

    def _deadline(self, timeout_s: float | None) -> Deadline:
        return Deadline(self._timeout_s if timeout_s is None else timeout_s)

    async def _pixels(self, images: Iterable[ImageSource], deadline: Deadline) -> NDArray[Any]:
        preprocess = (await self._current(Tower.IMAGE, deadline)).model.contract.preprocess
        assert preprocess is not None  # an image encoder's contract has it
        some = deadline.within(images, "preparing pictures")
        work = partial(to_pixels, some, preprocess, self._limits, self._decode)
        return await self._line.prepare(work, deadline)

    async def _ids(self, texts: Sequence[str], deadline: Deadline) -> NDArray[np.int32]:
        tokenizer = (await self._current(Tower.TEXT, deadline)).model.tokenizer
        assert tokenizer is not None  # a text encoder's config has it
        return await self._line.prepare(partial(tokenizer, texts), deadline)

    async def _embed(
        self, tower: Tower, inputs: NDArray[Any], request_id: str, deadline: Deadline
    ) -> NDArray[np.float32]:
        model = (await self._current(tower, deadline)).model
        model.require_inputs(inputs)
        if len(inputs) == 0:
            return np.empty((0, model.contract.embed_dim), np.float32)
        jobs = [
            partial(self._answer, tower, rows, request_id, deadline)
            for rows in model.requests(inputs)
        ]
        return np.concatenate(await self._line.each(jobs))

    async def _answer(
        self, tower: Tower, rows: NDArray[Any], request_id: str, deadline: Deadline
    ) -> NDArray[np.float32]:
        """The answer to one request, of the model that this client began with."""
        lost = gone = 0
        while True:
            known = await self._current(tower, deadline)
            contract = known.model.contract
            question = protocol.infer(
                known.model.name,
                {contract.input.name: rows},
                contract.output.name,
                version=known.version,
                request_id=request_id,
            )
            try:
                answer = await self._line.ask(question, deadline)
            except ConnectionLost:
                lost += 1
                if lost > self._retries:
                    raise
            except NotServed:  # a newer version may have taken its place; this one was not run
                gone += 1
                if gone > 1:
                    raise
                self._doubt(tower, known)
            else:
                await self._current(tower, deadline)  # was the connection lost while it answered?
                return known.model.checked(answer, len(rows))

    async def _current(self, tower: Tower, deadline: Deadline) -> _Known:
        """The tower as this connection's server describes it; read again after the connection was lost."""
        self._require_unchanged()
        known = self._known.get(tower)
        while known is None or known.losses != self._line.losses:
            known = await self._line.share(tower, partial(self._reread, tower), deadline)
        self._require_unchanged()
        return known

    async def _reread(self, tower: Tower) -> _Known:
        return await self._read(tower, self._deadline(None))

    def _doubt(self, tower: Tower, known: _Known) -> None:
        """Have the next caller read the tower again, unless somebody has done so already."""
        if self._known.get(tower) is known:
            self._known[tower] = replace(known, losses=-1)

    async def _read(self, tower: Tower, deadline: Deadline) -> _Known:
        losses = self._line.losses
        name = tower.model_name
        version = await self._ask(protocol.newest_version(name), deadline)
        config = await self._ask(protocol.config(name, version), deadline)
        before = self._known.get(tower)
        if before is not None and before.config == config:  # a tokenizer takes a while to build
            model = before.model
        else:
            model = await self._line.prepare(partial(ServedModel.from_config, config), deadline)
        self._require_same_model(tower, model, losses)
        known = self._known[tower] = _Known(model, version, config, losses)
        return known

    async def _ask(self, question: Question[_T], deadline: Deadline) -> _T:
        """An answer about the server itself, whichever server it now is."""
        for _ in range(self._retries):
            try:
                return await self._line.ask(question, deadline)
            except ConnectionLost:
                continue
        return await self._line.ask(question, deadline)

    def _require_same_model(self, tower: Tower, model: ServedModel, losses: int) -> None:
        """A tower must be the one that it was; a new one must belong to the other, if that came of another server."""
        now, known = model.contract, self._known
        other = next((known[t] for t in Tower if t is not tower and t in known), None)
        if tower in known:
            was = known[tower].model.contract
            same = was.weights_sha256 == now.weights_sha256
            if same and (was.preprocess, was.tokens, was.input, was.output) != (
                now.preprocess,
                now.tokens,
                now.input,
                now.output,
            ):
                self._changed = f"{model.name} at {self._line.url} now reads its inputs differently"
        elif other is not None and other.losses != losses:
            was = other.model.contract
            same = was.weights_sha256 == now.weights_sha256
        else:
            return
        if not same:
            self._changed = (
                f"{model.name} at {self._line.url} now has the weights {now.weights_sha256[:12]} "
                f"({now.model}, {now.pretrained}), not {was.weights_sha256[:12]} ({was.model}, {was.pretrained})"
            )
        self._require_unchanged()

    def _require_unchanged(self) -> None:
        if self._changed is not None:
            raise ModelChanged(
                self._changed,
                remedy="make a new client; vectors of the two models do not compare, so embed the index again, too",
            )

    def _require_same_weights(self, image: str, text: str) -> None:
        if image != text:
            raise ConfigError(
                f"the encoders at {self._line.url} come from different weights",
                remedy="serve both towers of one export",
            )
