"""Moving a request's state from the engine that computed it to the engine that continues it. Knows no requests.

Start with docs/handoff.md; then handoff.py (what may happen), layout.py (which bytes go where), digest.py (the proof
that they did), port.py (one rank's end), sender.py and receiver.py.
"""
