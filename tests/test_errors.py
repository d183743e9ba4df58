from __future__ import annotations

import pytest

from clip_deploy import errors


def test_every_failure_requires_a_remedy():
    with pytest.raises(TypeError, match="remedy"):
        errors.ConfigError("what")


@pytest.mark.parametrize(
    ("name", "code"),
    [
        ("ConfigError", 2),
        ("InputError", 2),
        ("MissingDependency", 3),
        ("ExportError", 4),
        ("EngineError", 5),
        ("ServerError", 6),
        ("ServerUnavailable", 6),
        ("ServerBusy", 6),
        ("ServerTimeout", 6),
        ("ModelChanged", 6),
        ("CheckFailed", 7),
        ("IndexDamaged", 8),
        ("PublishError", 9),
        ("DestinationBusy", 9),
    ],
)
def test_exit_codes_are_those_of_the_plan(name: str, code: int):
    assert getattr(errors, name).exit_code == code


def test_the_tree_in_the_docstring_names_every_class():
    classes = [
        n
        for n, c in vars(errors).items()
        if isinstance(c, type) and issubclass(c, errors.ClipDeployError)
    ]
    assert all(name in errors.__doc__ for name in classes)


def test_a_missing_extra_names_the_command_that_installs_it():
    with (
        pytest.raises(errors.MissingDependency, match="surely_absent is not installed") as caught,
        errors.extra("export"),
    ):
        import surely_absent  # noqa: F401
    assert caught.value.remedy == "pip install 'clip-deploy[export]'"


def test_a_broken_library_is_told_from_a_missing_one():
    with (
        pytest.raises(errors.MissingDependency, match="does not import: libcuda"),
        errors.extra("gpu"),
    ):
        raise ImportError("libcuda.so.1: cannot open shared object file", name="tensorrt")
