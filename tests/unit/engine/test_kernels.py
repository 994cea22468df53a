from collections import Counter

from kitsune.engine.kernels import difference


def test_kernels_that_are_missing_are_told_and_more_are_none_of_our_business():
    assert difference(Counter(a=2, b=1), Counter(b=1, a=2)) == ""
    assert difference(Counter(a=1), Counter(a=1, b=3)) == ""
    told = difference(Counter(gemm=3, copy=1), Counter(gemm=1))
    assert told == "3 kernels are launched out of our sight, among them 2 of gemm"
