"""Models: what one is (config), what it keeps (states), which exist (registry), and their forward passes. config, rope,
states and registry are torch-free; the model classes are imported when one is built.
"""
