"""The closed table of knobs: what a plan may choose. No torch here.

A knob is one optimisation; `kitsune/techniques/<name>.py` applies it. The order of the table is the order in which
choices are applied. A plan never holds anything but these names and these choices.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Final

Choice = str | int


@dataclass(frozen=True, kw_only=True, slots=True)
class Exclusion:
    """`choices` of the knob that declares it cannot stand beside `other_choices` of the knob `other`.

    The default is never among `choices`, so that going back to it always ends the clash. It may be among
    `other_choices`: what the knob needs is then another choice of the other. `instead` says which of them comes nearest
    to one of `other_choices`.
    """

    choices: tuple[Choice, ...]
    other: str
    other_choices: tuple[Choice, ...]
    reason: str
    instead: Mapping[Choice, Choice] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True, slots=True)
class Knob:
    """One optimisation: the first choice is the default, which leaves the user's step as it was given.

    `slow` choices take minutes to compile. `searched`: the choices that a search tries beside the default, all of them
    where nothing is said. None at all is a limit that the user sets: it makes no step faster. `changes_code`: whether
    another choice gives other compiled kernels, and does not only launch the same ones in another way.
    """

    name: str
    meaning: str
    choices: Mapping[Choice, str]
    needs: str
    slow: tuple[Choice, ...] = ()
    searched: tuple[Choice, ...] | None = None
    changes_code: bool = True
    excludes: tuple[Exclusion, ...] = ()

    @property
    def default(self) -> Choice:
        return next(iter(self.choices))

    def is_searched(self, choice: Choice) -> bool:
        return choice == self.default or self.searched is None or choice in self.searched


SEVERAL: Final = (2, 3, 4, 5, 6, 7, 8)
#: Choices of `compile` that put CUDA graphs of their own around forward and backward.
OWN_GRAPHS: Final = ("reduce-overhead", "max-autotune")
#: Power of two -> its name.
POOL_SIZES: Final[Mapping[int, str]] = {
    **{power: f"{2 ** (power - 20)} MiB" for power in range(24, 30)},
    **{power: f"{2 ** (power - 30)} GiB" for power in range(30, 38)},
}

KNOBS: Final[Mapping[str, Knob]] = {
    knob.name: knob
    for knob in (
        Knob(
            name="layout",
            meaning="memory layout of 4-d tensors",
            choices={
                "contiguous": "as given",
                "channels_last": "channels innermost, as tensor-core convolutions read it",
            },
            needs="a two-dimensional convolution in the model",
        ),
        Knob(
            name="precision",
            meaning="dtype in which matrix products and convolutions run",
            choices={
                "fp32": "as given",
                "tf32": "fp32 tensors, TF32 products",
                "bf16": "autocast to bfloat16",
                "fp16": "autocast to float16 with dynamic loss scaling",
            },
            needs="fp32 parameters; hardware that has the dtype",
        ),
        Knob(
            name="attention",
            meaning="backend of scaled_dot_product_attention",
            choices={
                "default": "as torch picks it",
                "flash": "FlashAttention",
                "cudnn": "cuDNN's fused attention",
                "efficient": "memory-efficient attention",
                "math": "plain matrix products and softmax",
            },
            needs="a call of scaled_dot_product_attention in the model",
            excludes=(
                Exclusion(
                    choices=("flash", "cudnn"),
                    other="precision",
                    other_choices=("tf32",),
                    reason="the backend takes half-precision tensors only; tf32 keeps them in fp32",
                ),
            ),
        ),
        Knob(
            name="fusion",
            meaning="kernels of ours in the place of patterns in forward and loss",
            choices={
                "off": "as given",
                "kitsune": "patterns replaced by Triton kernels of ours, where they were measured to be faster here",
            },
            needs="a GPU, and Triton; with compile, Inductor compiles the rest, else it runs eagerly",
        ),
        Knob(
            name="compile",
            meaning="torch.compile of forward and loss (and the backward it generates)",
            choices={
                "off": "eager kernels",
                "default": "Inductor, default mode",
                "coordinate-descent": "Inductor, default mode with coordinate descent tuning of its kernels",
                "max-autotune-no-cudagraphs": "Inductor, matrix products autotuned",
                "reduce-overhead": "Inductor with its own CUDA graphs around forward and backward",
                "max-autotune": "Inductor autotuned, with its own CUDA graphs",
            },
            needs="a working compiler (Triton on a GPU, a C++ compiler on a CPU)",
            slow=("coordinate-descent", "max-autotune-no-cudagraphs", "max-autotune"),
        ),
        Knob(
            name="update",
            meaning="implementation of the optimizer's update",
            choices={
                "given": "as given",
                "foreach": "horizontally fused, one launch per operation; on a GPU torch's own default",
                "fused": "one kernel for the whole update",
                "kitsune": "the same by a Triton kernel of ours, for AdamW",
            },
            needs="an optimizer of torch.optim that has the implementation; kitsune a GPU, Triton, parameters in fp32",
            searched=("fused", "kitsune"),
            changes_code=False,
        ),
        Knob(
            name="capture",
            meaning="CUDA graphs around the step",
            choices={
                "none": "kernels launched one by one",
                "segments": "forward, backward and update as three graphs; the loss and the loop stay the user's",
                "step": "zero_grad, forward, loss, backward, clipping, scaling and update in one graph",
            },
            needs="CUDA; a step without host synchronisation; a compile mode without graphs of its own",
            changes_code=False,
            excludes=(
                Exclusion(
                    choices=("segments", "step"),
                    other="compile",
                    other_choices=OWN_GRAPHS,
                    reason="this compile mode puts CUDA graphs of its own around forward and backward",
                    instead={"reduce-overhead": "default", "max-autotune": "max-autotune-no-cudagraphs"},
                ),
            ),
        ),
        Knob(
            name="streams",
            meaning="CUDA streams on which the launches of a captured graph run, as far as they do not wait",
            choices={
                1: "one after the other, as recorded",
                **{count: f"on up to {count} streams, scheduled by their measured times" for count in SEVERAL},
            },
            needs="a graph of ours; every launch in sight, and proven to be the same step",
            searched=(2, 4, 8),
            excludes=(
                Exclusion(
                    choices=SEVERAL,
                    other="capture",
                    other_choices=("none",),
                    reason="only launches that are captured can be scheduled",
                    instead={"none": "step"},
                ),
            ),
        ),
        Knob(
            name="pool_bytes",
            meaning="memory that the launches on several streams may need for what the step itself makes",
            choices={
                0: "more than on one stream by a fifth of the whole step, or 32 MiB",
                **{2**power: f"{size} at most" for power, size in POOL_SIZES.items()},
            },
            needs="launches on several streams: less memory, fewer of them side by side",
            searched=(),
            changes_code=False,
            excludes=(
                Exclusion(
                    choices=tuple(2**power for power in POOL_SIZES),
                    other="streams",
                    other_choices=(1,),
                    reason="on one stream torch takes what memory the step needs",
                    instead={1: 2},
                ),
            ),
        ),
        Knob(
            name="prefetch",
            meaning="batches that TrainStep.batches has on the device ahead of their step",
            choices={
                0: "as the loader gives them",
                1: "one, from a thread and on a stream of its own",
                **{count: f"{count}, from a thread and on a stream of its own" for count in (2, 4, 8)},
            },
            needs="a loop over TrainStep.batches(loader); a search, which has one batch on the device, does not try it",
            searched=(),
            changes_code=False,
        ),
    )
}


def clashes(knobs: Mapping[str, Choice], table: Mapping[str, Knob] = KNOBS) -> Iterator[tuple[Knob, Exclusion]]:
    """The exclusions that the choices run into, each with the knob that declares it; knobs left out are at default."""
    for knob in table.values():
        for exclusion in knob.excludes:
            other = table.get(exclusion.other)
            if (
                other is not None
                and knobs.get(knob.name, knob.default) in exclusion.choices
                and knobs.get(other.name, other.default) in exclusion.other_choices
            ):
                yield knob, exclusion
