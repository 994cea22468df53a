"""inductor: a set of Inductor's flags that differ from its defaults."""

import re
from collections.abc import Mapping
from typing import Any, Final

from kitsune.knobs import Choice
from kitsune.techniques.technique import Build, Facts, Technique

#: A ViT-B/16 with 64 images on an H200 takes 19.81 ms in place of 20.22. Not offered: loops in their given order
#: (19.94), other sizes of a split (20.15 and 20.55), combo kernels (20.18; 15.37 in place of 10.87 for GPT-2), all in
#: results/flags/2026-11-29-h200.jsonl.
FLAGS: Final[Mapping[Choice, Mapping[str, Any]]] = {
    "no_mix_order": {"triton.mix_order_reduction": False},
}
#: What torch says to a flag that its version does not have.
UNKNOWN: Final = re.compile(r"torch\._inductor\.config\.\S+ does not exist")


class Inductor(Technique):
    name = "inductor"

    def why_not(self, choice: Choice, facts: Facts) -> str | None:
        return facts.compiler or (None if facts.device == "cuda" else "its flags are for kernels of a GPU")

    def apply(self, choice: Choice, build: Build) -> None:
        """`compile` reads them when it compiles."""
        build.inductor |= FLAGS[choice]

    def blames(self, error: BaseException) -> bool:
        return UNKNOWN.search(str(error)) is not None


TECHNIQUE = Inductor()
