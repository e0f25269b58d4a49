"""Kernels: plain functions on tensors, one folder a backend, all with the signatures of `contract.Kernels`."""
