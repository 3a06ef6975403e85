"""Quantizing 1 x 128 tiles beside copying: the share of the copy's bandwidth.

Bytes are those read and those written, of the copy as of the quantizer. Both take
turns, and medians count. Run with `make bench`, or
`python tests/benchmarks/bench_quantize.py`.
"""

import sys

import torch
from reference import medians

from labkit.precision import QuantSpec, quantize

SIZE = 4096

SPEC = QuantSpec()

FLOORS = {"eager": 0.10, "compiled": 0.40}
"""Least share of the copy's bytes per second."""


def main() -> None:
    torch.set_num_threads(2)
    n_rounds = int(sys.argv[1]) if len(sys.argv) > 1 else 7
    passed = True
    for dtype in (torch.float32, torch.bfloat16):
        x = torch.randn(SIZE, SIZE).to(dtype)
        target = torch.empty_like(x)
        times = medians(
            {
                "copy": lambda x=x, target=target: target.copy_(x),
                "eager": lambda x=x: quantize(x, SPEC),
                "compiled": lambda x=x: quantize(x, SPEC, is_compiled=True),
            },
            n_rounds,
            n_repeats=3,
        )
        copied = 2 * x.nbytes / times["copy"]
        moved = x.nbytes + quantize(x, SPEC).nbytes
        for kind, floor in FLOORS.items():
            share = moved / times[kind] / copied
            passed = passed and share >= floor
            print(
                f"{str(dtype).removeprefix('torch.')} {SIZE} x {SIZE}, {kind}: "
                f"{times[kind] * 1e3:.1f} ms, {moved / times[kind] / 1e9:.1f} GB/s; "
                f"{share:.0%} of a copy's {copied / 1e9:.1f} (floor {floor:.0%})",
                flush=True,
            )
    print("every floor reached" if passed else "a floor was missed")
    sys.exit(not passed)


if __name__ == "__main__":
    main()
