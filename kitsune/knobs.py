"""The table of knobs: the optimisations that a plan may choose, and their choices. Does not import torch.

A knob is one optimisation; `kitsune/techniques/<name>.py` applies it. The order of the table is the order in which
choices are applied. A plan never holds anything but these names and these choices.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Final

Choice = str | int


@dataclass(frozen=True, kw_only=True, slots=True)
class Exclusion:
    """`choices` of the knob that declares it cannot be combined with `other_choices` of the knob `other`.

    The default is never in `choices`, so setting the knob back to its default always resolves the conflict. The
    other's default may be in `other_choices`: the knob then requires a non-default choice of the other. `instead` maps
    a member of `other_choices` to the closest choice that is allowed.
    """

    choices: tuple[Choice, ...]
    other: str
    other_choices: tuple[Choice, ...]
    reason: str
    instead: Mapping[Choice, Choice] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True, slots=True)
class Knob:
    """One optimisation. The first choice is the default, which leaves the user's step unchanged.

    `choices` maps each choice to its description. `slow`: choices that take minutes to compile. `stock`: choices that
    a user of plain torch makes by hand, to which the gain of a plan is compared. `searched`: the choices that a search
    tries beside the default; None: all of them; empty: only the user sets this knob, since it makes no step faster.
    `saves_memory`: a search with a memory limit tries all of its choices. `changes_code`: whether the choice changes
    the compiled kernels, and not only how they are launched. `changes_numbers`: whether a choice may change the
    numbers, by rounding at least. `compiles`: its choices compile the step, which takes most of the time of a trial.
    `sets_dtype`: its choices are the dtype of products, which alone changes the numbers by more than rounding.
    """

    name: str
    meaning: str
    choices: Mapping[Choice, str]
    needs: str
    slow: tuple[Choice, ...] = ()
    stock: tuple[Choice, ...] = ()
    searched: tuple[Choice, ...] | None = None
    saves_memory: bool = False
    changes_code: bool = True
    changes_numbers: bool = True
    compiles: bool = False
    sets_dtype: bool = False
    excludes: tuple[Exclusion, ...] = ()
    default: Choice = field(init=False)  # not a property: searches ask for it millions of times

    def __post_init__(self) -> None:
        object.__setattr__(self, "default", next(iter(self.choices)))

    def is_searched(self, choice: Choice) -> bool:
        return choice == self.default or self.searched is None or choice in self.searched


def is_compiled(knobs: Mapping[str, Choice]) -> bool:
    """Whether a plan with these choices, which are not defaults, compiles the step."""
    return any(name in KNOBS and KNOBS[name].compiles for name in knobs)


def numeric_choices(knobs: Mapping[str, Choice]) -> dict[str, Choice]:
    """Those of the choices that may change the numbers: plans with the same ones compute the same."""
    return {name: choice for name, choice in knobs.items() if name not in KNOBS or KNOBS[name].changes_numbers}


def dtype_choices(knobs: Mapping[str, Choice]) -> dict[str, Choice]:
    """Those of the choices that set a dtype."""
    return {name: choice for name, choice in knobs.items() if KNOBS[name].sets_dtype}


SEVERAL: Final = (2, 3, 4, 5, 6, 7, 8)
#: Choices of `compile` in which Inductor captures its own CUDA graphs of forward and backward.
OWN_GRAPHS: Final = ("reduce-overhead", "max-autotune")
#: The same without these graphs.
WITHOUT_OWN_GRAPHS: Final[Mapping[Choice, Choice]] = {
    "reduce-overhead": "default",
    "max-autotune": "max-autotune-no-cudagraphs",
}
#: Choices of `recompute` that limit what a compiled backward reads.
SHARES_KEPT: Final = ("keep-75", "keep-50", "keep-30")
#: Exponent of 2 -> that many bytes as text.
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
            stock=("channels_last",),
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
            stock=("tf32", "bf16"),
            sets_dtype=True,
        ),
        Knob(
            name="weights",
            meaning="how the weights of matrix products and convolutions come to be in half precision",
            choices={
                "given": "cast by autocast, each by itself, and each gradient cast back to fp32",
                "bf16_copies": "cast by few launches a step; gradients stay in bf16 until Kitsune's update reads them",
            },
            needs="bf16 autocast by the plan, and torch.compile without graphs of its own",
            excludes=(
                Exclusion(
                    choices=("bf16_copies",),
                    other="precision",
                    other_choices=("fp32", "tf32", "fp16"),
                    reason="weights are copied to the dtype of bf16 autocast",
                    instead=dict.fromkeys(("fp32", "tf32", "fp16"), "bf16"),
                ),
                Exclusion(
                    choices=("bf16_copies",),
                    other="compile",
                    other_choices=("off", *OWN_GRAPHS),
                    reason="copies are passed to compiled graphs, and not through CUDA graphs of Inductor's own",
                    instead={"off": "default", **WITHOUT_OWN_GRAPHS},
                ),
            ),
        ),
        Knob(
            name="activations",
            meaning="dtype of what autocast leaves in fp32 between products",
            choices={
                "given": "embeddings, norms, and sums with them stay in fp32",
                "bf16": "rounded to bf16, which other layers then read; norms, softmax and losses compute in fp32",
            },
            needs="bf16 autocast by the plan, torch.compile, and an embedding or a norm other than of batches",
            excludes=(
                Exclusion(
                    choices=("bf16",),
                    other="precision",
                    other_choices=("fp32", "tf32", "fp16"),
                    reason="activations are rounded to the dtype of bf16 autocast",
                    instead=dict.fromkeys(("fp32", "tf32", "fp16"), "bf16"),
                ),
                Exclusion(
                    choices=("bf16",),
                    other="compile",
                    other_choices=("off",),
                    reason="without torch.compile each rounding would be a launch of its own",
                    instead={"off": "default"},
                ),
            ),
        ),
        Knob(
            name="inductor",
            meaning="which operations Inductor generates one kernel for",
            choices={
                "default": "as it decides",
                "no_mix_order": "gradients of a norm's gain and bias in kernels of their own, beside none of its input",
            },
            needs="torch.compile on a GPU",
            excludes=(
                Exclusion(
                    choices=("no_mix_order",),
                    other="compile",
                    other_choices=("off",),
                    reason="without torch.compile Inductor generates nothing",
                    instead={"off": "default"},
                ),
            ),
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
            name="masks",
            meaning="attention masks of a batch",
            choices={
                "given": "read by attention",
                "dropped": "left out where they show every position, which is asked of each batch",
            },
            needs="an argument attention_mask that shows every position of the batch, and torch.compile",
            excludes=(
                Exclusion(
                    choices=("dropped",),
                    other="compile",
                    other_choices=("off",),
                    reason="without torch.compile it is for the model to look at its mask",
                    instead={"off": "default"},
                ),
            ),
        ),
        Knob(
            name="accumulation",
            meaning="parts of a batch that forward and backward run on one after the other, to save memory",
            choices={1: "the whole batch at once", **{count: f"{count} parts, by rows" for count in (2, 4, 8)}},
            needs="a loss that is a mean over the rows of a batch, no batch norm, and TrainStep",
            stock=(2, 4, 8),
            searched=(),
        ),
        Knob(
            name="recompute",
            meaning="what the backward computes again, to save the memory that keeping it takes",
            choices={
                "off": "nothing but what the compiler decides",
                "keep-75": "at most 75 % of what a compiled backward reads is kept",
                "keep-50": "at most 50 % is kept",
                "keep-30": "at most 30 % is kept",
                "blocks-keep-attention": "each repeated block keeps its input and what attention returns",
                "blocks": "each repeated block keeps its input only",
            },
            needs="for shares torch.compile and no dropout; for blocks a model that repeats modules",
            stock=(*SHARES_KEPT, "blocks-keep-attention", "blocks"),
            searched=(),
            saves_memory=True,
            excludes=(
                Exclusion(
                    choices=SHARES_KEPT,
                    other="compile",
                    other_choices=("off",),
                    reason="AOTAutograd chooses what to keep of a compiled graph",
                    instead={"off": "default"},
                ),
                Exclusion(
                    choices=(*SHARES_KEPT, "blocks-keep-attention", "blocks"),
                    other="compile",
                    other_choices=OWN_GRAPHS,
                    reason="CUDA graphs of Inductor's own fail where the backward recomputes (pytorch#154306)",
                    instead=WITHOUT_OWN_GRAPHS,
                ),
            ),
        ),
        Knob(
            name="fusion",
            meaning="patterns in forward and loss replaced by Kitsune's Triton kernels",
            choices={
                "off": "as given",
                "products": "only those around matrix products, such as the loss with the head before it, and pooling; "
                "the compiler fuses norms and element-wise operations",
                "kitsune": "patterns replaced by Kitsune's Triton kernels, where these were measured to be faster here",
            },
            needs="a GPU, and Triton; with compile, Inductor compiles the rest, else it runs eagerly",
        ),
        Knob(
            name="compile",
            meaning="torch.compile of forward and loss (and the backward it generates)",
            choices={
                "off": "eager kernels",
                "default": "Inductor, default mode",
                "coordinate-descent": "Inductor, default mode with coordinate descent tuning of its long kernels",
                "max-autotune-no-cudagraphs": "Inductor, matrix products autotuned",
                "reduce-overhead": "Inductor with its own CUDA graphs around forward and backward",
                "max-autotune": "Inductor autotuned, with its own CUDA graphs",
            },
            needs="a working compiler (Triton on a GPU, a C++ compiler on a CPU)",
            slow=("coordinate-descent", "max-autotune-no-cudagraphs", "max-autotune"),
            stock=("default", "reduce-overhead", "max-autotune"),
            compiles=True,
        ),
        Knob(
            name="update",
            meaning="implementation of the optimizer's update",
            choices={
                "given": "as given",
                "foreach": "horizontally fused, one launch per operation; on a GPU torch's own default",
                "fused": "one kernel for the whole update",
                "kitsune": "one Triton kernel of Kitsune's for the whole update, for AdamW",
            },
            needs="an optimizer of torch.optim that has the implementation; kitsune a GPU, Triton, parameters in fp32",
            stock=("fused",),
            searched=("fused", "kitsune"),
            changes_code=False,
        ),
        Knob(
            name="capture",
            meaning="CUDA graphs around the step",
            choices={
                "none": "kernels launched one by one",
                "segments": "forward, backward and update as three graphs; loss and training loop are not captured",
                "step": "zero_grad, forward, loss, backward, clipping, scaling and update in one graph",
            },
            needs="CUDA; a step without host synchronisation; a compile mode without graphs of its own",
            changes_code=False,
            changes_numbers=False,
            excludes=(
                Exclusion(
                    choices=("segments", "step"),
                    other="compile",
                    other_choices=OWN_GRAPHS,
                    reason="this compile mode puts CUDA graphs of its own around forward and backward",
                    instead=WITHOUT_OWN_GRAPHS,
                ),
            ),
        ),
        Knob(
            name="streams",
            meaning="number of CUDA streams on which independent launches of a captured graph run",
            choices={
                1: "one after the other, as recorded",
                **{count: f"on up to {count} streams, scheduled by their measured times" for count in SEVERAL},
            },
            needs="capture; every launch recorded, and the recording verified to be the same step",
            searched=(2, 4, 8),
            changes_numbers=False,
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
            meaning="limit of the memory for a step's intermediate tensors when it runs on several streams",
            choices={
                0: "the memory of one stream, plus a fifth of the whole step or 32 MiB",
                **{2**power: f"{size} at most" for power, size in POOL_SIZES.items()},
            },
            needs="launches on several streams: less memory, fewer of them side by side",
            searched=(),
            changes_code=False,
            changes_numbers=False,
            excludes=(
                Exclusion(
                    choices=tuple(2**power for power in POOL_SIZES),
                    other="streams",
                    other_choices=(1,),
                    reason="on one stream torch's allocator decides how much memory the step uses",
                    instead={1: 2},
                ),
            ),
        ),
        Knob(
            name="prefetch",
            meaning="number of batches that TrainStep.batches copies to the device ahead of their step",
            choices={
                0: "as the loader gives them",
                1: "one, from a thread and on a stream of its own",
                **{count: f"{count}, from a thread and on a stream of its own" for count in (2, 4, 8)},
            },
            needs="a loop over TrainStep.batches(loader); a search does not try it: its batch is on the device already",
            searched=(),
            changes_code=False,
            changes_numbers=False,
        ),
    )
}


def clashes(knobs: Mapping[str, Choice], table: Mapping[str, Knob] = KNOBS) -> Iterator[tuple[Knob, Exclusion]]:
    """The exclusions that these choices violate, each with the knob that declares it. Missing knobs are at default."""
    for knob in table.values():
        for exclusion in knob.excludes:
            other = table.get(exclusion.other)
            if (
                other is not None
                and knobs.get(knob.name, knob.default) in exclusion.choices
                and knobs.get(other.name, other.default) in exclusion.other_choices
            ):
                yield knob, exclusion
