"""Which settings to measure next: Optuna's Tree-structured Parzen Estimator over the places of the values."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING, Any

from clip_deploy.errors import extra
from clip_deploy.tune.space import Settings

if TYPE_CHECKING:
    from optuna.distributions import BaseDistribution

    from clip_deploy.tune.space import Space

_FAILED = -1e9  # only the order of scores matters to the estimator, and this is last


def library() -> Any:
    """Optuna.

    Raises:
        MissingDependency: it is not installed.
    """
    with extra("tune"):
        import optuna
    return optuna


class Optimiser:
    """Proposes settings of a space, none of them twice.

    Each knob is an ordered axis, whatever its unit: neighbours serve alike, and that is all the estimator must know.
    Landmarks come first (the default, then each knob alone at its ends), because few trials must do.

    Args:
        space: where to look.
        seed: equal seeds and equal scores give equal proposals.
    """

    def __init__(self, space: Space, seed: int) -> None:
        self._optuna = optuna = library()
        optuna.logging.set_verbosity(optuna.logging.WARNING)
        self._space = space
        self._open = set(space)
        self._landmarks = landmarks(space)
        self._random = random.Random(seed)  # noqa: S311  # for ties
        sampler = optuna.samplers.TPESampler(
            seed=seed, multivariate=True, n_startup_trials=len(self._landmarks)
        )
        self._study = optuna.create_study(direction="maximize", sampler=sampler)
        self._axes: dict[str, BaseDistribution] = {
            name: optuna.distributions.IntDistribution(0, len(values) - 1)
            for name, values in space.values.items()
        }

    def propose(self) -> Settings | None:
        """What to measure next; None when all of the space has been measured."""
        if not self._open:
            return None
        if ahead := [each for each in self._landmarks if each in self._open]:
            return ahead[0]
        if len(self._study.trials) % 2 and (near := self._beside_the_best()):
            return near
        asked = self._study.ask(self._axes)
        self._study.tell(asked, state=self._optuna.trial.TrialState.FAIL)  # told by its settings
        return min(self._open, key=lambda each: (self._distance(each, asked.params), self._tie()))

    def learn(self, settings: Settings, score: float | None) -> None:
        """What a proposal was worth, more being better; None where it could not be measured."""
        self._open.discard(settings)
        trial = self._optuna.trial.create_trial(
            params=self._places(settings),
            distributions=self._axes,
            value=_FAILED if score is None else score,
        )
        self._study.add_trial(trial)

    def _beside_the_best(self) -> Settings | None:
        """Unmeasured settings one step from the best so far, along one axis."""
        places = self._study.best_trial.params
        steps = [
            places | {name: places[name] + step}
            for name, values in self._space.values.items()
            for step in (-1, 1)
            if 0 <= places[name] + step < len(values)
        ]
        near = {self._space.plain(self._at(each)) for each in steps} & self._open
        return self._random.choice(sorted(near)) if near else None

    def _at(self, places: dict[str, int]) -> Settings:
        return Settings(**{name: self._space.values[name][at] for name, at in places.items()})

    def _places(self, settings: Settings) -> dict[str, int]:
        return {
            name: values.index(getattr(settings, name))
            for name, values in self._space.values.items()
        }

    def _distance(self, settings: Settings, wanted: dict[str, int]) -> float:
        """How far settings are from what was asked for, each axis counted from 0 to 1."""
        places = self._places(settings)
        return sum(
            abs(places[name] - wanted[name]) / max(len(values) - 1, 1)
            for name, values in self._space.values.items()
        )

    def _tie(self) -> float:
        return self._random.random()


def landmarks(space: Space) -> list[Settings]:
    """The default, then each knob alone at its ends."""
    default = space.default.to_json()
    ends = [
        space.plain(Settings(**default | {name: value}))
        for name, values in space.values.items()
        for value in (values[0], values[-1])
    ]
    return list(dict.fromkeys(each for each in (space.default, *ends) if space.is_bearable(each)))
