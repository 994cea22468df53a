"""Well-known models in plain torch, for tuning, tests and benchmarks. `ZOO` maps a name to its recipes."""

from collections.abc import Mapping
from typing import Final

from tuner.zoo import bert, dlrm, googlenet, gpt, lenet, llama, mlp, resnet, vit
from tuner.zoo.recipe import ZooModel

ZOO: Final[Mapping[str, ZooModel]] = {
    entry.name: entry
    for entry in (
        mlp.ENTRY,
        lenet.ENTRY,
        resnet.RESNET18,
        resnet.RESNET50,
        googlenet.ENTRY,
        bert.BASE_ENTRY,
        bert.LARGE_ENTRY,
        vit.ENTRY,
        gpt.ENTRY,
        *llama.ENTRIES,
        dlrm.ENTRY,
    )
}
