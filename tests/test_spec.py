from __future__ import annotations

from dataclasses import FrozenInstanceError

import pytest

from clip_deploy.errors import ConfigError
from clip_deploy.spec import (
    TOLERANCES,
    EncoderSpec,
    Precision,
    Preprocess,
    ServingSpec,
    TensorSpec,
    Tower,
)


def test_the_two_towers_name_their_models_and_tensors():
    assert [(t.model_name, t.input_name, t.output_name) for t in Tower] == [
        ("clip_image_encoder", "pixel_values", "image_embeds"),
        ("clip_text_encoder", "input_ids", "text_embeds"),
    ]


def test_every_precision_has_a_tolerance_for_each_tower():
    assert set(TOLERANCES) == {(precision, tower) for precision in Precision for tower in Tower}


def test_specs_are_frozen():
    with pytest.raises(FrozenInstanceError):
        EncoderSpec("ViT-B-32").model = "other"  # type: ignore[misc]


@pytest.mark.parametrize(
    ("pretrained", "seed"),
    [("random", 0), ("random:7", 7), ("openai", None), (None, None), ("randomly", None)],
)
def test_random_weights_have_a_seed(pretrained: str | None, seed: int | None):
    assert EncoderSpec("ViT-B-32", pretrained).random_seed() == seed


@pytest.mark.parametrize(
    "make",
    [
        lambda: EncoderSpec("ViT-B-32", "random:x"),
        lambda: EncoderSpec("ViT-B-32", max_batch=0),
        lambda: EncoderSpec("ViT-B-32", towers=()),
        lambda: TensorSpec("x", "FP12", (3,)),
        lambda: TensorSpec("x", "FP32", (3, -1)),
        lambda: TensorSpec("x", "FP32", ()),
        lambda: Preprocess((224, 224), (0.5,) * 3, (0.5,) * 3, "zoom", "bicubic"),
        lambda: Preprocess((224, 224), (0.5,) * 3, (0.5,) * 3, "squash", "lanczos"),
        lambda: Preprocess((224, 224), (0.5,) * 3, (0.5, 0.5, 0.0), "squash", "bicubic"),
        lambda: Preprocess((224, 224), (0.5, float("nan"), 0.5), (0.5,) * 3, "squash", "bicubic"),
        lambda: Preprocess((0, 224), (0.5,) * 3, (0.5,) * 3, "squash", "bicubic"),
        lambda: ServingSpec(max_batch=-1),
        lambda: ServingSpec(queue_delay_us=-1),
        lambda: ServingSpec(instances=0),
        lambda: ServingSpec(kind="tpu"),
        lambda: ServingSpec(gpus=(0,)),
        lambda: ServingSpec(kind="gpu", gpus=(0, 0)),
        lambda: ServingSpec(timeout_action="drop"),
        lambda: ServingSpec(timeout_action="delay"),
        lambda: ServingSpec(parameters={"clip_deploy.tower": "image"}),
        lambda: ServingSpec(version_policy="newest"),
        lambda: ServingSpec(version_policy="latest:0"),
        lambda: ServingSpec(version_policy="specific:"),
        lambda: ServingSpec(version_policy="all:3"),
    ],
)
def test_nonsense_is_refused_on_construction_with_a_remedy(make):
    with pytest.raises(ConfigError) as caught:
        make()
    assert caught.value.remedy


@pytest.mark.parametrize(
    ("policy", "choice"),
    [("latest:2", ("latest", (2,))), ("all", ("all", ())), ("specific:1,3", ("specific", (1, 3)))],
)
def test_version_policies_are_read(policy: str, choice: tuple):
    assert ServingSpec(version_policy=policy).version_policy_choice() == choice
