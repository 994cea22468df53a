"""The table of suite kernels: ratios of medians, wins over both rivals only, and losses said plainly."""

import json

from benchmarks.kernel_table import HEADER, table_of
from benchmarks.table import newest_cases


def lines_of(**arms):
    return [{"kind": "case", "arm": arm, "us": list(us)} for arm, us in arms.items()]


def only_row(cases):
    *header, row = table_of(cases)
    assert tuple(header) == HEADER
    return row


def test_ratios_are_of_medians_with_their_range_over_shapes():
    row = only_row(
        {
            "rope/a/bf16": lines_of(eager=[30.0, 20.0, 900.0], inductor=[12.0], kitsune=[10.0]),
            "rope/b/bf16": lines_of(eager=[10.0], inductor=[9.0], kitsune=[10.0]),
            "rope/c/bf16": lines_of(eager=[20.0], inductor=[10.0], kitsune=[10.0]),
        }
    )
    assert row == "| rope | bf16 | 2.00 (1.00 to 3.00) | 1.00 (0.90 to 1.20) | 1 of 3 shapes |"


def test_winning_over_one_rival_is_no_win():
    cases = {"rope/a/fp32": lines_of(eager=[30.0], inductor=[9.0], kitsune=[10.0])}
    assert only_row(cases).endswith("| never wins over both |")


def test_less_than_the_noise_is_no_win():
    cases = {"rope/a/fp32": lines_of(eager=[30.0], inductor=[10.1], kitsune=[10.0])}
    assert only_row(cases).endswith("| never wins over both |")


def test_all_shapes():
    won = lines_of(eager=[30.0], inductor=[20.0], kitsune=[10.0])
    assert only_row({"rope/a/fp32": won, "rope/b/fp32": won}).endswith("| 2 of 2 shapes |")


def test_an_arm_without_samples_is_no_rival_that_was_beaten():
    cases = {
        "sgd/a/fp32": lines_of(eager=[30.0], inductor=[], kitsune=[10.0]),
        "sgd/b/fp32": lines_of(eager=[30.0], inductor=[20.0], kitsune=[10.0]),
    }
    assert only_row(cases).endswith(
        "| 3.00 (3.00 to 3.00) | 2.00 (2.00 to 2.00) | 1 of 1 shapes (1 of 2 not measured against both) |"
    )
    del cases["sgd/b/fp32"]
    assert only_row(cases).endswith("| 3.00 (3.00 to 3.00) | - | not measured against both |")


def test_a_case_that_failed_as_a_whole_is_told_of():
    assert only_row({"sgd/a/fp32": lines_of(all=[])}) == "| sgd | fp32 | - | - | not measured against both |"


def test_shards_of_one_day_count_together_and_a_rerun_replaces_its_cases(tmp_path):
    def write(name, case, us):
        lines = [{"kind": "environment"}, *({**line, "case": case} for line in lines_of(kitsune=[us], eager=[20.0]))]
        (tmp_path / name).write_text("".join(f"{json.dumps(line)}\n" for line in lines))

    write("2026-11-22-h200.jsonl", "rope/a/bf16", 10.0)
    write("2026-11-22-h200-2.jsonl", "rope/b/bf16", 10.0)
    write("2026-11-23-h200.jsonl", "rope/a/bf16", 5.0)
    assert "| 3.00 (2.00 to 4.00) | - |" in only_row(newest_cases(tmp_path))
