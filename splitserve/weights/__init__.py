"""Model files in: found (locate), opened (gguf, safetensors), named (rules), cut to a rank's part while loading (load).

Everything but `load` is torch-free, so that a server can read a model's configuration without torch. Nothing here
computes, and nothing knows the model classes.
"""
