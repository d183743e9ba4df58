"""What a key of clip-deploy.toml is: a row of the table in ``keys``."""

from __future__ import annotations

from dataclasses import MISSING, dataclass, fields
from enum import Enum
from typing import TYPE_CHECKING, Any

from clip_deploy.deploy.kinds import written
from clip_deploy.deploy.nouns import Checks, Deployment, Publishing
from clip_deploy.engines.tensorrt.building import BuildOptions
from clip_deploy.servers import ServerOptions
from clip_deploy.spec import EncoderSpec, EngineSpec, ServingSpec

if TYPE_CHECKING:
    from collections.abc import Callable

    from clip_deploy.deploy.kinds import Kind

_CLASSES = {
    each.__name__: each
    for each in (
        *(EncoderSpec, EngineSpec, BuildOptions, ServingSpec, ServerOptions),
        *(Checks, Publishing, Deployment),
    )
}


@dataclass(frozen=True, slots=True)
class Key:
    """One key.

    Args:
        flag: the command and its option that say the same; an argument of the command is in capitals.
        attribute: the class and its field in the Python API.
        default: where it is not the field's; as the file would have it.
        choices: the words that it may be.
        made: the file's value → the field's.
        example: how it is written, where there is no default to show.
    """

    table: str
    name: str
    kind: Kind
    flag: str
    attribute: str
    help: str
    choices: tuple[str, ...] = ()
    made: Callable[[Any], Any] = lambda value: value
    default: str = ""
    example: str = ""

    @property
    def path(self) -> str:
        return f"{self.table}.{self.name}"

    @property
    def owner(self) -> str:
        return self.attribute.partition(".")[0]

    @property
    def field(self) -> str:
        return self.attribute.partition(".")[2]

    @property
    def is_required(self) -> bool:
        return not self.default and _field_default(self) is MISSING

    def default_value(self) -> Any:
        """What stands where the file says nothing, as the file would have it; None for nothing."""
        value = self.default or _field_default(self)
        return None if value is MISSING else as_written(value)

    def shown(self) -> str:
        """The default as the file would have it; where there is none, how a value is written."""
        default = self.default_value()
        if default not in (None, [], {}):
            return written(default)
        if self.choices and not self.example:
            is_list = self.kind.example.startswith("[")
            return written([self.choices[0]] if is_list else self.choices[0])
        return self.example or self.kind.example


def _field_default(key: Key) -> Any:
    row = next(each for each in fields(_CLASSES[key.owner]) if each.name == key.field)
    return row.default_factory() if row.default_factory is not MISSING else row.default


def as_written(value: Any) -> Any:
    if isinstance(value, Enum):
        return value.value
    if isinstance(value, (tuple, list)):
        return [as_written(each) for each in value]
    return value
