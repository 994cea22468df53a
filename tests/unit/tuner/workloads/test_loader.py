"""Workload names: what each form loads, what is not changed, and the message for each error."""

import contextlib
import re
import sys
from pathlib import Path
from urllib.parse import urlencode

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kitsune.errors import ArchiveError, KitsuneError, UnfitError, WorkloadError
from kitsune.submission.exporting.export import export
from kitsune.workload import Workload, call_model, loss_of
from tuner.workloads.loader import WorkloadSource, load_workload, located, workload_source
from tuner.zoo import ZOO

EXAMPLE = Path(__file__).parents[4] / "examples" / "train_cnn.py"
HEAD = "import torch\nfrom kitsune import Workload\n"
LINEAR = f"""{HEAD}
def make_workload():
    model = torch.nn.Linear(4, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return Workload(model, torch.nn.functional.cross_entropy, optimizer, (torch.randn(3, 4), torch.tensor([0, 1, 0])))
"""


def written(folder: Path, source: str, name: str = "train.py") -> Path:
    path = folder / name
    path.write_text(source, encoding="utf-8")
    return path


def refusal(spec: str) -> str:
    with pytest.raises(WorkloadError) as caught:
        load_workload(spec, "cpu")
    return str(caught.value)


def weights(workload: Workload) -> torch.Tensor:
    return torch.cat([parameter.detach().flatten() for parameter in workload.model.parameters()])


def step(workload: Workload) -> float:
    x, y = workload.batch
    workload.optimizer.zero_grad()
    loss = loss_of(call_model(workload.model, x), workload.loss_fn, y)
    loss.backward()
    workload.optimizer.step()
    return loss.item()


# --- the form of a name


endings = st.sampled_from(["", ".py", ".py:f", ".ksn", "&batch=2", "?size=tiny"])


@pytest.mark.parametrize(
    ("spec", "source"),
    [
        ("zoo:mlp", WorkloadSource.ZOO),
        ("zoo:mlp?batch=2", WorkloadSource.ZOO),
        ("train.py:make_workload", WorkloadSource.FILE),
        ("/some/where/my train.py:f", WorkloadSource.FILE),
        ("C:\\jobs\\train.py:f", WorkloadSource.FILE),
        ("model.ksn", WorkloadSource.ARCHIVE),
        ("./models/a.b.ksn", WorkloadSource.ARCHIVE),
    ],
)
def test_form_decides_the_source(spec: str, source: WorkloadSource) -> None:
    assert workload_source(spec) is source


names = st.text() | st.builds("{}{}{}".format, st.sampled_from(["zoo:", "zoo:mlp?", "./", ""]), st.text(), endings)


@settings(max_examples=20)  # of the forms that are found to be a zoo model, each is loaded
@given(names)
def test_any_text_raises_nothing_but_errors_of_ours(spec: str) -> None:
    with contextlib.suppress(KitsuneError):
        assert isinstance(load_workload(spec, "cpu"), Workload)


@given(st.dictionaries(st.sampled_from(["batch", "seq", "size", "sice"]), st.text() | st.integers(-1, 99).map(str)))
def test_any_options_are_loaded_or_refused_in_terms_of_the_model(options: dict[str, str]) -> None:
    spec = f"zoo:bert_base?{urlencode({'size': 'tiny'} | options)}"
    fits = (
        set(options) <= {"batch", "seq"}
        and all(re.fullmatch("[0-9]{1,9}", number) for number in options.values())
        and int(options.get("batch", "1")) >= 1
        and 1 <= int(options.get("seq", "1")) <= 64
    )
    if fits:
        batch, seq = load_workload(spec, "cpu").batch[0].shape
        assert (batch, seq) == (int(options.get("batch", batch)), int(options.get("seq", seq)))
    else:
        assert "zoo:bert_base" in refusal(spec)


def test_other_forms_are_refused_with_the_forms_there_are() -> None:
    message = refusal("some-model")
    assert all(form in message for form in ("zoo:NAME", "FILE.py:FUNCTION", "FILE.ksn"))


@pytest.mark.parametrize(("spec", "meant"), [("resnet18", "zoo:resnet18"), ("train.py", "train.py:make_workload")])
def test_an_incomplete_name_is_answered_with_the_complete_one(spec: str, meant: str) -> None:
    assert f"did you mean {meant!r}?" in refusal(spec)


def test_unknown_device_is_refused() -> None:
    with pytest.raises(UnfitError, match="banana"):
        load_workload("zoo:mlp?size=tiny", "banana")


# --- zoo


def test_zoo_loads_the_default_size_and_batch() -> None:
    workload = load_workload("zoo:mlp", "cpu")
    assert sum(parameter.numel() for parameter in workload.model.parameters()) == 535_818
    assert workload.batch[0].shape == (64, 1, 28, 28)


def test_zoo_options_choose_batch_length_and_size() -> None:
    workload = load_workload("zoo:gpt2_small?batch=2&seq=9&size=tiny", "cpu")
    assert [part.shape for part in workload.batch] == [(2, 9), (2, 9)]


@pytest.mark.parametrize("name", sorted(ZOO))
def test_every_tiny_zoo_model_trains_as_loaded(name: str) -> None:
    workload = load_workload(f"zoo:{name}?size=tiny", "cpu")
    losses = [step(workload) for _ in range(5)]
    assert losses[-1] < losses[0]


@pytest.mark.parametrize(
    ("spec", "words"),
    [
        ("zoo:resnet19", ["'resnet19'", "lenet5", "gpt2_small", "did you mean 'resnet18'?"]),
        ("zoo:", ["there are mlp"]),
        ("zoo:mlp?bacth=4", ["'bacth'", "batch, size", "did you mean 'batch'?"]),
        ("zoo:mlp?seq=4", ["no option 'seq'", "batch, size"]),
        ("zoo:bert_base?sequence=4", ["batch, seq, size"]),
        ("zoo:mlp?batch=four", ["batch='four'", "whole number from 1 to 65536"]),
        ("zoo:mlp?batch=0", ["batch='0'"]),
        ("zoo:mlp?batch=-1", ["batch='-1'"]),
        ("zoo:mlp?batch=65537", ["1 to 65536"]),
        ("zoo:mlp?batch=" + "9" * 5000, ["1 to 65536"]),
        ("zoo:mlp?batch=", ["batch=''"]),
        ("zoo:gpt2_small?seq=1025", ["1 to 1024"]),
        ("zoo:gpt2_small?seq=65&size=tiny", ["1 to 64"]),
        ("zoo:mlp?size=huge", ["'huge'", "base, tiny"]),
        ("zoo:mlp?batch=2&batch=3", ["twice"]),
        ("zoo:mlp?batch", ["NAME=VALUE"]),
    ],
)
def test_wrong_zoo_name_or_option_is_refused_with_what_there_is(spec: str, words: list[str]) -> None:
    message = refusal(spec)
    assert [word for word in words if word not in message] == []


# --- seeds and random state


@pytest.mark.parametrize("form", ["zoo", "file", "archive"])
def test_seed_decides_the_weights(form: str, tmp_path: Path) -> None:
    spec = spec_of(form, tmp_path)
    first, again, other = (weights(load_workload(spec, "cpu", seed)) for seed in (1, 1, 2))
    assert torch.equal(first, again)
    assert not torch.equal(first, other)


@pytest.mark.parametrize("form", ["zoo", "file", "archive"])
def test_random_state_of_the_caller_is_restored(form: str, tmp_path: Path) -> None:
    spec = spec_of(form, tmp_path)
    torch.manual_seed(77)
    expected = torch.rand(5)
    torch.manual_seed(77)
    load_workload(spec, "cpu", seed=3)
    assert torch.equal(torch.rand(5), expected)


def test_random_state_is_restored_when_loading_fails(tmp_path: Path) -> None:
    path = written(tmp_path, "import torch\ntorch.rand(9)\nraise RuntimeError('no')\n")
    before = torch.get_rng_state()
    refusal(f"{path}:make_workload")
    assert torch.equal(torch.get_rng_state(), before)


def spec_of(form: str, folder: Path) -> str:
    if form == "zoo":
        return "zoo:lenet5?size=tiny"
    spec = f"{written(folder, LINEAR)}:make_workload"
    if form == "file":
        return spec
    workload = load_workload(spec, "cpu")
    path = folder / "linear.ksn"
    export(workload.model, workload.loss_fn, workload.optimizer, workload.batch, path)
    return str(path)


# --- files


def test_file_gives_what_its_function_returns(tmp_path: Path) -> None:
    workload = load_workload(f"{written(tmp_path, LINEAR)}:make_workload", "cpu")
    assert isinstance(workload.model, torch.nn.Linear)
    assert isinstance(workload.optimizer, torch.optim.SGD)
    before = weights(workload)
    step(workload)
    assert not torch.equal(weights(workload), before)


def test_file_is_found_from_the_working_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    written(tmp_path, LINEAR)
    monkeypatch.chdir(tmp_path)
    assert isinstance(load_workload("train.py:make_workload", "cpu").model, torch.nn.Linear)


def test_file_may_import_from_its_folder_and_the_path_is_restored(tmp_path: Path) -> None:
    written(tmp_path, "WIDTH = 7\n", "kitsune_test_neighbour.py")
    path = written(tmp_path, "from kitsune_test_neighbour import WIDTH\n" + LINEAR.replace("(4, 2)", "(4, WIDTH)"))
    before = list(sys.path)
    assert load_workload(f"{path}:make_workload", "cpu").model.out_features == 7
    assert sys.path == before


def test_edited_file_is_read_again(tmp_path: Path) -> None:
    path = written(tmp_path, LINEAR)
    load_workload(f"{path}:make_workload", "cpu")
    written(tmp_path, LINEAR.replace("(4, 2)", "(4, 1234)"))
    assert load_workload(f"{path}:make_workload", "cpu").model.out_features == 1234


def test_main_block_of_the_file_does_not_run(tmp_path: Path) -> None:
    path = written(tmp_path, LINEAR + "\nif __name__ == '__main__':\n    raise SystemExit('ran')\n")
    load_workload(f"{path}:make_workload", "cpu")


def test_classes_of_the_file_can_be_looked_up_by_their_module(tmp_path: Path) -> None:
    model = "class Net(torch.nn.Linear):\n    pass\n"
    path = written(tmp_path, HEAD + model + LINEAR.replace("torch.nn.Linear", "Net"))
    loaded = load_workload(f"{path}:make_workload", "cpu").model
    assert sys.modules[type(loaded).__module__].Net is type(loaded)


def test_optimizer_state_and_module_losses_travel_with_the_model(tmp_path: Path) -> None:
    path = written(
        tmp_path,
        HEAD
        + """
def make_workload():
    model = torch.nn.Linear(4, 2)
    loss_fn = torch.nn.CrossEntropyLoss(weight=torch.tensor([1.0, 2.0]))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.25)
    x, y = torch.ones(3, 4), torch.tensor([0, 1, 0])
    loss_fn(model(x), y).backward()
    optimizer.step()
    return Workload(model, loss_fn, optimizer, (x, y))
""",
    )
    workload = load_workload(f"{path}:make_workload", "cpu")
    parameters = list(workload.model.parameters())
    assert workload.optimizer.param_groups[0]["params"] == parameters
    assert workload.optimizer.param_groups[0]["lr"] == 0.25
    assert all(workload.optimizer.state[parameter]["exp_avg"].any() for parameter in parameters)
    assert all(workload.optimizer.state[parameter]["step"] == 1 for parameter in parameters)


def test_missing_file_is_refused_with_a_suggestion(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    written(tmp_path, LINEAR)
    monkeypatch.chdir(tmp_path)
    message = refusal("trian.py:make_workload")
    assert "no file 'trian.py'" in message
    assert "did you mean 'train.py'?" in message
    assert str(tmp_path) in message


def test_a_folder_is_no_file(tmp_path: Path) -> None:
    (tmp_path / "train.py").mkdir()
    assert "is a folder; name a file" in refusal(f"{tmp_path}/train.py:make_workload")


@pytest.mark.parametrize("folder", ["nowhere/", "~nobody-at-all/", "nul\0/", "nul\0", "a" * 5000, "a" * 5000 + "/"])
def test_impossible_file_is_refused(folder: str) -> None:
    assert "there is no file" in refusal(f"{folder}train.py:make_workload")
    assert "there is no file" in refusal(f"{folder}model.ksn")


def test_missing_function_is_refused_with_those_there_are(tmp_path: Path) -> None:
    path = written(tmp_path, LINEAR + "\ndef _private():\n    pass\n\nmake_wrkload = None\n")
    message = refusal(f"{path}:make_wrkload")
    assert "has no function 'make_wrkload'; there are make_workload; did you mean 'make_workload'?" in message
    assert "there are none" in refusal(f"{written(tmp_path, 'X = 1', 'empty.py')}:make_workload")
    for ending in ("", ":"):
        assert f"did you mean '{path}:make_workload'?" in refusal(f"{path}{ending}")


@pytest.mark.parametrize(
    ("source", "line", "text"),
    [
        ("X = 1\nraise ValueError('at import')\n", 2, "ValueError: at import"),
        ("def make_workload():\n    x = {}\n    return x['key']\n", 3, "KeyError: 'key'"),
        ("def make_workload():\n    import torch\n    return torch.ones(2) @ torch.ones(3)\n", 3, "RuntimeError: "),
        ("X = 1\nY = = 2\n", 2, "SyntaxError: "),
        ("import kitsune_no_such_module\n", 1, "ModuleNotFoundError: "),
        ("import sys\nsys.exit(3)\n", 2, "SystemExit: 3"),
        ("import argparse\nargparse.ArgumentParser().parse_args(['--what'])\n", 2, "SystemExit: 2"),
        ("class Odd(Exception):\n    pass\n\nraise Odd('own type')\n", 4, "Odd: own type"),
        (
            "from kitsune import Workload\n\ndef make_workload():\n    return Workload(1, 2, 3, 4)\n",
            4,
            "WorkloadError: ",
        ),
        ("def make_workload():\n    return make_workload()\n", 2, "RecursionError: "),
    ],
)
def test_error_in_the_file_names_its_line(source: str, line: int, text: str, tmp_path: Path) -> None:
    path = written(tmp_path, source)
    modules = set(sys.modules)
    message = refusal(f"{path}:make_workload")
    assert f"failed at {path}:{line}: {text}" in message
    left = [name for name in set(sys.modules) - modules if name.startswith("_kitsune_workload")]
    assert len(left) == ("make_workload" in source), "a file that failed to import must leave no module behind"


def test_error_deeper_down_names_the_line_of_the_file(tmp_path: Path) -> None:
    path = written(tmp_path, LINEAR.replace("torch.tensor([0, 1, 0])", "torch.tensor([[0], [1, 2]])"))
    line = LINEAR[: LINEAR.index("return Workload")].count("\n") + 1
    assert f"{path}:{line}: ValueError" in refusal(f"{path}:make_workload")


def test_function_that_wants_arguments_is_refused(tmp_path: Path) -> None:
    path = written(tmp_path, "def make_workload(batch):\n    return batch\n")
    assert f"failed at {path}: TypeError: make_workload() missing 1 required" in refusal(f"{path}:make_workload")


@pytest.mark.parametrize(("value", "kind"), [("None", "NoneType"), ("(1, 2, 3, 4)", "tuple")])
def test_other_type_is_refused(value: str, kind: str, tmp_path: Path) -> None:
    path = written(tmp_path, f"def make_workload():\n    return {value}\n")
    message = refusal(f"{path}:make_workload")
    assert f"returned a value of type {kind}" in message
    assert "kitsune.Workload(model, loss_fn, optimizer, (x, y))" in message


def test_ctrl_c_and_gpu_out_of_memory_pass_through(tmp_path: Path) -> None:
    interrupted = written(tmp_path, "raise KeyboardInterrupt\n", "interrupted.py")
    with pytest.raises(KeyboardInterrupt):
        load_workload(f"{interrupted}:f", "cpu")
    full = written(tmp_path, "import torch\nraise torch.OutOfMemoryError('full')\n", "full.py")
    with pytest.raises(torch.OutOfMemoryError, match="full"):
        load_workload(f"{full}:f", "cpu")


def test_move_that_replaces_parameters_is_refused(tmp_path: Path) -> None:
    path = written(tmp_path, LINEAR)
    torch.__future__.set_overwrite_module_params_on_conversion(True)
    try:
        message = refusal(f"{path}:make_workload")
    finally:
        torch.__future__.set_overwrite_module_params_on_conversion(False)
    assert "replaced its parameters" in message


def test_model_without_storage_cannot_move(tmp_path: Path) -> None:
    path = written(tmp_path, LINEAR.replace("Linear(4, 2)", "Linear(4, 2, device='meta')"))
    assert f"failed at {path}: NotImplementedError: " in refusal(f"{path}:make_workload")


def test_example_workload_learns() -> None:
    workload = load_workload(f"{EXAMPLE}:make_workload", "cpu")
    losses = [step(workload) for _ in range(5)]
    assert losses[-1] < losses[0]


# --- archives


def test_archive_gives_the_model_that_was_exported(tmp_path: Path) -> None:
    workload = load_workload(spec_of("archive", tmp_path), "cpu")
    assert workload.batch[0].shape == (3, 4)
    assert [parameter.shape for parameter in workload.model.parameters()] == [(2, 4), (2,)]
    losses = [step(workload) for _ in range(5)]
    assert losses[-1] < losses[0]


@pytest.mark.parametrize("randomness", [True, False])
def test_archive_is_rebuilt_with_or_without_dropout(randomness: bool, tmp_path: Path) -> None:
    workload = load_workload("zoo:gpt2_small?size=tiny&batch=2&seq=8", "cpu")
    path = tmp_path / "gpt.ksn"
    export(workload.model, workload.loss_fn, workload.optimizer, workload.batch, path)
    again = load_workload(str(path), "cpu", randomness=randomness)
    x, y = again.batch
    first, second = (loss_of(call_model(again.model, x), again.loss_fn, y).item() for _ in range(2))
    assert (first == second) is not randomness


def test_file_that_is_no_archive_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "noise.ksn"
    path.write_bytes(b"not an archive")
    with pytest.raises(ArchiveError):
        load_workload(str(path), "cpu")


def test_a_located_workload_is_the_same_from_every_folder(tmp_path, monkeypatch):
    """Training scripts like to change to their own folder."""
    (tmp_path / "sub").mkdir()
    file = tmp_path / "sub" / "train.py"
    file.write_text(f"import os\nos.chdir(os.path.dirname(os.path.abspath(__file__)))\n{LINEAR}")
    (tmp_path / "sub" / "model.ksn").touch()
    monkeypatch.chdir(tmp_path)
    assert located("zoo:mlp?size=tiny") == "zoo:mlp?size=tiny"
    assert located("sub/model.ksn") == str(tmp_path / "sub" / "model.ksn")
    spec = located("sub/train.py:make_workload")
    assert spec == f"{file}:make_workload"
    for _ in range(2):  # as a child does, once for each arm
        load_workload(spec, "cpu")
    with pytest.raises(WorkloadError, match="there is no file"):
        located("sub/train.py:make")
