"""The proof that a split answer is the unified answer and that its state really crossed.

cases    what is asked
judge    what counts as proof (pure)
run      asks both sides, plants faults, prints the table
"""
