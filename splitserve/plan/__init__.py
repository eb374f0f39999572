"""What serving costs and what a measurement means. Arithmetic only: no I/O, no clock.

cost      step times and request rates of a split pair and of unified engines on the same devices
verdict   from lifetime marks and step sums to what was in the way, and whether the split pays
"""
