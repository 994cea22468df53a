"""Weights of recurrent layers that do not fit each other: refused in the bytes, and before the operator runs."""

import copy
import json

import pytest
import torch

from kitsune.errors import ArchiveError
from kitsune.submission.format.archive import Archive
from kitsune.submission.rebuilding.rebuild import rebuild
from kitsune.workload import call_model
from tests.unit.kitsune.submission.hostile import zipped
from tests.unit.kitsune.submission.steps import archive_of


@pytest.fixture(scope="module")
def exported():
    return json.loads(archive_of("lstm").document.model_dump_json(exclude_defaults=True))


@pytest.fixture
def document(exported):
    return copy.deepcopy(exported)


@pytest.fixture
def number(document):
    """Of the node that is the recurrent layer."""
    return next(number for number, node in enumerate(document["forward"]["nodes"]) if node["op"] == "aten.lstm.input")


def written(document) -> bytes:
    return zipped([("graph.json", json.dumps(document).encode())])


def entry(document, name: str):
    return next(entry for entry in document["tensors"] if name in entry["names"])


def test_as_it_was_exported_it_is_read(document, number):
    assert Archive.from_bytes(written(document)).document.forward.nodes[number].op == "aten.lstm.input"


@pytest.mark.parametrize(
    ("name", "shape"),
    [
        ("weight_ih_l1", [40]),
        ("weight_ih_l1", [40, 21]),
        ("weight_hh_l0_reverse", [10, 40]),
        ("bias_hh_l1", [41]),
        ("bias_ih_l0", [40, 1]),
    ],
)
def test_a_weight_of_another_shape_is_refused_by_its_name(document, number, name, shape):
    entry(document, f"lstm.{name}")["shape"] = shape
    where = rf"forward\.nodes\[{number}\]: aten\.lstm\.input: params: {name} has shape"
    with pytest.raises(ArchiveError, match=where):
        Archive.from_bytes(written(document))


def test_first_weights_decide_what_the_others_must_be(document):
    entry(document, "lstm.weight_ih_l0")["shape"] = [41, 12]
    with pytest.raises(ArchiveError, match="are not the first two weights of 4 gates"):
        Archive.from_bytes(written(document))


@pytest.mark.parametrize(
    ("position", "value", "reason"),
    [
        (2, "%1", "params must be a list"),
        (2, ["%1"], "holds 1 weights, and must hold 16"),
        (3, False, "holds 16 weights, and must hold 8"),
        (3, 1, "must be booleans"),
        (4, 3, "holds 16 weights, and must hold 24"),
        (4, 2**62, "holds 16 weights"),
        (4, 0, "num_layers must be"),
        (4, -1, "num_layers must be"),
        (7, False, "holds 16 weights, and must hold 8"),
        (8, None, "must be booleans"),
    ],
)
def test_arguments_that_the_weights_contradict_are_refused(document, number, position, value, reason):
    arguments = document["forward"]["nodes"][number]["args"]
    if value == ["%1"]:
        value = arguments[2][:1]
    arguments[position] = value
    with pytest.raises(ArchiveError, match=reason):
        Archive.from_bytes(written(document))


def test_arguments_by_name_are_refused(document, number):
    node = document["forward"]["nodes"][number]
    node["kwargs"] = {"batch_first": node["args"].pop()}
    with pytest.raises(ArchiveError, match="9 arguments by position, not 8 and 1 by name"):
        Archive.from_bytes(written(document))


def test_states_that_do_not_fit_are_refused_before_the_operator_runs(document):
    states = next(node for node in document["forward"]["nodes"] if node["op"] == "aten.zeros.default")
    states["args"][0][0] = 2
    workload = rebuild(Archive.from_bytes(written(document)))
    with pytest.raises(ArchiveError, match=r"hx: a state has shape \[2, 4, 10\], and must have \[4, 4, 10\]"):
        call_model(workload.model, workload.batch[0])


def test_a_weight_that_the_graph_reshapes_in_place_is_refused_before_the_operator_runs(document):
    workload = rebuild(Archive.from_bytes(written(document)))
    graph = workload.model.graph
    node = next(node for node in graph.graph.nodes if node.target is torch.ops.aten.lstm.input)
    with graph.graph.inserting_before(node.args[0]):
        graph.graph.call_function(torch.ops.aten.t_.default, (node.args[2][4],))
    graph.recompile()
    with torch.no_grad(), pytest.raises(ArchiveError, match=r"weight_ih_l0_reverse has shape \[12, 40\]"):
        call_model(workload.model, workload.batch[0])


def test_input_that_does_not_fit_is_refused_before_the_operator_runs(document):
    entry(document, "embed.weight")["shape"][1] = 7
    workload = rebuild(Archive.from_bytes(written(document)))
    with pytest.raises(ArchiveError, match="must have 3 dimensions, the last of 12"):
        call_model(workload.model, workload.batch[0])
