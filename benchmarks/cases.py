"""The cases of the training_step suite: a name as in the result files, and a workload with its rivals' best layout."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Case:
    """`channels_last`: convolutions are faster in it on the GPUs we have measured."""

    name: str
    spec: str
    channels_last: bool = False


CASES = {
    case.name: case
    for case in (
        Case("mlp/64", "zoo:mlp"),
        Case("lenet5/64", "zoo:lenet5"),
        Case("resnet18/128", "zoo:resnet18", channels_last=True),
        Case("resnet50/64", "zoo:resnet50", channels_last=True),
        Case("googlenet/16", "zoo:googlenet", channels_last=True),
        Case("bert_base/16x128", "zoo:bert_base"),
        Case("vit_b16/64", "zoo:vit_b16"),
        Case("gpt2_small/8x512", "zoo:gpt2_small"),
        Case("hf-bert_base/16x128", "benchmarks/workloads/hf_bert_base.py:make_workload"),
        Case("tv-resnet50/64", "benchmarks/workloads/tv_resnet50.py:make_workload", channels_last=True),
    )
}
