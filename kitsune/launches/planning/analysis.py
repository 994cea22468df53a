"""Analysis of a step's launches: where the time goes, and what limits the gain from more streams. Pure functions."""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from kitsune.launches.model.launch_graph import LaunchGraph
from kitsune.launches.planning.memory_plan import MemoryPlan
from kitsune.launches.planning.schedule import Schedule, critical_path
from kitsune.launches.planning.trace_export import idle_shares

TOP: Final = 10  # how many groups, and how many launches of the critical path, are listed
CHAIN: Final = 0.9  # share of the sum: if the critical path takes as much, streams gain a factor of 1.11 at most
REACHED: Final = 1.05  # a step within this factor of its critical path gains nothing from more streams
SMALL_GAIN: Final = 1.05  # over one stream
BUSY: Final = 0.05  # a stream that is idle for a smaller share of the time counts as always busy
SHORT_WAITS: Final = 2.0  # a launch that takes less than this many waits is short
MANY: Final = 0.5  # share of the launches


@dataclass(frozen=True, slots=True)
class Link:
    """A launch of the critical path. `launch`: its number in the recorded order."""

    launch: int
    name: str
    took_us: float


@dataclass(frozen=True, slots=True)
class LaunchGroup:
    """All launches of one name. `share`: of the sum of all launch times."""

    name: str
    count: int
    total_us: float
    share: float


@dataclass(frozen=True, slots=True)
class Outlook:
    """The predicted result if up to `asked` streams may be used. The fastest plan uses `streams` of them.

    `idle`: for every stream, the share of the time in which nothing runs on it. `pool_bytes`: the peak memory of the
    step's own storages; `naive_bytes`: the same if no memory is reused.
    """

    asked: int
    streams: int
    launches: int
    predicted_us: float
    idle: tuple[float, ...]
    waits: int
    pool_bytes: int
    naive_bytes: int


@dataclass(frozen=True, slots=True)
class Analysis:
    """Where the time of a step goes, and what streams can gain.

    `sum_us`: the time of all launches one after the other. `critical_us`: the time of the critical path, which has
    `critical_launches` launches; the longest of them are in `critical`. `limit`: what prevents a further gain, in one
    sentence.
    """

    launches: int
    sum_us: float
    critical_us: float
    critical_launches: int
    critical: tuple[Link, ...]
    groups: tuple[LaunchGroup, ...]
    outlooks: tuple[Outlook, ...]
    limit: str


def analysed(graph: LaunchGraph, costs_us: Sequence[float], outlooks: Sequence[Outlook], wait_us: float) -> Analysis:
    """The analysis of a step. `outlooks` must not be empty. `wait_us`: the cost of a wait between two streams."""
    path = critical_path(graph, costs_us)
    links = [Link(launch, graph.launches[launch].name, costs_us[launch]) for launch in path]
    critical_us = sum(link.took_us for link in links)
    return Analysis(
        launches=len(costs_us),
        sum_us=sum(costs_us),
        critical_us=critical_us,
        critical_launches=len(links),
        critical=tuple(sorted(links, key=lambda link: (-link.took_us, link.launch))[:TOP]),
        groups=groups(graph, costs_us)[:TOP],
        outlooks=tuple(outlooks),
        limit=limit(costs_us, critical_us, outlooks, wait_us),
    )


def groups(graph: LaunchGraph, costs_us: Sequence[float]) -> tuple[LaunchGroup, ...]:
    """The launches grouped by name, sorted by total time, longest first."""
    times_us: defaultdict[str, list[float]] = defaultdict(list)
    for launch, cost_us in zip(graph.launches, costs_us, strict=True):
        times_us[launch.name].append(cost_us)
    all_us = sum(costs_us) or 1.0
    found = [LaunchGroup(name, len(each), sum(each), sum(each) / all_us) for name, each in times_us.items()]
    return tuple(sorted(found, key=lambda group: (-group.total_us, group.name)))


def outlook(asked: int, schedule: Schedule, memory: MemoryPlan) -> Outlook:
    shares = idle_shares(schedule)
    return Outlook(
        asked=asked,
        streams=len(schedule.used),
        launches=len(schedule.placed),
        predicted_us=schedule.makespan_us,
        idle=tuple(max(0.0, shares[stream]) for stream in schedule.used),  # rounding may give just less than 0
        waits=waits_of(schedule),
        pool_bytes=memory.peak_bytes,
        naive_bytes=memory.naive_bytes,
    )


def waits_of(schedule: Schedule) -> int:
    return sum(len(placed.waits) for placed in schedule.placed)


# In words -------------------------------------------------------------------------------------------------------------


def in_words(costs_us: Sequence[float], schedule: Schedule) -> str:
    """One line about a plan: launches, streams, predicted time and waits."""
    where = f"{counted(len(costs_us), 'launch', 'launches')} on {counted(len(schedule.used), 'stream', 'streams')}"
    times = f"{in_ms(schedule.makespan_us)} predicted, {in_ms(sum(costs_us))} one after the other"
    return f"{where}: {times}; {counted(waits_of(schedule), 'wait', 'waits')}"


def counted(count: int, one: str, many: str) -> str:
    return f"{count} {one if count == 1 else many}"


def in_ms(time_us: float) -> str:
    """Milliseconds with three significant digits."""
    ms = time_us / 1000
    digits = next((digits for digits, least in enumerate((100, 10, 1, 0.1)) if ms >= least), 4)
    return f"{ms:.{digits}f} ms"


def limit(costs_us: Sequence[float], critical_us: float, outlooks: Sequence[Outlook], wait_us: float) -> str:
    """What prevents a further gain, as predicted. Limits that no number of streams can change come first."""
    sum_us = sum(costs_us)
    if not sum_us:
        return "The step launches nothing that takes time."
    if critical_us >= CHAIN * sum_us:
        return f"The critical path is {critical_us / sum_us:.0%} of the sum of all launches: streams cannot help."
    best = min(outlooks, key=lambda each: (each.predicted_us, each.asked))
    if best.predicted_us <= REACHED * critical_us:
        where = counted(best.streams, "stream", "streams")
        return (
            f"On {where} the step takes as long as its critical path: more streams cannot help, shorter launches on "
            "that path can."
        )
    if all(each.asked == 1 for each in outlooks):
        return f"The one stream is busy all the time; others could help, {sum_us / critical_us:.2f} times at most."
    short = sum(cost_us < SHORT_WAITS * wait_us for cost_us in costs_us) / len(costs_us)
    if short >= MANY and sum_us < SMALL_GAIN * best.predicted_us:
        return (
            f"Many short launches: {short:.0%} of them take less than {SHORT_WAITS * wait_us:g} us, and a wait between "
            f"two streams costs {wait_us:g} us, so that moving them does not pay."
        )
    return limit_of_streams(best, max(each.asked for each in outlooks), wait_us)


def limit_of_streams(best: Outlook, most: int, wait_us: float) -> str:
    """Why the best plan does not finish earlier, if up to `most` streams may be used."""
    if max(best.idle) < BUSY and best.streams == most:
        return f"All {most} streams are busy all the time: more of them could help."
    if min(best.idle) < BUSY:
        stream = best.idle.index(min(best.idle))
        return (
            f"Stream {stream} is busy all the time: what runs there is too short to be worth a wait of {wait_us:g} us "
            "on another stream."
        )
    idle = sum(best.idle) / len(best.idle)
    return f"Launches wait for each other: the {best.streams} streams are idle for {idle:.0%} of the time on average."
