"""The folder of torch's compile cache. Does not import torch."""

import getpass
import os
import re
import tempfile
from pathlib import Path


def compiled_folder() -> Path:
    """TORCHINDUCTOR_CACHE_DIR, or torch's default folder. It may not exist yet."""
    given = os.environ.get("TORCHINDUCTOR_CACHE_DIR", "")
    return Path(given) if given else usual_folder()


def usual_folder() -> Path:
    """Torch's default folder for compiled code, in which training with a plan finds what tuning has compiled.

    It also holds the choices of autotuning: 60 s of work for BERT-base on an H200, and another run may choose
    differently.
    """
    return Path(tempfile.gettempdir()) / f"torchinductor_{_user()}"


def _user() -> str:
    """The user's name as Inductor escapes it in file names."""
    try:
        name = getpass.getuser()
    except (KeyError, OSError):
        name = f"uid_{os.getuid()}"
    return re.sub(r'[\\/:*?"<>|]', "_", name)
