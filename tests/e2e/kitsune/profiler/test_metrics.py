"""What a process loads that imports the profiler."""

import subprocess
import sys


def test_the_package_loads_nothing_before_a_name_is_used():
    program = (
        "import sys, kitsune.profiler as p; assert 'torch' not in sys.modules; assert 'MemoryTracker' in dir(p); "
        "assert set(p.__all__) == set(p._HOMES)"
    )
    subprocess.run([sys.executable, "-c", program], check=True, timeout=150)
