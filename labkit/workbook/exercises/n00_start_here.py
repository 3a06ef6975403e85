"""Exercises of notebook 00: units, intensity, and which of two limits a step meets."""

from labkit.hardware.gemm import Gemm
from labkit.workbook.exercises.spec import Case, Exercise, Misconception


def gibibytes(n_bytes: int) -> float:
    """Return bytes as GiB, the unit in which devices state their memory."""
    return n_bytes / 2**30


def intensity(m: int, k: int, n: int, itemsize: int) -> float:
    """Return FLOPs per byte: read two factors, write one result."""
    return 2 * m * k * n / (itemsize * (m * k + k * n + m * n))


def limit(flops: float, n_bytes: float, peak_flops: float, bandwidth: float) -> str:
    """Return what a step waits for: its arithmetic or its bytes."""
    return "compute" if flops / peak_flops > n_bytes / bandwidth else "memory"


def mfu(tokens_per_second: float, n_active_params: int, peak_flops: float) -> float:
    """Return the share of the peak that training reaches; attention is left out."""
    flops_per_token = 2 * n_active_params + 4 * n_active_params
    return tokens_per_second * flops_per_token / peak_flops


def intensity_in_expert(rows: int) -> float:
    """Return FLOPs per byte of a product with an expert's weights, in FP8."""
    return Gemm(m=rows, k=7168, n=2048, itemsize=1).intensity


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
        name="gemm_intensity",
        kind="write",
        title="Work for each byte",
        difficulty=2,
        minutes=5,
        task="Write `intensity(m, k, n, itemsize)`: the FLOPs per byte of an `(m, k)` "
        "by `(k, n)` product. A multiplication and an addition count one each. Both "
        "factors are read once, the result is written once, and every element has "
        "`itemsize` bytes.",
        stub="def intensity(m, k, n, itemsize):\n    ...",
        cases=(
            Case(given="m=2, k=4, n=8, 1 byte", args=(2, 4, 8, 1), expected=2.2857143),
            Case(
                given="m=1, k=10, n=10, 4 bytes",
                args=(1, 10, 10, 4),
                expected=0.41666667,
            ),
            Case(
                given="m=3000, k=3000, n=3000, 2 bytes",
                args=(3000, 3000, 3000, 2),
                expected=1000.0,
            ),
        ),
        misconceptions=(
            Misconception(
                lambda m, k, n, itemsize: 2 * m * k * n / (itemsize * k * n),
                "that moves the right factor only: the left one is read and the "
                "result written too",
            ),
            Misconception(
                lambda m, k, n, itemsize: 2 * m * k * n / (itemsize * (m * k + k * n)),
                "that leaves out the result: its m·n elements are written",
            ),
            Misconception(
                lambda m, k, n, itemsize: 2 * m * k * n / (m * k + k * n + m * n),
                "that is FLOPs per element: an element has `itemsize` bytes",
            ),
            Misconception(
                lambda m, k, n, itemsize: (
                    m * k * n / (itemsize * (m * k + k * n + m * n))
                ),
                "that counts multiply-adds: each is two operations",
            ),
        ),
        hints=(
            "The result has m·n numbers, and each of them sums k products: how many "
            "operations is that?",
            "`2 * m * k * n` FLOPs; `m * k`, `k * n` and `m * n` elements move.",
        ),
        solution=intensity,
        because="a square product of size s reaches s/3 in BF16, a single row never "
        "more than 1.",
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
        name="enough_rows",
        kind="target",
        title="Fill the machine",
        difficulty=2,
        minutes=6,
        task="An expert of DeepSeek-V3 multiplies its `rows` tokens, `(rows, 7168)`, "
        "by a `(7168, 2048)` weight, all in FP8. A B200 does 4,500 TFLOP/s in FP8 and "
        "moves 8 TB/s. Set `rows` to the fewest tokens that make this product "
        "compute-bound.",
        stub="rows = None",
        cases=(
            Case(
                given="the intensity",
                measure=intensity_in_expert,
                at_least=562.5,
                unit="FLOP per byte",
            ),
            Case(
                given="the number of tokens",
                measure=lambda rows: rows,
                at_most=342,
                otherwise="are compute-bound, but fewer suffice",
                unit="tokens",
            ),
        ),
        misconceptions=(
            Misconception(
                282,
                "enough for the weights alone; input and result move as well, and cost "
                "intensity",
            ),
            Misconception(
                563,
                "that is the ridge, and more than it takes: in FP8 a token brings 2 "
                "FLOPs for each byte of weight",
            ),
            Misconception(
                363, "that fills an H800 in BF16: here it is a B200, and FP8"
            ),
            Misconception(512, "a power of two, and more than it takes"),
        ),
        hints=(
            "The ridge is at 4,500 / 8 FLOP per byte. How much intensity does one "
            "more token bring?",
            "In FP8, 2/intensity = 1/rows + 1/7168 + 1/2048. Solve for rows, or try "
            "values in a loop.",
        ),
        solution=342,
        because="a layer sends each token to 8 of 256 experts, so filling all of them "
        "takes about 10,900 tokens at once, evenly spread: why decoding in small "
        "batches is slow.",
    ),
    Exercise(
        name="mfu_of_a_run",
        kind="fix",
        title="Half a machine is missing",
        difficulty=2,
        minutes=4,
        task="`mfu` should return the share of `peak_flops` that a training run "
        "reaches. The run is fine, yet the number comes out far too low. Find what is "
        "not counted. (The products of queries with keys are left out on purpose.)",
        stub="def mfu(tokens_per_second, n_active_params, peak_flops):\n"
        "    flops_per_token = 2 * n_active_params\n"
        "    return tokens_per_second * flops_per_token / peak_flops",
        cases=(
            Case(
                given="1,000 tokens/s, 1 million parameters, a peak of 20 GFLOP/s",
                args=(1000.0, 1_000_000, 20e9),
                expected=0.3,
            ),
            Case(
                given="2 tokens/s, 5 parameters, a peak of 60 FLOP/s",
                args=(2.0, 5, 60.0),
                expected=1.0,
            ),
        ),
        misconceptions=(
            Misconception(
                lambda tokens_per_second, n_active_params, peak_flops: (
                    tokens_per_second * 4 * n_active_params / peak_flops
                ),
                "backward alone is 4 per parameter; forward comes on top",
            ),
            Misconception(
                lambda tokens_per_second, n_active_params, peak_flops: (
                    tokens_per_second * 3 * n_active_params / peak_flops
                ),
                "3 counts a multiplication and its addition as one: they are two",
            ),
            Misconception(
                lambda tokens_per_second, n_active_params, peak_flops: (
                    tokens_per_second * 8 * n_active_params / peak_flops
                ),
                "8 counts a second forward pass: that is recomputation, which MFU "
                "leaves out",
            ),
            Misconception(
                lambda tokens_per_second, n_active_params, peak_flops: (
                    100 * tokens_per_second * 6 * n_active_params / peak_flops
                ),
                "that is per cent: MFU is a share, 1 at the peak",
            ),
        ),
        hints=(
            "Two FLOPs per parameter are a forward pass. What else does a step do?",
            "Each forward product has two in the backward pass: one for the gradient "
            "of its input, one for that of its weights.",
        ),
        solution=mfu,
        because="6 FLOPs per active parameter and token: 2 forward, 4 backward.",
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
