"""A served encoder, understood from the server's own model config: nothing is assumed, nothing is configured twice."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from clip_deploy.contract import PREFIX, Contract, unpack
from clip_deploy.errors import ConfigError, InputError, ServerError
from clip_deploy.inputs.texts import TextTokenizer
from clip_deploy.spec import DTYPES, Precision, TensorSpec, Tower
from clip_deploy.triton_schema import DataType, ModelConfig

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from numpy.typing import NDArray

# A request far below gRPC's limit of 2 GB, and small enough that one caller cannot fill the server's memory.
_MAX_REQUEST_BYTES = 64 * 2**20
_NORM_TOLERANCE = 1e-2


@dataclass(frozen=True, slots=True)
class ServedModel:
    """One encoder on a server.

    ``max_batch`` 0 means that Triton does not batch it; requests then carry as many rows as fit. ``precision`` is what
    it computes in, which an engine may choose for itself; ``engine`` is empty where the backend is the engine.
    """

    name: str
    contract: Contract
    max_batch: int
    tokenizer: TextTokenizer | None
    precision: Precision
    engine: str = ""

    @classmethod
    def from_config(cls, config: ModelConfig) -> ServedModel:
        """Read what ``render-config`` wrote into the model's parameters.

        Raises:
            ConfigError: the model does not describe itself, or in a way that this version cannot read.
        """
        parameters = {key: value.string_value for key, value in config.parameters.items()}
        contract = Contract.from_parameters(
            parameters,
            inputs=tuple(_spec(tensor, config.max_batch_size) for tensor in config.input),
            outputs=tuple(_spec(tensor, config.max_batch_size) for tensor in config.output),
        )
        return cls(
            config.name,
            contract,
            config.max_batch_size,
            _tokenizer(contract, parameters),
            _precision(contract, parameters),
            parameters.get(f"{PREFIX}engine", ""),
        )

    def require_inputs(self, rows: NDArray[Any]) -> None:
        """Refuse rows that the model does not read.

        Raises:
            InputError: their type or shape is another.
        """
        tensor = self.contract.input
        if rows.dtype.name != DTYPES[tensor.dtype] or rows.shape[1:] != tensor.shape:
            raise InputError(
                f"{self.name} reads {tensor.dtype} {['n', *tensor.shape]}, not {rows.dtype} {list(rows.shape)}",
                remedy="prepare the inputs with prepare_images or prepare_texts",
            )

    def requests(self, rows: NDArray[Any]) -> Iterator[NDArray[Any]]:
        """Rows in pieces that one request may carry: at most ``max_batch``, and of a bounded size."""
        size = max(
            1, min(self.max_batch or len(rows), _MAX_REQUEST_BYTES // max(rows[:1].nbytes, 1))
        )
        for start in range(0, len(rows), size):
            yield rows[start : start + size]

    def checked(self, embeddings: NDArray[Any], rows: int) -> NDArray[np.float32]:
        """The embeddings, if they can be: the right shape, finite, of unit length.

        Raises:
            ServerError: they are not what an encoder gives; a caller must never see them.
        """
        shape = (rows, self.contract.embed_dim)
        remedy = "do not use this model; run clip-deploy smoke-test against the server"
        if embeddings.shape != shape or embeddings.dtype != np.float32:
            got = f"{embeddings.dtype} {list(embeddings.shape)}"
            raise ServerError(f"{self.name} gave {got}, not float32 {list(shape)}", remedy=remedy)
        lengths = np.linalg.norm(embeddings, axis=1)
        if not np.all(np.abs(lengths - 1) <= _NORM_TOLERANCE):  # NaN fails too
            worst = float(lengths[np.argmax(np.abs(lengths - 1))])
            raise ServerError(
                f"{self.name} gave a vector of length {worst:g}, not 1", remedy=remedy
            )
        return embeddings


@dataclass(frozen=True, slots=True)
class Deployment:
    """What a server serves: one CLIP model, both of whose towers are ready and come from the same weights.

    ``trained`` is False for random weights, whose vectors mean nothing.
    """

    model: str
    pretrained: str
    weights_sha256: str
    embed_dim: int
    towers: tuple[Tower, ...]
    trained: bool

    @classmethod
    def of(cls, contracts: Sequence[Contract]) -> Deployment:
        """What contracts of the same weights have in common."""
        one = contracts[0]
        return cls(
            one.model,
            one.pretrained,
            one.weights_sha256,
            one.embed_dim,
            tuple(contract.tower for contract in contracts),
            one.trained,
        )


def _spec(tensor: Any, max_batch: int) -> TensorSpec:
    dtype = DataType.Name(tensor.data_type).removeprefix("TYPE_")
    dims = tuple(tensor.dims)[0 if max_batch else 1 :]
    if dtype not in DTYPES or not dims:
        raise ConfigError(
            f"tensor {tensor.name} is {dtype} {list(tensor.dims)}", remedy="render the model again"
        )
    return TensorSpec(tensor.name, dtype, dims)


def _precision(contract: Contract, parameters: dict[str, str]) -> Precision:
    value = parameters.get(f"{PREFIX}engine_precision", contract.precision.value)
    try:
        return Precision(value)
    except ValueError:
        raise ConfigError(
            f"parameter {PREFIX}engine_precision is {value!r}",
            remedy="render the model again, or upgrade clip-deploy on this machine",
        ) from None


def _tokenizer(contract: Contract, parameters: dict[str, str]) -> TextTokenizer | None:
    if contract.tokens is None:
        return None
    try:
        packed = parameters[f"{PREFIX}tokenizer"]
    except KeyError:
        raise ConfigError(
            "the text model carries no tokenizer", remedy="render the model again"
        ) from None
    data = unpack(packed)
    if hashlib.sha256(data.encode()).hexdigest() != contract.tokens.sha256:
        raise ConfigError(
            "the text model's tokenizer is not the one it was exported with",
            remedy="render it again",
        )
    return TextTokenizer(data, contract.tokens)
