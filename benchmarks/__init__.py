"""Benchmarks; each module says how to run it. Results with command, commit and machine: benchmarks/results."""
