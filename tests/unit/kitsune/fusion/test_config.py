"""FusionConfig: what it takes, and what it refuses before anything is fused by it."""

import math

import pytest

from kitsune.errors import SettingsError
from kitsune.fusion import FusionConfig


@pytest.mark.parametrize(
    ("name", "value"),
    [
        *(("max_fusion_size", value) for value in (0, -1, 8.5, "8", True, None)),
        *(("min_fusion_benefit", value) for value in (-1, math.nan, math.inf, "1.1", True, None)),
        *((f"enable_{kind}", value) for kind in ("elementwise", "reduction", "matmul") for value in ("no", 1, None)),
    ],
)
def test_what_it_cannot_mean_is_refused_with_the_name_and_the_value(name, value):
    with pytest.raises(SettingsError, match=rf"FusionConfig\.{name} is {value!r}"):
        FusionConfig(**{name: value})


def test_the_least_of_each_is_taken():
    config = FusionConfig(max_fusion_size=1, min_fusion_benefit=0, enable_matmul=False)
    assert (config.max_fusion_size, config.min_fusion_benefit, config.enable_matmul) == (1, 0, False)
