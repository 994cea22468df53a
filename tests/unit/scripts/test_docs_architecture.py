"""scripts/docs_architecture.py: the picture of the folders shows what the imports say."""

from scripts import docs_architecture
from scripts.docs_architecture import arrows, arrows_of, reduced, tree
from tests import laws


def test_arrows_that_others_imply_are_left_out():
    drawn = {"a": frozenset("bc"), "b": frozenset("c"), "c": frozenset()}
    assert reduced(drawn) == {"a": frozenset("b"), "b": frozenset("c"), "c": frozenset()}


def test_arrows_are_those_of_the_imports():
    sources = {
        "kitsune/runtime/x.py": "from kitsune.base import y\nfrom kitsune.runtime import z\nimport torch",
        "kitsune/runtime/z.py": "from kitsune.errors import Error",
        "kitsune/base/y.py": "",
        "kitsune/errors.py": "",
        "tuner/api.py": "from kitsune.base import y",
    }
    found = {module.name: module for module in (laws.module_of(*each) for each in sources.items())}
    assert arrows_of(found, "kitsune") == {
        "kitsune.base": frozenset(),
        "kitsune.errors": frozenset(),
        "kitsune.runtime": frozenset({"kitsune.base", "kitsune.errors"}),
    }


def test_the_picture_of_this_code():
    picture = arrows("kitsune")
    assert "kitsune_step[step] --> " in picture
    assert "torch" not in picture


def test_every_file_is_in_the_tree():
    told = tree()
    for name, module in docs_architecture.modules().items():
        if name.partition(".")[0] in docs_architecture.PACKAGES:
            assert f"`{name.replace('.', '/') if module.is_package else name.rpartition('.')[2]}`" in told
