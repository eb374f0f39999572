"""Kernels. `ref` is plain torch and the definition of each; faster twins have the same names and signatures."""
