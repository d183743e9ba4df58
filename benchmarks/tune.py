"""Whether a search finds what an exhaustive grid finds, measured in one run on the real embedded server.

    python benchmarks/tune.py [REPOSITORY] [--users N] [--p99-ms N] [--duration S] [--keep DIR] [--json FILE]

- tune ÷ grid: throughput of the settings that ``clip-deploy tune`` chooses, against the best of all settings of the
  same space, every one of which is measured. Both are measured again in turn at the end, since the greatest of many
  noisy figures flatters. Bar ≥ 0.95.
- measurements, tune ÷ grid: all that the search measured, its final rounds included, against the settings of the grid.
  Bar ≤ 1/3.

Without a repository, a ViT-B-32 with random weights is exported and served. With --keep, an interrupted run goes on
where it was. Exit code 1 when a bar is missed.
"""

from __future__ import annotations

import argparse
import contextlib
import statistics
import sys
import tempfile
from dataclasses import replace
from pathlib import Path

from figures import Figure, figure, report

from clip_deploy import repository as repositories
from clip_deploy.bench.figures import Load
from clip_deploy.report.tunes import line, result
from clip_deploy.servers import LAUNCHERS, ServerOptions
from clip_deploy.spec import EncoderSpec, ServingSpec, Tower
from clip_deploy.tune.report import ConfigFile
from clip_deploy.tune.search import Unservable, planned_trials, search
from clip_deploy.tune.serving import TunedModel, server_arguments
from clip_deploy.tune.space import Settings
from clip_deploy.tune.trials import Goal, Phase, Study, Trial, fault

MODEL = "ViT-B-32"
BEST_OF_GRID = 3
ROUNDS = 3


def compare(served: TunedModel, goal: Goal, keep: Path, seed: int) -> list[Figure]:
    space = served.space(goal)
    identity = served.identity(goal, space)
    grid = Study.open(keep / "grid.jsonl", identity)
    everything = list(space)
    known = {trial.settings for trial in grid.trials}
    for number, settings in enumerate(everything):
        if settings not in known:
            _measure(
                served, goal, grid, Phase.SEARCH, settings, f"grid {number + 1}/{len(everything)}"
            )
    outcome = search(
        space,
        goal,
        served,
        Study.open(keep / "tune.jsonl", identity),
        trials=planned_trials(space),
        seed=seed,
        watch=lambda trial, progress: print(line(trial, progress, goal), flush=True),
    )
    chosen = (outcome.winner or outcome.default).settings
    return _figures(served, goal, grid, chosen, len(outcome.trials), len(everything))


def _figures(
    served: TunedModel, goal: Goal, grid: Study, chosen: Settings, trials: int, size: int
) -> list[Figure]:
    """Ratios of rounds in which the chosen settings and the grid's best are measured in turn."""
    fitting = [trial for trial in grid.of(Phase.SEARCH) if trial.fits(goal)]
    ranked = sorted(fitting, key=lambda trial: -(trial.score(goal) or 0))
    rivals = [trial.settings for trial in ranked[:BEST_OF_GRID]]
    ratios, last = [], []
    for number in range(ROUNDS):
        lined_up = [chosen, *rivals] if number % 2 == 0 else [*reversed(rivals), chosen]
        runs = {
            settings: _measure(served, goal, grid, Phase.FINAL, settings, f"round {number + 1}")
            for settings in dict.fromkeys(lined_up)
        }
        last.append({settings: trial.run.throughput for settings, trial in runs.items()})
        ratios.append(last[-1][chosen] / max(last[-1][rival] for rival in rivals))
    print(f"tune: {chosen}\ngrid: {rivals[0]}")
    parts = {
        "chosen_per_s": statistics.median(each[chosen] for each in last),
        "grid_best_per_s": statistics.median(max(each[r] for r in rivals) for each in last),
        "default_per_s_once": next(
            trial.run.throughput
            for trial in grid.of(Phase.SEARCH)
            if trial.settings == served.space(goal).default
        ),
        "worst_per_s_once": min(trial.run.throughput for trial in grid.trials if trial.run),
    }
    return [
        figure("throughput, best of tune ÷ best of grid", ratios, 0.95, False, parts),
        figure(
            "measurements, tune ÷ grid",
            [trials / size],
            1 / 3,
            True,
            {"tune": float(trials), "grid": float(size)},
        ),
    ]


def _measure(
    served: TunedModel, goal: Goal, study: Study, phase: Phase, settings: Settings, what: str
) -> Trial:
    trial = Trial(phase, settings, None)
    try:
        run = served(settings, goal.load)
        trial = replace(trial, run=run, failure=fault(run))
    except Unservable as refusal:
        trial = replace(trial, failure=str(refusal))
    study.add(trial)
    print(f"{what}: {settings}: {result(trial, goal)}", flush=True)
    return trial


def _rendered(folder: Path) -> Path:
    from clip_deploy.artifacts import exported_models
    from clip_deploy.engines import BACKENDS
    from clip_deploy.export import export

    if not (folder / "models").is_dir():
        export(EncoderSpec(MODEL, "random", towers=(Tower.IMAGE,)), folder)
        (model,) = exported_models([folder])
        repositories.assemble(BACKENDS["python"].build(model), ServingSpec(), folder / "models")
    return folder / "models"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("repository", nargs="?", type=Path)
    parser.add_argument("--tower", default="image", choices=[tower.value for tower in Tower])
    parser.add_argument("--users", type=int, default=32)
    parser.add_argument("--p99-ms", type=float, default=3000)
    parser.add_argument("--duration", type=float, default=3.0)
    parser.add_argument("--keep", type=Path)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json")
    args = parser.parse_args()
    with contextlib.ExitStack() as stack:
        keep = args.keep or Path(stack.enter_context(tempfile.TemporaryDirectory()))
        keep.mkdir(parents=True, exist_ok=True)
        found = repositories.read(args.repository or _rendered(keep))
        name = Tower(args.tower).model_name
        alone = replace(found, models=tuple(m for m in found.models if m.name == name))
        options = ServerOptions(arguments=server_arguments(name))
        handle = stack.enter_context(LAUNCHERS["embedded"].start(alone, options, print))
        before = ConfigFile.read(alone)
        served = TunedModel(
            handle.grpc, alone, before.config, handle, args.duration, min(args.duration, 1)
        )
        goal = Goal(Load(users=args.users), args.p99_ms / 1e3)
        figures = compare(served, goal, keep, args.seed)
    return report(figures, args.json)


if __name__ == "__main__":
    sys.exit(main())
