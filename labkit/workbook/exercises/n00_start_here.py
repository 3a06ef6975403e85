"""Exercises of notebook 00: units, FLOPs, and which of two limits a step meets."""

from labkit.workbook.exercises.spec import Case, Exercise, Misconception


def gibibytes(n_bytes: int) -> float:
    """Return bytes as GiB, the unit in which devices state their memory."""
    return n_bytes / 2**30


def matmul_flops(m: int, k: int, n: int) -> int:
    """Return FLOPs of an (m, k) by (k, n) product: one multiply, one add each."""
    return 2 * m * k * n


def limit(flops: float, n_bytes: float, peak_flops: float, bandwidth: float) -> str:
    """Return what a step waits for: its arithmetic or its bytes."""
    return "compute" if flops / peak_flops > n_bytes / bandwidth else "memory"


EXERCISES = (
    Exercise(
        name="gibibytes",
        kind="write",
        title="GB or GiB?",
        difficulty=1,
        minutes=2,
        task="Device memory is stated in GiB, files mostly in GB. Write "
        "`gibibytes(n_bytes)`, which turns bytes into GiB.",
        stub="def gibibytes(n_bytes):\n    ...",
        cases=(
            Case(given="1,073,741,824 bytes", args=(1_073_741_824,), expected=1.0),
            Case(given="85,899,345,920 bytes", args=(85_899_345_920,), expected=80.0),
            Case(given="1,610,612,736 bytes", args=(1_610_612_736,), expected=1.5),
        ),
        misconceptions=(
            Misconception(lambda n_bytes: n_bytes / 1e9, "that is GB: GiB count 1024³"),
            Misconception(lambda n_bytes: n_bytes / 2**20, "that is MiB: 1024 more"),
            Misconception(
                lambda n_bytes: n_bytes // 2**30,
                "`//` drops the part after the point",
            ),
        ),
        hints=(
            "One KiB is 1024 bytes; how many KiB make a MiB, how many MiB a GiB?",
            "1024³ is `2**30`.",
        ),
        solution=gibibytes,
    ),
    Exercise(
        name="matmul_flops",
        kind="write",
        title="What a matrix product costs",
        difficulty=1,
        minutes=3,
        task="Write `matmul_flops(m, k, n)`: the FLOPs of multiplying an `(m, k)` "
        "matrix by a `(k, n)` matrix. A multiplication and an addition count one each.",
        stub="def matmul_flops(m, k, n):\n    ...",
        cases=(
            Case(given="m=1, k=1, n=1", args=(1, 1, 1), expected=2),
            Case(given="m=2, k=3, n=4", args=(2, 3, 4), expected=48),
            Case(
                given="m=4096, k=7168, n=2048",
                args=(4096, 7168, 2048),
                expected=120_259_084_288,
            ),
        ),
        misconceptions=(
            Misconception(
                lambda m, k, n: m * k * n,
                "that counts multiply-adds: each is two operations",
            ),
            Misconception(
                lambda m, k, n: 2 * m * n,
                "each of the m·n results is a sum of k products",
            ),
            Misconception(
                lambda m, k, n: m * n * (2 * k - 1),
                "exact, but the first addition is counted too by convention",
            ),
        ),
        hints=(
            "How many numbers does the result have, and how many products does each "
            "of them sum?",
            "m·n results, k products and k additions each.",
        ),
        solution=matmul_flops,
    ),
    Exercise(
        name="roofline_limit",
        kind="write",
        title="Does it compute, or does it wait?",
        difficulty=2,
        minutes=5,
        task="A step does `flops` operations and moves `n_bytes`. The machine does "
        "`peak_flops` and moves `bandwidth` bytes per second, both at once. Write "
        "`limit(flops, n_bytes, peak_flops, bandwidth)`: return `'compute'` or "
        "`'memory'`, whichever takes longer.",
        stub="def limit(flops, n_bytes, peak_flops, bandwidth):\n    ...",
        cases=(
            Case(
                given="decoding one token",
                args=(2e9, 2e9, 1e12, 1e10),
                expected="memory",
            ),
            Case(
                given="a large product",
                args=(1e15, 1e11, 1e12, 1e10),
                expected="compute",
            ),
            Case(
                given="more FLOPs than bytes, and slow memory",
                args=(8e10, 1e9, 1e12, 1e10),
                expected="memory",
            ),
        ),
        misconceptions=(
            Misconception(
                lambda flops, n_bytes, peak_flops, bandwidth: (
                    "compute" if flops > n_bytes else "memory"
                ),
                "FLOPs and bytes have different speeds: compare seconds",
            ),
            Misconception(
                lambda flops, n_bytes, peak_flops, bandwidth: (
                    "memory" if flops / peak_flops > n_bytes / bandwidth else "compute"
                ),
                "the longer time is the limit, not the shorter",
            ),
        ),
        hints=(
            "Turn both amounts into seconds.",
            "Compare `flops / peak_flops` with `n_bytes / bandwidth`.",
        ),
        solution=limit,
        because="the two overlap, so the longer one hides the shorter.",
    ),
    Exercise(
        name="read_the_weights",
        kind="predict",
        title="The least time for a token",
        difficulty=2,
        minutes=4,
        task="To decode one token, every active weight is read from memory once. "
        "DeepSeek-V3 has 36.6 billion active parameters; take BF16 and a GPU that "
        "reads 3.35 TB per second. How many milliseconds does reading alone take? A "
        "guess within 5 per cent counts.",
        stub="milliseconds = None",
        cases=(Case(given="", expected=21.9, tolerance=0.05, unit="ms"),),
        misconceptions=(
            Misconception(401, "that reads all 671 billion: a token visits 8 experts"),
            Misconception(10.9, "that is one byte a weight: BF16 has two"),
            Misconception(0.0219, "that is seconds"),
        ),
        hints=(
            "How many bytes are 36.6 billion BF16 numbers?",
            "73.2 GB at 3,350 GB per second.",
        ),
        solution=21.9,
        because="46 tokens a second is the roof for one sequence on that memory.",
    ),
)
