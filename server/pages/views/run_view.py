"""The view of the page of a run."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime

from kitsune.class_tables import ClassTables
from kitsune.plan import Plan
from kitsune.timeline import Timeline
from server.api.traces import why_no_timeline
from server.charts.pareto import Point
from server.charts.samples import Strip
from server.charts.search import TrialPoint
from server.charts.waterfall import Bar
from server.pages.views import (
    choices_view,
    facts_view,
    figures_view,
    headline_view,
    progress_view,
    snippet_view,
    trials_view,
)
from server.pages.views.budget_view import SpentView, UntriedView, spent_view, untried_view
from server.pages.views.choices_view import ChoiceRow
from server.pages.views.class_view import ClassView, class_view
from server.pages.views.contributions import contributions_of
from server.pages.views.headline_view import Headline
from server.pages.views.progress_view import Progress
from server.pages.views.snippet_view import Snippet
from server.pages.views.timeline_view import TimelineView, timeline_view
from server.pages.views.trials_view import Noise, TrialRow
from tuner.planning.ablation import UNREACHED, Ablation, in_order, reasons_of
from tuner.records import Run, RunStatus, Trial
from tuner.store.queries.runs import label_of
from tuner.terminal.views import standing


@dataclass(frozen=True, slots=True)
class NewsView:
    """The parts of the page that change while the run goes on."""

    headline: Headline
    standing: str
    progress: Progress | None
    tried: tuple[TrialPoint, ...]
    trials: tuple[TrialRow, ...]


@dataclass(frozen=True, slots=True)
class RunView(NewsView):
    """The page of a run."""

    title: str
    bars: tuple[Bar, ...]
    bars_note: str
    unmeasured: tuple[tuple[str, str], ...]
    choices: tuple[ChoiceRow, ...]
    choices_note: str
    outcomes: tuple[str, ...]
    points: tuple[Point, ...]
    strips: tuple[Strip, ...]
    same_strips: tuple[Strip, ...]
    noise: Noise | None
    untried: UntriedView | None
    spent: SpentView | None
    facts: tuple[tuple[str, str], ...]
    again: str
    again_note: str
    snippets: tuple[Snippet, ...]
    classes: ClassView | None
    timeline: TimelineView | None
    timeline_note: str


def run_view(
    run: Run,
    trials: Sequence[Trial],
    plan: Plan | None,
    now: datetime,
    server: str | None,
    timeline: Timeline | None = None,
    tables: ClassTables | None = None,
) -> RunView:
    """The whole page. `server`: the URL from which the viewer can fetch the plan; None if they have no access."""
    ablation = contributions_of(run, trials, plan)
    choices = choices_view.choice_rows(run, trials, plan) if run.environment is not None else ()
    return RunView(
        title=label_of(run),
        headline=headline_view.headline(run, trials, plan, now),
        standing=standing(run, now),
        progress=progress_view.progress(run, trials, now),
        bars=figures_view.bars(plan, ablation),
        bars_note=bars_note(run, trials, plan, ablation),
        unmeasured=tuple(unmeasured(run, ablation)),
        choices=choices,
        choices_note=choices_view.plan_note(trials, plan),
        outcomes=tuple(choices_view.by_outcome(choices)),
        points=figures_view.points(trials, plan),
        tried=figures_view.tried(trials),
        strips=figures_view.strips(trials),
        same_strips=figures_view.same_strips(trials),
        noise=trials_view.noise(trials),
        trials=trials_view.trial_rows(trials, plan.knobs if plan else None),
        untried=untried_view(run, trials, plan),
        spent=spent_view(trials),
        facts=facts_view.provenance(run),
        again=facts_view.again(run),
        again_note=facts_view.again_note(run),
        snippets=snippet_view.snippets(run, plan, server) if plan is not None else (),
        classes=class_view(run, plan, tables, timeline) if plan is not None else None,
        timeline=timeline_view(timeline) if timeline is not None else None,
        timeline_note=why_no_timeline(run, trials, plan) if plan is not None and timeline is None else "",
    )


def news_view(run: Run, trials: Sequence[Trial], plan: Plan | None, now: datetime) -> NewsView:
    """The changing parts only, in a tenth of the time of `run_view`."""
    return NewsView(
        headline=headline_view.headline(run, trials, plan, now),
        standing=standing(run, now),
        progress=progress_view.progress(run, trials, now),
        tried=figures_view.tried(trials),
        trials=trials_view.trial_rows(trials, plan.knobs if plan else None),
    )


def bars_note(run: Run, trials: Sequence[Trial], plan: Plan | None, ablation: Ablation | None) -> str:
    """How the bars of the waterfall were measured, or why they were not."""
    if ablation is not None:
        return (
            f"Each choice was removed from the plan alone, in {ablation.blocks} blocks interleaved with the plan and "
            "the step as given. A choice that others need was removed together with them, and compared with the plan "
            "without them. The whiskers are 95 % intervals. The effects of choices do not add up; the interaction is "
            "the rest of the gain. These measurements are separate from the verdict above."
        )
    if plan is None or not plan.knobs:
        return ""
    if run.status is RunStatus.RUNNING:
        return "What each choice gives is being measured."
    known = reasons_of(plan.knobs, trials, run.inapplicable)
    reasons = {knob: known.get(knob, UNREACHED) for knob in in_order(plan.knobs)}
    if set(reasons.values()) == {UNREACHED}:
        return "What each choice gives was not measured: the run ended before that."
    return f"What each choice gives was not measured. {'; '.join(_by_reason(reasons))}."


def unmeasured(run: Run, ablation: Ablation | None) -> Iterator[tuple[str, str]]:
    """The knobs of the plan that were not measured alone, with the reason."""
    for knob, reason in ablation.unmeasured.items() if ablation else ():
        is_coming = reason == UNREACHED and run.status is RunStatus.RUNNING
        yield knob, "its turn has not come" if is_coming else reason


def _by_reason(reasons: Mapping[str, str]) -> Iterator[str]:
    """ "precision, compile: out of memory"."""
    for reason in dict.fromkeys(reasons.values()):
        knobs = ", ".join(knob for knob, why in reasons.items() if why == reason)
        yield f"{knobs}: {reason.removesuffix('.')}"
