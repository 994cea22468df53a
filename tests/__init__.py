"""The tests, and `tests.benchmarks`, which users run too."""
