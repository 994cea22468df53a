"""Size limits of an archive. All are checked before anything is built from the bytes.

Reading, validating, writing and fingerprinting an archive at the limits of its graph takes about 0.5 s of one core. An
encoder of 100 layers has 3503 nodes, 1200 tensors and a graph of 0.44 MB.
"""

from typing import Final

MAX_ARCHIVE_BYTES: Final = 32 * 2**20
MAX_MEMBERS: Final = 4096
MAX_GRAPH_BYTES: Final = 2 * 2**20
MAX_BUFFER_BYTES: Final = 64 * 2**10
MAX_DEPTH: Final = 64
MAX_NODES: Final = 12_000
MAX_REGION_DEPTH: Final = 6
# An empty JSON object takes up to 30 times its two bytes once parsed: these two bound the memory of parsing.
MAX_CONTAINERS: Final = 50_000
MAX_COMMAS: Final = 120_000
MAX_KEYS: Final = 256
"""The most keys of one JSON object."""
MAX_DIGITS: Final = 20
"""The most characters of one integer, including its sign; more than 64 bits need."""
MAX_TENSORS: Final = 8192
MAX_INPUTS: Final = 1024
MAX_RANK: Final = 16
MAX_NUMEL: Final = 2**34
MAX_TOTAL_BYTES: Final = 2**39
MAX_INTEGER: Final = 2**63 - 1
"""The largest int64, for arguments of operators."""
MAX_SAMPLE: Final = 2**62
"""The largest magnitude of an integer sampled for a batch or a buffer."""

ITEM_BYTES: Final = {
    "float32": 4,
    "float64": 8,
    "float16": 2,
    "bfloat16": 2,
    "int64": 8,
    "int32": 4,
    "int16": 2,
    "int8": 1,
    "uint8": 1,
    "bool": 1,
    "complex64": 8,
    "complex128": 16,
}
"""The dtypes that a tensor of an archive may have, with the size of an element in bytes."""
