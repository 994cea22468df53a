"""The cases of the suites that measure steps: a name as in the result files, a workload, its rivals' best layout."""

from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Case:
    """`channels_last`: convolutions are faster in it on the GPUs we have measured.

    `is_swept`: benchmarks.sweep measures it unless told otherwise. `is_forward`: the model in eval mode, nothing else.
    """

    name: str
    spec: str
    channels_last: bool = False
    is_swept: bool = True
    is_forward: bool = False


def by_name(cases: Iterable[Case]) -> dict[str, Case]:
    return {case.name: case for case in cases}


#: Training steps. Those of small batches leave a GPU room for several streams.
CASES = by_name(
    (
        Case("mlp/64", "zoo:mlp"),
        Case("lenet5/64", "zoo:lenet5"),
        Case("resnet18/128", "zoo:resnet18", channels_last=True),
        Case("resnet50/64", "zoo:resnet50", channels_last=True),
        Case("googlenet/16", "zoo:googlenet", channels_last=True),
        Case("bert_base/16x128", "zoo:bert_base"),
        Case("vit_b16/64", "zoo:vit_b16"),
        Case("gpt2_small/8x512", "zoo:gpt2_small"),
        Case("dlrm/2048", "zoo:dlrm"),
        Case("hf-bert_base/16x128", "benchmarks/workloads/hf_bert_base.py:make_workload"),
        Case("tv-resnet50/64", "benchmarks/workloads/tv_resnet50.py:make_workload", channels_last=True),
        Case("hf-gpt2_small/8x512", "benchmarks/workloads/hf_gpt2_small.py:make_workload", is_swept=False),
        Case("hf-llama_125m/8x1024", "benchmarks/workloads/hf_llama_125m.py:make_workload", is_swept=False),
        Case("nanogpt/12x1024", "benchmarks/workloads/nanogpt.py:make_workload", is_swept=False),
        Case(
            "timm-convnext_tiny/64",
            "benchmarks/workloads/timm_convnext_tiny.py:make_workload",
            channels_last=True,
            is_swept=False,
        ),
        Case("resnet50/256", "zoo:resnet50?batch=256", channels_last=True, is_swept=False),
        Case("bert_large/16x128", "zoo:bert_large", is_swept=False),
        Case("gpt2_small/16x1024", "zoo:gpt2_small?batch=16&seq=1024", is_swept=False),
        Case("llama_125m/8x1024", "zoo:llama_125m", is_swept=False),
        Case("llama_1b/2x2048", "zoo:llama_1b", is_swept=False),
        Case("llama_wide/2x2048", "zoo:llama_wide", is_swept=False),
        Case("resnet50/8", "zoo:resnet50?batch=8", channels_last=True, is_swept=False),
        Case("bert_base/2x128", "zoo:bert_base?batch=2&seq=128", is_swept=False),
        Case("vit_b16/4", "zoo:vit_b16?batch=4", is_swept=False),
        Case("gqa_rms_norm/32x1024", "benchmarks/workloads/gqa_rms_norm.py:make_workload", is_swept=False),
        Case("bf16_rms_norm/8x1024", "benchmarks/workloads/bf16_rms_norm.py:make_workload", is_swept=False),
        Case("ddpm_unet/128", "benchmarks/workloads/ddpm_unet.py:make_workload", is_swept=False),
        Case(
            "tv-densenet121/16",
            "benchmarks/workloads/tv_densenet121.py:make_workload",
            channels_last=True,
            is_swept=False,
        ),
        Case("nnue_small/16384", "benchmarks/workloads/nnue.py:make_small", is_swept=False),
        Case("nnue_large/16384", "benchmarks/workloads/nnue.py:make_large", is_swept=False),
        Case("hf-deberta_v3_base/1x512", "benchmarks/workloads/hf_deberta_v3_base.py:make_workload", is_swept=False),
        Case("iresnet50/16", "benchmarks/workloads/iresnet50.py:make_workload", channels_last=True, is_swept=False),
        Case("spiking/8", "benchmarks/workloads/spiking.py:make_few", channels_last=True, is_swept=False),
        Case("spiking/96", "benchmarks/workloads/spiking.py:make_many", channels_last=True, is_swept=False),
    )
)

#: Inference, of suite engine alone.
FORWARDS = by_name(
    (
        Case("googlenet/1-forward", "zoo:googlenet?batch=1", channels_last=True, is_forward=True),
        Case("bert_base/1x128-forward", "zoo:bert_base?batch=1&seq=128", is_forward=True),
    )
)
