"""The interface of a technique: when an optimisation applies, and how it changes a step under construction."""

import contextlib
import traceback
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar, Final

import torch

from kitsune.autograd.half_weights import HalfWeights
from kitsune.autograd.sole_outputs import SoleOutputs
from kitsune.fusion.config import FusionConfig
from kitsune.knobs import Choice
from kitsune.update.loss_scaler import LossScaler

if TYPE_CHECKING:  # loads Triton, which is not everywhere
    from kitsune.fusion import FusionEngine

Context = Callable[[], contextlib.AbstractContextManager[Any]]


@dataclass(frozen=True, kw_only=True, slots=True)
class Facts:
    """Facts of a device and a workload that techniques depend on. For `attention`, None means: not observed."""

    device: str
    compute_capability: tuple[int, int] = (0, 0)
    compiler: str | None = None  # why torch.compile cannot work here; None when it can
    parameter_dtypes: frozenset[torch.dtype] = frozenset()
    convolutions: bool = False
    wide_activations: bool = False  # has embeddings or norms, whose results autocast leaves in fp32
    attention: bool | None = None
    hook: str | None = None  # the first Python hook found, in words
    distributed: bool = False
    optimizer: str = ""
    optimizer_options: tuple[str, ...] = ()  # the implementation flags that it has: foreach, fused, capturable
    optimizer_chosen: str | None = None  # the implementation that the user chose
    update_kernel: str | None = None  # why Kitsune's kernel cannot do the update; None when it can
    tensor_rate: bool = False  # a learning rate is a tensor
    others_parameters: int = 0  # how many trained parameters of the model are not in the optimizer
    sparse_gradients: bool = False
    open_masks: bool = False  # an attention_mask of the batch shows every position; True where no batch is known
    batch_norms: bool = False
    blocks: int = 0  # how many modules repeat others of the model, as recompute finds them
    host_sync: str | None = None  # the user's line that waits for the device in the step as given


@dataclass(kw_only=True)
class Build:
    """A step under construction. Techniques change it in the order of the knobs table; `undo` reverts all changes."""

    model: torch.nn.Module
    optimizer: torch.optim.Optimizer
    device: torch.device
    forward: Callable[..., Any]
    undo: contextlib.ExitStack
    forward_contexts: list[Context] = field(default_factory=list)
    step_contexts: list[Context] = field(default_factory=list)
    memory_format: torch.memory_format | None = None
    scaler: LossScaler | None = None
    capture: Choice = "none"
    streams: int = 1
    pool_bytes: int | None = None
    prefetch: int = 0
    parts: int = 1  # of each batch, or of each part that the user asks for, one after the other
    in_loop: bool = False  # a loop of the user's own: only the forward is replaced
    loss_scaling: Mapping[str, Any] = field(default_factory=dict)  # LossScaler's arguments, set by the user
    fusion_config: FusionConfig | None = None  # what Kitsune's kernels and Inductor may fuse, set by the user
    fusion: "FusionEngine | None" = None  # puts Kitsune's kernels into the graphs that torch.compile captures
    unfused: Callable[..., Any] | None = None  # the forward before fusion
    half_weights: HalfWeights | None = None  # passed to what torch.compile compiles
    half_activations: torch.dtype | None = None  # to which torch.compile rounds what autocast leaves in fp32
    kept_share: float = 1.0  # of what the backward reads, that torch.compile may keep
    asks_for_masks: bool = False  # batches whose attention_mask shows every position are steps of their own
    sole_outputs: SoleOutputs | None = None  # whose rows torch.compile may pad, in a loop
    inductor: dict[str, Any] = field(default_factory=dict)  # options for Inductor that other choices need
    computes_in_half: bool = False  # outputs of the forward may be in half precision
    hides_hooks: bool = False  # hooks that are put on modules later are not seen
    frees_activations: bool = False  # a second backward through one forward is not possible
    is_specialised: bool = False  # to the shapes of a batch, and to values that are not tensors
    waiting: dict[str, str] = field(default_factory=dict)  # knob -> what has to happen before it has an effect


@dataclass(frozen=True, slots=True)
class Tolerance:
    """Errors, relative to a high-precision reference, that are always accepted."""

    loss: float
    gradient: float
    parameter: float


#: The base class of Dynamo's errors, except for those that it raises again unchanged (RAISED_AGAIN).
DYNAMO_ERROR: Final = "torch._dynamo.exc.TorchDynamoException"
RAISED_AGAIN: Final = (AssertionError, IndexError)


def raised_in(error: BaseException, part: str) -> bool:
    """Whether the traceback of an error has a file whose path contains `part`."""
    frames = traceback.walk_tb(error.__traceback__)
    return any(part in frame.f_code.co_filename for frame, _ in frames)


def is_a(error: BaseException, *types: str) -> bool:
    """Whether an error is of one of these types, by full name, because torch loads them with its compiler only."""
    return any(f"{kind.__module__}.{kind.__qualname__}" in types for kind in type(error).__mro__)


def is_of_dynamo(error: BaseException) -> bool:
    """Whether torch.compile failed to capture what it was given."""
    is_again = isinstance(error, RAISED_AGAIN) and raised_in(error, "torch/_dynamo/convert_frame")
    return is_again or is_a(error, DYNAMO_ERROR)


class Technique(ABC):
    """One optimisation. Its name is that of its knob, and of its file in this folder."""

    name: ClassVar[str]
    #: Whether it may fail after some parameters have been updated, so that the step cannot be repeated.
    fails_half_updated: ClassVar[bool] = False

    @abstractmethod
    def why_not(self, choice: Choice, facts: Facts) -> str | None:
        """The reason why this choice cannot work here, or None."""

    def why_not_beside(self, choice: Choice, facts: Facts) -> Mapping[tuple[str, Choice], str]:
        """{(other knob, its choice): why this choice cannot work together with that one}."""
        return {}

    @abstractmethod
    def apply(self, choice: Choice, build: Build) -> None:
        """Changes the build, and pushes the reversal of each change onto `build.undo`."""

    def splits_loss(self, choice: Choice) -> bool:
        """Whether this choice needs the forward of the model alone, without the loss."""
        return False

    def blames(self, error: BaseException) -> bool:
        """Whether this technique caused an error of the first step, so that the step may work without it."""
        return False

    def tolerance(self, choice: Choice) -> Tolerance | None:
        """The errors that this choice may cause; None if it needs no wider tolerance."""
        return None
