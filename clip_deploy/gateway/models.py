"""The shapes of requests and answers, as OpenAPI shows them."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field

from clip_deploy.indexes.port import MAX_TEXT_CHARACTERS

MOST_RESULTS = 100
DEFAULT_RESULTS = 12
MOST_INPUTS = 2048  # OpenAI's own bound
# Eight pixels square, so that the example can be sent as it stands.
_RED_SQUARE = "iVBORw0KGgoAAAANSUhEUgAAAAgAAAAICAIAAABLbSncAAAAFUlEQVR42mM8IafBgA0wMeAAg1MCANh8AR6FrdlEAAAAAElFTkSuQmCC"
_DIGEST = "9f2c4b1e6d8a70355b1c2f9e0d4a8c7b6e5f4d3c2b1a09887766554433221100"


class Model(BaseModel):
    """The model that the vectors come from."""

    name: str = Field(examples=["ViT-B-32"])
    pretrained: str = Field(examples=["laion2b_s34b_b79k"])
    trained: bool = Field(description="False for random weights, whose vectors mean nothing.")
    weights_sha256: str = Field(examples=[_DIGEST])


class TextQuery(BaseModel):
    """Words to search with."""

    model_config = ConfigDict(extra="forbid")

    text: str = Field(
        min_length=1,
        pattern=r"\S",
        max_length=MAX_TEXT_CHARACTERS,
        examples=["a red bicycle by the sea"],
    )
    limit: int = Field(DEFAULT_RESULTS, ge=1, le=MOST_RESULTS)
    mode: Literal["hybrid", "vector", "text"] = Field(
        "hybrid",
        description="By the vector of the words, by the words in captions, or by both.",
    )


class Result(BaseModel):
    """One picture that was found."""

    id: str = Field(examples=["bicycles/red.jpg"])
    score: float = Field(examples=[0.0328])
    caption: str = Field(examples=["a red bicycle leans on a wall"])
    source: str = Field(examples=["bicycles/red.jpg"])
    thumbnail: str = Field(examples=["/api/v1/images/bicycles/red.jpg"])
    cosine: float | None = Field(description="Of the two vectors.", examples=[0.31])
    vector_rank: int | None = Field(description="Its place by vectors alone.", examples=[1])
    text_rank: int | None = Field(description="Its place by words alone.", examples=[2])


class SearchAnswer(BaseModel):
    """Pictures, best first."""

    results: list[Result]
    model: Model
    timings_ms: dict[str, float] = Field(
        examples=[{"prepare": 3.1, "embed": 12.0, "search": 1.2, "total": 16.8}]
    )
    request_id: str = Field(examples=["4f1d6c0a9b7e4c55"])


class IndexStatus(BaseModel):
    """What is searched."""

    items: int
    place: str = Field(examples=["photos.index"])
    engine: str = Field(examples=["lancedb"])


class Status(BaseModel):
    """What this gateway is made of; ``model`` is null while Triton was not reached yet."""

    ready: bool
    reason: str | None
    index: IndexStatus | None
    model: Model | None
    version: str


class Ready(BaseModel):
    """Whether requests can be answered now."""

    ready: bool
    reason: str | None
    model: Model | None


class EmbeddingQuery(BaseModel):
    """Texts and images, in the shape of OpenAI's and NV-CLIP's requests."""

    model_config = ConfigDict(
        json_schema_extra={
            "examples": [
                {
                    "input": ["a photo of a cat", f"data:image/png;base64,{_RED_SQUARE}"],
                    "encoding_format": "float",
                }
            ]
        }
    )

    input: str | Annotated[list[str], Field(max_length=MOST_INPUTS)] = Field(
        description="Texts, and images as `data:image/…;base64,…`, in any order."
    )
    model: str | None = Field(None, description="As `/v1/models` names it; may be left out.")
    encoding_format: Literal["float", "base64"] = "float"
    dimensions: int | None = Field(
        None, description="The length of the vectors; no other can be asked for."
    )
    user: str | None = Field(None, description="Ignored.")


class Embedding(BaseModel):
    """One vector, of unit length; as base64 it is little-endian float32."""

    object: Literal["embedding"] = "embedding"
    index: int
    embedding: list[float] | str


class Usage(BaseModel):
    """What was embedded."""

    prompt_tokens: int
    total_tokens: int
    num_images: int


class EmbeddingAnswer(BaseModel):
    """Vectors, in the order of the input."""

    object: Literal["list"] = "list"
    data: list[Embedding]
    model: str
    usage: Usage


class ModelCard(BaseModel):
    """A name under which the model can be asked for."""

    id: str = Field(examples=["ViT-B-32"])
    object: Literal["model"] = "model"
    created: int = 0
    owned_by: str = "clip-deploy"


class ModelCards(BaseModel):
    """Names under which the model can be asked for."""

    object: Literal["list"] = "list"
    data: list[ModelCard]
