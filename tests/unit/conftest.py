"""Kernels of these tests run under Triton's interpreter, which must be chosen before anything imports Triton."""

import os

os.environ["TRITON_INTERPRET"] = "1"
