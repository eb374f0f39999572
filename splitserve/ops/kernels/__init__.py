"""How kernels are compiled, cached, configured and started. No kernel is here."""
