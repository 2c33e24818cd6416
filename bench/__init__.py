"""Benchmarks: ratios against a peer or a bound, measured in the same run."""
