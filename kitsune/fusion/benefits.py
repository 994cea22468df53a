"""What kernels of ours were measured to be worth, kept for the next process that asks on such a GPU.

Measured anew in each, a match that is worth about as much as is asked for would fall on the other side now and then.
The step is another graph then, which Inductor compiles from the beginning: a ResNet-50 on an H200 took 34 to 78 s in
processes that should have found it compiled, and the plan was not the same in all of them.
"""

import hashlib
import json
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any, Final

import torch
import triton

from kitsune.compile_cache import compiled_folder
from kitsune.fusion.stats import Benefit
from kitsune.keyed_files import KeyedFiles

#: One more with every change of a kernel, of what it replaces, or of how both are timed.
RULES: Final = 1
FOLDER: Final = "kitsune-fusion"
OURS: Final = "kitsune."


@dataclass(frozen=True, slots=True)
class Benefits:
    files: KeyedFiles

    @classmethod
    def of_this_machine(cls) -> "Benefits":
        """Beside what torch has compiled."""
        return cls(KeyedFiles(compiled_folder() / FOLDER))

    def find(self, key: str) -> Benefit | None:
        text = self.files.read(key)
        try:
            return None if text is None else Benefit(**{name: float(ms) for name, ms in json.loads(text).items()})
        except (ValueError, TypeError, AttributeError):
            return None

    def keep(self, key: str, benefit: Benefit) -> Benefit:
        """The one that holds: of two processes that measured at the same time, the first one's."""
        found = self.find(key)
        if found is None:
            self.files.write(key, json.dumps(asdict(benefit)))
        return found or benefit


def key_of(call: Callable[..., Any], said: tuple[Any, ...], device: torch.device) -> str | None:
    """The same for the same match, told by what is `said` of it, on the same kind of GPU by the same torch.

    None for a call that is not one of ours, whose code may be another one tomorrow, and where what is said holds an
    address.
    """
    text = repr((RULES, torch.__version__, triton.__version__, torch.cuda.get_device_name(device), said))
    if not call.__module__.startswith(OURS) or " at 0x" in text:
        return None
    return hashlib.sha256(f"{call.__module__}.{call.__qualname__} {text}".encode()).hexdigest()
