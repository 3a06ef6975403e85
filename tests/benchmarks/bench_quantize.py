"""Quantizing 1 x 128 tiles beside copying: the share of this machine's bandwidth.

Bytes are those read and those written, of the quantizer as of the copies. The measure
is the copy of `labkit.hardware`'s roofline, between buffers that no cache holds; a copy
of the same matrix, which a large cache holds in part, is shown beside it. All take
turns, and medians count. Run with `make bench`, or
`python tests/benchmarks/bench_quantize.py [ROUNDS]`.
"""

import sys

import torch
from reference import medians

from labkit.hardware.roofline import COPY_BYTES
from labkit.precision import QuantSpec, quantize

SIZE = 4096

SPEC = QuantSpec()

FLOORS = {"eager": 0.10, "compiled": 0.40}
"""Least share of the bytes per second that this machine copies."""


def main() -> None:
    torch.set_num_threads(2)
    n_rounds = int(sys.argv[1]) if len(sys.argv) > 1 else 7
    passed = True
    source, copied = torch.ones(COPY_BYTES // 4), torch.zeros(COPY_BYTES // 4)
    for dtype in (torch.float32, torch.bfloat16):
        x = torch.randn(SIZE, SIZE).to(dtype)
        target = torch.empty_like(x)
        times = medians(
            {
                "machine": lambda: copied.copy_(source),
                "matrix": lambda x=x, target=target: target.copy_(x),
                "eager": lambda x=x: quantize(x, SPEC),
                "compiled": lambda x=x: quantize(x, SPEC, is_compiled=True),
            },
            n_rounds,
            n_repeats=3,
        )
        machine = 2 * COPY_BYTES / times["machine"]
        matrix = 2 * x.nbytes / times["matrix"]
        moved = x.nbytes + quantize(x, SPEC).nbytes
        for kind, floor in FLOORS.items():
            rate = moved / times[kind]
            share = rate / machine
            passed = passed and share >= floor
            print(
                f"{str(dtype).removeprefix('torch.')} {SIZE} x {SIZE}, {kind}: "
                f"{times[kind] * 1e3:.1f} ms, {rate / 1e9:.1f} GB/s; {share:.0%} of "
                f"this machine's {machine / 1e9:.1f} (floor {floor:.0%}), "
                f"{rate / matrix:.0%} of the matrix's own {matrix / 1e9:.1f}",
                flush=True,
            )
    print("every floor reached" if passed else "a floor was missed")
    sys.exit(not passed)


if __name__ == "__main__":
    main()
