"""Kernels in Triton, of the same names and signatures as ops/ref."""
