"""The commands of `python -m labkit`, one module each.

Each has `add_arguments(parser)`, `run(options)`, which returns the exit status, and
`TERMS`: what a message of the library calls by a Python name, and the option for it.
"""
