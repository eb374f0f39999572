"""One address in front of prefill, decode and unified engines: who takes a request, and the bytes in between."""
