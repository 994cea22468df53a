"""Reporter: writes the metrics of a run to a JSON, CSV or HTML file. Reads the JSON file back."""

import csv
import html
import io
import json
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Final

from kitsune.base.atomic_write import write_whole, writing
from kitsune.errors import SettingsError
from kitsune.profiler.columns import shown
from kitsune.profiler.metrics import (
    SUMMARY_HEADER,
    Bottleneck,
    MetricsCollector,
    Series,
    Summary,
    bottlenecks,
    summarized,
)

FORMAT: Final = 1
STYLE: Final = (
    "body{font:15px/1.5 system-ui,sans-serif;max-width:60rem;margin:2rem auto;padding:0 1rem;color-scheme:light dark}"
    "table{border-collapse:collapse;margin-bottom:2rem}th,td{padding:.2rem .8rem;text-align:right}"
    "th:first-child,td:first-child{text-align:left}tr{border-bottom:1px solid #8884}meter{width:16rem}"
)


@dataclass(frozen=True, slots=True)
class Reporter:
    """Writes the current contents of a MetricsCollector to files.

    Files are written atomically and replace existing ones. Every method raises SettingsError when the file cannot be
    written.
    """

    metrics: MetricsCollector

    def save_json(self, path: str | Path) -> None:
        """Writes raw values and summaries by name, and the shares of the time. `compare_runs` reads the file."""
        every = self.metrics.series
        value = {
            "format": FORMAT,
            "metrics": {
                name: {"unit": one.unit, "values": one.values, "summary": asdict(summarized(one))}
                for name, one in every.items()
            },
            "bottlenecks": [asdict(one) for one in bottlenecks(every)],
        }
        _written(Path(path), json.dumps(value, indent=2, allow_nan=False) + "\n")

    def save_csv(self, path: str | Path) -> None:
        """Writes the raw values, one a line: name, unit, index within the name, value."""
        text = io.StringIO(newline="")
        writer = csv.writer(text)
        writer.writerow(("name", "unit", "index", "value"))
        for name, one in self.metrics.series.items():
            writer.writerows((name, one.unit, index, repr(value)) for index, value in enumerate(one.values))
        _written(Path(path), text.getvalue())

    def save_html(self, path: str | Path) -> None:
        """Writes a self-contained page with the summaries and the shares of the time."""
        every = self.metrics.series
        body = _summary_table({name: summarized(one) for name, one in every.items()}) + _share_table(bottlenecks(every))
        page = (
            '<!doctype html>\n<html lang="en"><head><meta charset="utf-8"><title>Kitsune: metrics of a run</title>'
            f"<style>{STYLE}</style></head>\n<body><h1>Metrics of a run</h1>\n{body}</body></html>\n"
        )
        _written(Path(path), page)


def read_series(path: str | Path) -> dict[str, Series]:
    """The raw values in a file of `Reporter.save_json`. Raises SettingsError for another file."""
    try:
        saved = json.loads(Path(path).read_bytes())
        if saved["format"] != FORMAT:
            raise SettingsError(f"{path} has the format {saved['format']!r:.100}; this Kitsune reads {FORMAT}")
        return {
            str(name): Series(str(one["unit"]), tuple(map(float, one["values"])))
            for name, one in saved["metrics"].items()
        }
    except OSError as error:
        raise SettingsError(f"{path} cannot be read: {error.strerror}") from error
    except (ValueError, OverflowError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise SettingsError(f"{path} is not a file of Reporter.save_json: {type(error).__name__}: {error}") from error


def _summary_table(summaries: dict[str, Summary]) -> str:
    rows = [[html.escape(word) for word in (name, *of.words)] for name, of in summaries.items()]
    return _table(SUMMARY_HEADER, rows)


def _share_table(regions: Sequence[Bottleneck]) -> str:
    rows = [
        (
            html.escape(one.name),
            str(one.count),
            shown(one.total_ms),
            shown(one.own_ms),
            f'<meter value="{one.share:.4f}"></meter> {one.share:.1%}',
        )
        for one in regions
    ]
    return _table(("region", "count", "total ms", "own ms", "share of the time"), rows) if rows else ""


def _table(header: Iterable[str], rows: Iterable[Iterable[str]]) -> str:
    """An HTML table of cells that are HTML already."""
    head = "".join(f"<th>{name}</th>" for name in header)
    body = "\n".join("<tr>" + "".join(f"<td>{cell}</td>" for cell in row) + "</tr>" for row in rows)
    return f"<table><thead><tr>{head}</tr></thead>\n<tbody>{body}</tbody></table>\n"


def _written(path: Path, text: str) -> None:
    with writing(str(path)):
        write_whole(path, text.encode())
