"""Whole boxes of GPUs, measured by the commands that a person uses.

split   fabric, binding, handoffs and `compare` of one deployment file, stage by stage
page    what the stages found, as one page; measures nothing
"""
