"""CD209: comments that would silence a finding."""

from __future__ import annotations

from typing import TYPE_CHECKING

from clip_deploy.lint.findings import RULES, Example, Hit, Severity, rule
from clip_deploy.lint.suppression import suppressions

if TYPE_CHECKING:
    from collections.abc import Iterator

    from clip_deploy.lint.model import Model
    from clip_deploy.lint.target import Target


@rule(
    "CD209",
    "suppression",
    Severity.WARNING,
    "A finding is silenced by code and with a reason, for whoever reads the file next.",
    bad="max_batch_size: 8 # clip-deploy: ignore CD508",
    good=Example(config="max_batch_size: 8 # clip-deploy: ignore CD508 clients send whole batches"),
)
def suppression(model: Model, target: Target) -> Iterator[Hit]:
    for each in suppressions(model.document):
        unknown = [code for code in each.codes if code not in RULES]
        if not each.codes:
            yield Hit("an ignore without a code: write ignore CD508 and the reason", each.place)
        elif unknown:
            yield Hit(f"there is no rule {unknown[0]}", each.place)
        elif not each.reason:
            yield Hit(
                f"{', '.join(each.codes)} is ignored without a reason, and so is not ignored",
                each.place,
            )
