"""splitserve: serve a language model with prefill and decode on different devices, and prove that the state crossed.

Importing the package imports nothing else; see docs/architecture.md for the parts and their order.
"""

__version__ = "0.1.0"
