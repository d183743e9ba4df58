"""The search: the default first, then what the optimiser proposes, then the best against the default once more."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from clip_deploy.bench.figures import Load, Run
from clip_deploy.errors import CheckFailed, ServerError
from clip_deploy.tune.optimiser import Optimiser
from clip_deploy.tune.space import Settings
from clip_deploy.tune.trials import Phase, Trial, fault

if TYPE_CHECKING:
    from clip_deploy.tune.space import Space
    from clip_deploy.tune.trials import Goal, Study

# Serves settings, checks the answers, and measures them under a load.
Measure = Callable[[Settings, Load], Run]
Watch = Callable[[Trial, "Progress"], None]

FINALISTS = 2
ROUNDS = 3
# Settings replace the default only when they are better in every round, and by this much in the middle one.
_LEAST_GAIN = 1.02


class Unservable(Exception):
    """What ``Measure`` raises for settings that the server refuses or answers wrongly with; others may do."""


@dataclass(frozen=True, slots=True)
class Progress:
    """How far a search is: trials done and planned, and the best that fits so far."""

    done: int
    planned: int
    best: Trial | None


@dataclass(frozen=True, slots=True)
class Contender:
    """Settings in the final rounds, which were measured in turn with the default.

    Args:
        settings: what was measured.
        runs: one per round.
        gains: per round, its worth by that of the default in the same round; 1 for the default itself.
        fits: whether every round counts, and the middle p99 keeps the budget.
        is_better: whether it beats the default by more than chance gives, or keeps a budget that the default breaks.
    """

    settings: Settings
    runs: tuple[Run, ...]
    gains: tuple[float, ...]
    fits: bool
    is_better: bool = False

    @property
    def throughput(self) -> float:
        return statistics.median(run.throughput for run in self.runs)

    @property
    def p99_s(self) -> float:
        return _middle_p99(self.runs)

    @property
    def gain(self) -> float:
        return statistics.median(self.gains) if self.gains else 0.0

    def against(self, default: Contender) -> Contender:
        """Itself, and whether it is better."""
        gains = bool(self.gains) and min(self.gains) > 1 and self.gain >= _LEAST_GAIN
        return replace(self, is_better=self.fits and (gains or not default.fits))


@dataclass(frozen=True, slots=True)
class Outcome:
    """What a search found.

    Args:
        goal: what was asked.
        default: the settings as they were, in the final rounds.
        contenders: the others of the final rounds, the best first.
        winner: the contender that takes the default's place; None when nothing beats it.
        trials: everything that was measured.
        size: how many settings there were to choose from.
    """

    goal: Goal
    default: Contender
    contenders: tuple[Contender, ...]
    winner: Contender | None
    trials: tuple[Trial, ...]
    size: int

    @property
    def finalists(self) -> tuple[Contender, ...]:
        """Everything of the final rounds, the default first."""
        return (self.default, *self.contenders)

    @property
    def searched(self) -> tuple[Trial, ...]:
        """The trials of the search alone."""
        return tuple(trial for trial in self.trials if trial.phase is Phase.SEARCH)


def planned_trials(space: Space) -> int:
    """As many as make a third of the space with the final rounds, but 8 at least and 60 at most."""
    size = len(list(space))
    return min(size, max(8, size // 3 - ROUNDS * (FINALISTS + 1)), 60)


def search(
    space: Space,
    goal: Goal,
    measure: Measure,
    study: Study,
    *,
    trials: int,
    seed: int = 0,
    watch: Watch = lambda trial, progress: None,
) -> Outcome:
    """Find the settings that serve the goal's load best.

    Everything that ``study`` holds already is taken as measured.

    Raises:
        CheckFailed: no settings keep the budget, or the settings as they are give no right answers.
        ServerError: the server died.
    """
    searching = _Searching(space, goal, measure, study, trials, watch)
    searching.begin()
    searching.explore(Optimiser(space, seed))
    return searching.decide()


@dataclass(slots=True)
class _Searching:
    space: Space
    goal: Goal
    measure: Measure
    study: Study
    planned: int
    watch: Watch

    def begin(self) -> None:
        """The settings as they are; where they break the budget, whether anything can keep it."""
        known = self.study.of(Phase.SEARCH)
        first = (
            known[0] if known else self._try(Phase.SEARCH, self.space.default, keep_failure=False)
        )
        if first.failure:
            raise CheckFailed(
                f"the settings as they are cannot be measured: {first.failure}",
                remedy="run clip-deploy smoke-test, and see the server's log",
            )
        if not first.fits(self.goal):
            self._require_possible()

    def _require_possible(self) -> None:
        known = self.study.of(Phase.ALONE)
        alone = known[0] if known else self._try(Phase.ALONE, self.space.least, Load(users=1))
        if alone.p99_s > self.goal.p99_s and not alone.failure:
            least = min(trial.p99_s for trial in self.study.trials)
            raise CheckFailed(
                f"no settings can keep a p99 of {_ms(self.goal.p99_s)}: one user alone, with no delay and no batch, "
                f"waits {_ms(least)}",
                remedy=f"ask for more than --p99-ms {least * 1e3:.0f}, or serve a smaller model or a faster machine",
            )

    def explore(self, optimiser: Optimiser) -> None:
        """Measure what the optimiser proposes, until the planned trials are done."""
        for trial in self.study.of(Phase.SEARCH):
            optimiser.learn(trial.settings, trial.score(self.goal))
        while len(self.study.of(Phase.SEARCH)) < self.planned:
            proposal = optimiser.propose()
            if proposal is None:
                return
            trial = self._try(Phase.SEARCH, proposal)
            optimiser.learn(proposal, trial.score(self.goal))

    def decide(self) -> Outcome:
        """Measure the best and the default in turn: a lucky trial is no reason to change anything."""
        fitting = [trial for trial in self.study.of(Phase.SEARCH) if trial.fits(self.goal)]
        if not fitting:
            raise self._impossible(self.study.of(Phase.SEARCH))
        ranked = sorted(fitting, key=lambda trial: trial.score(self.goal) or 0, reverse=True)
        best = [trial.settings for trial in ranked if trial.settings != self.space.default]
        lined_up = [self.space.default, *best[:FINALISTS]]
        for number in range(ROUNDS):
            for settings in lined_up if number % 2 == 0 else reversed(lined_up):
                if len(self._final(settings)) <= number:
                    self._try(Phase.FINAL, settings)
        return self._outcome(lined_up)

    def _outcome(self, lined_up: list[Settings]) -> Outcome:
        default, *others = (self._contender(settings) for settings in lined_up)
        others = [contender.against(default) for contender in others]
        if not default.fits and not any(contender.fits for contender in others):
            raise self._impossible(self.study.of(Phase.FINAL))
        others.sort(key=lambda c: (c.is_better, c.fits, c.gain), reverse=True)
        winner = others[0] if others and others[0].is_better else None
        trials, size = tuple(self.study.trials), len(list(self.space))
        return Outcome(self.goal, default, tuple(others), winner, trials, size)

    def _contender(self, settings: Settings) -> Contender:
        mine, default = self._final(settings), self._final(self.space.default)
        runs = tuple(trial.run for trial in mine if trial.run and not trial.failure)
        pairs = [(a, b) for a, b in zip(mine, default) if not a.failure and not b.failure]
        gains = tuple(self.goal.worth(a.run) / self.goal.worth(b.run) for a, b in pairs)
        fits = len(runs) == len(mine) and _middle_p99(runs) <= self.goal.p99_s
        return Contender(settings, runs, gains, fits)

    def _final(self, settings: Settings) -> list[Trial]:
        finals = self.study.of(Phase.FINAL)
        return [trial for trial in finals if trial.settings == settings][:ROUNDS]

    def _try(
        self,
        phase: Phase,
        settings: Settings,
        load: Load | None = None,
        *,
        keep_failure: bool = True,
    ) -> Trial:
        """Measure once; settings that cannot be served are a result like any other, and are not tried again."""
        began = time.monotonic()
        trial = Trial(phase, settings, None)
        try:
            run = self.measure(settings, load or self.goal.load)
            trial = replace(trial, run=run, failure=fault(run))
        except Unservable as refusal:
            trial = replace(trial, failure=str(refusal))
        except ServerError as error:  # the server died, perhaps of these settings: not once more
            if keep_failure:
                self.study.add(replace(trial, failure=str(error)))
            raise
        trial = replace(trial, seconds=time.monotonic() - began)
        if keep_failure or not trial.failure:
            self.study.add(trial)
            self.watch(trial, self._progress())
        return trial

    def _progress(self) -> Progress:
        searched = self.study.of(Phase.SEARCH)
        fitting = [trial for trial in searched if trial.fits(self.goal)]
        best = max(fitting, key=lambda trial: trial.score(self.goal) or 0, default=None)
        return Progress(len(searched), self.planned, best)

    def _impossible(self, trials: list[Trial]) -> CheckFailed:
        nearest = min(trials, key=lambda trial: trial.p99_s)
        again = " when measured again" if nearest.phase is Phase.FINAL else ""
        return CheckFailed(
            f"none of {len({trial.settings for trial in trials})} settings keeps {self.goal}{again}; "
            f"the least p99 was {_ms(nearest.p99_s)} ({nearest.settings})",
            remedy="allow more with --p99-ms, ask less of it, or search longer with --trials",
        )


def _middle_p99(runs: tuple[Run, ...]) -> float:
    latencies = [run.latency.p99_s for run in runs if run.latency]
    return statistics.median(latencies) if latencies else float("inf")


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:.1f} ms"
