"""The commands of `python -m labkit`, one module each.

Each has `add_arguments(parser)` and `run(options)`, which returns the exit status.
"""
