"""Checkpoints with random weights, for tests, demo and benchmarks: `cairn make-model`."""
