"""Train a DeepSeek-V3-class model inside the memory, time and links you have.

The rooms, from the bottom up (each may import only from rooms to its right):
`workbook`, `__main__` → `tuning` → `evals`, `training` → `precision`, `memory`,
`parallel`, `monitor` → `model` → `config`, `hardware` → `data`.
"""

__version__ = "0.1.0"
