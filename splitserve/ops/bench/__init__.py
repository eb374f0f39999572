"""Time and error of every kernel on the GPU at hand, against what that GPU can do."""
