"""Where torch keeps its compile cache on this machine. No torch."""

import getpass
import os
import re
import tempfile
from pathlib import Path


def compiled_folder() -> Path:
    """TORCHINDUCTOR_CACHE_DIR, or where torch keeps compiled code without it; perhaps not there yet."""
    given = os.environ.get("TORCHINDUCTOR_CACHE_DIR", "")
    return Path(given) if given else usual_folder()


def usual_folder() -> Path:
    """Where torch keeps compiled code by default: training by a plan finds there what its tuning has compiled.

    What autotuning picked lies there too: 60 s of work for BERT-base on an H200, and picked anew it may be otherwise.
    """
    return Path(tempfile.gettempdir()) / f"torchinductor_{_user()}"


def _user() -> str:
    """The user's name as Inductor writes it into file names."""
    try:
        name = getpass.getuser()
    except (KeyError, OSError):
        name = f"uid_{os.getuid()}"
    return re.sub(r'[\\/:*?"<>|]', "_", name)
