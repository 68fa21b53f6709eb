"""Patterns in which the agents of a pool work together, each in a module of its own.

Three of the modules have the name of a function in them. Here that name is the module, so nothing is imported.
"""
