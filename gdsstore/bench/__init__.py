"""Benchmarks that ship with the library: ratios against a ceiling that is taken in the same run, round by round."""
