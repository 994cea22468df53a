"""The table of suite memory: peaks of each arm beside the step as given, from the newest file of a case."""

import json

from benchmarks.memory_table import newest_peaks, table_of

MIB = 2**20


def write(path, *figures):
    lines = [{"kind": "environment"}]
    lines += [{"kind": "figure", "case": case, "value": value, "unit": unit} for case, value, unit in figures]
    path.write_text("".join(f"{json.dumps(line)}\n" for line in lines))


def test_peaks_and_their_shares_of_the_given_one(tmp_path):
    write(
        tmp_path / "2026-11-22-h200.jsonl",
        ("a/1 eager_fp32", 200 * MIB, "bytes"),
        ("a/1 bf16, compile", 50 * MIB, "bytes"),
        ("a/1 bf16, compile / eager_fp32", 0.25, "ratio"),
    )
    *_, row = table_of(newest_peaks(tmp_path))
    assert row == "| a/1 | 200 MiB | 50 MiB (25%) |"


def test_a_rerun_replaces_its_case_and_an_arm_that_is_missing_stays_empty(tmp_path):
    write(tmp_path / "2026-11-22-h200.jsonl", ("a/1 eager_fp32", MIB, "bytes"), ("b/1 eager_fp32", 2 * MIB, "bytes"))
    write(
        tmp_path / "2026-11-23-h200.jsonl",
        ("a/1 eager_fp32", 4 * MIB, "bytes"),
        ("a/1 bf16", 3 * MIB, "bytes"),
    )
    *_, first, second = table_of(newest_peaks(tmp_path))
    assert first == "| a/1 | 4 MiB | 3 MiB (75%) |"
    assert second == "| b/1 | 2 MiB |  |"


def test_a_case_without_the_given_step_is_left_out(tmp_path):
    write(tmp_path / "2026-11-22-h200.jsonl", ("a/1 bf16", MIB, "bytes"))
    assert newest_peaks(tmp_path) == {}
