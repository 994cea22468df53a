"""One run in three files, which must tell the same numbers."""

import csv
import json
import os
import stat
from html.parser import HTMLParser

import pytest

from kitsune.errors import SettingsError
from kitsune.profiler import MetricsCollector, Reporter
from kitsune.profiler.reporter import read_series

NASTY = '<script>alert("x")</script>, "&'


class Page(HTMLParser):
    def __init__(self, text):
        super().__init__()
        self.tags, self.words, self.links = [], [], []
        self.feed(text)

    def handle_starttag(self, tag, attributes):
        self.tags.append(tag)
        self.links += [value for name, value in attributes if name in ("src", "href")]

    def handle_data(self, data):
        self.words.append(data.strip())


@pytest.fixture
def metrics():
    made = MetricsCollector()
    for value in (1.1, 2.2, 4.5):
        made.record("step", value, "ms")
    made.record(NASTY, 1 / 3)
    return made


def test_json_holds_raw_values_summary_and_shares(metrics, tmp_path):
    Reporter(metrics).save_json(tmp_path / "run.json")
    saved = json.loads((tmp_path / "run.json").read_text("utf-8"))
    assert saved["metrics"]["step"]["values"] == [1.1, 2.2, 4.5]
    assert saved["metrics"]["step"]["summary"]["mean"] == metrics.summary()["step"].mean == pytest.approx(2.6)
    assert saved["metrics"]["step"]["summary"]["median"] == 2.2
    assert [(one["name"], one["share"]) for one in saved["bottlenecks"]] == [("step", 1.0)]


def test_what_is_read_back_is_what_was_recorded(metrics, tmp_path):
    Reporter(metrics).save_json(str(tmp_path / "run.json"))
    back = read_series(str(tmp_path / "run.json"))
    assert {name: (one.unit, one.values) for name, one in back.items()} == {
        "step": ("ms", (1.1, 2.2, 4.5)),
        NASTY: ("", (1 / 3,)),
    }


def test_csv_holds_the_raw_values(metrics, tmp_path):
    Reporter(metrics).save_csv(tmp_path / "run.csv")
    with (tmp_path / "run.csv").open(newline="", encoding="utf-8") as file:
        header, *rows = csv.reader(file)
    assert header == ["name", "unit", "index", "value"]
    assert rows[:3] == [["step", "ms", "0", "1.1"], ["step", "ms", "1", "2.2"], ["step", "ms", "2", "4.5"]]
    assert (rows[3][0], float(rows[3][3])) == (NASTY, 1 / 3)
    assert len(rows) == 4


def test_html_holds_the_summary_loads_nothing_and_runs_no_name(metrics, tmp_path):
    Reporter(metrics).save_html(tmp_path / "run.html")
    text = (tmp_path / "run.html").read_text("utf-8")
    page = Page(text)
    assert not {"script", "link", "img", "iframe"} & set(page.tags)
    assert page.links == []
    assert "url(" not in text
    assert NASTY in page.words
    mean, median = metrics.summary()["step"].words[1:3]
    assert {mean, median} <= set(page.words)
    assert "100.0%" in page.words


def test_a_run_without_values_is_written_too(tmp_path):
    reporter = Reporter(MetricsCollector())
    for save, name in ((reporter.save_json, "a"), (reporter.save_csv, "b"), (reporter.save_html, "c")):
        save(tmp_path / name)
    assert read_series(tmp_path / "a") == {}
    assert (tmp_path / "b").read_text("utf-8").splitlines() == ["name,unit,index,value"]
    assert "<h1>" in (tmp_path / "c").read_text("utf-8")


def test_a_file_is_replaced_whole_and_a_failure_leaves_the_old_one(metrics, tmp_path, monkeypatch):
    path = tmp_path / "run.json"
    path.write_text("old", "utf-8")

    def fail(*_):
        assert path.read_text("utf-8") == "old"
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("kitsune.base.atomic_write.os.replace", fail)
    with pytest.raises(SettingsError, match=r"run\.json cannot be written: No space left"):
        Reporter(metrics).save_json(path)
    assert path.read_text("utf-8") == "old"
    assert os.listdir(tmp_path) == ["run.json"]
    monkeypatch.undo()
    Reporter(metrics).save_json(path)
    assert set(read_series(path)) == {"step", NASTY}


def test_others_may_read_a_report_as_they_may_read_any_file(metrics, tmp_path):
    (tmp_path / "plain").touch()
    Reporter(metrics).save_csv(tmp_path / "run.csv")
    modes = [stat.S_IMODE((tmp_path / name).stat().st_mode) for name in ("plain", "run.csv")]
    assert modes[0] == modes[1]


def test_a_folder_that_is_not_there_is_told(metrics, tmp_path):
    with pytest.raises(SettingsError, match="cannot be written: No such file or directory"):
        Reporter(metrics).save_html(tmp_path / "none" / "run.html")


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("{", "is not a file of Reporter.save_json"),
        ("[]", "is not a file of Reporter.save_json"),
        ('{"format": 2, "metrics": {}}', "has the format 2; this Kitsune reads 1"),
        ('{"format": 1, "metrics": []}', "is not a file of Reporter.save_json"),
        ('{"format": 1, "metrics": {"a": {"unit": "", "values": ["x"]}}}', "is not a file of Reporter.save_json"),
        (f'{{"format": 1, "metrics": {{"a": {{"unit": "", "values": [{10**400}]}}}}}}', "is not a file of Reporter"),
        ("[" * 100_000, "is not a file of Reporter.save_json"),
    ],
)
def test_a_file_that_is_none_of_ours_is_refused(tmp_path, text, problem):
    path = tmp_path / "run.json"
    path.write_text(text, "utf-8")
    with pytest.raises(SettingsError, match=problem):
        read_series(path)


def test_a_file_that_is_not_there_is_told(tmp_path):
    with pytest.raises(SettingsError, match="cannot be read: No such file"):
        read_series(tmp_path / "run.json")
