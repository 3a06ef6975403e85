"""Nodes that a slow link joins, on one machine: what loopback cannot show.

    with slow_link(400e6, n_nodes=2) as link:      # bits per second, each direction
        results = launch(work, 4, link=link)       # ranks 0, 1 | ranks 2, 3
        print(link)                                # real or modelled, and why

In a rank, `labkit.parallel.group.node_of(rank)` is the node of any rank, and
`bytes_sent()` what the node of this one has sent over its link so far.

A *real* link is made by Linux: each node is a network namespace with a cable (a pair of
virtual Ethernet devices) to a switch (a bridge in a namespace of its own), and a token
bucket at both ends of the cable. Ranks of one node talk over its loopback, which is as
quick as ever. No root is needed, but user namespaces, which containers often forbid.
Where the machine does not allow it, the link is *modelled*: ranks talk over loopback,
and what would cross the link ends later, by alpha + beta n bytes. `link.kind` says
which it is; a modelled time shows what a formula says, and no more.
"""

import math
import subprocess
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

from labkit.config.checks import require_above, require_whole
from labkit.hardware.units import rate

ADDRESS = "10.77.0.{}"
"""Of a node, from 1 on; no other network is in reach of them."""

PORT = 29500
"""Where rank 0 keeps the store of the ranks, in a namespace of its own."""

DEVICE = "uplink"
"""The end of the cable in a node."""

BURST = "128kb"
"""What the bucket holds: so much passes at once after a pause."""

BACKLOG = "500ms"
"""How long what waits for the bucket is kept, long enough to lose nothing."""

PATIENCE_SECONDS = 10.0
"""For each command that sets up the link."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Place:
    """Where a rank is started."""

    n_nodes: int = 1

    prefix: tuple[str, ...] = ()
    """The command that starts it there."""

    device: str | None = None
    """The network device its messages leave by; None for the loopback."""

    host: str | None = None
    """Where rank 0 keeps the store of the ranks; None where the launcher does."""

    port: int | None = None

    bits_per_second: float | None = None
    """Of a modelled link; None where messages take the time they take."""

    is_timed: bool = False
    """Whether what it sends is timed, so that nothing else may be sent."""


@dataclass(frozen=True, kw_only=True, slots=True)
class SlowLink:
    """Nodes and the link between them, for `launch(..., link=...)`."""

    bits_per_second: float
    """In each direction of each node's link; infinity if it is not limited."""

    n_nodes: int

    kind: str
    """"real" or "modelled"."""

    why: str = ""
    """Why it is not real."""

    pids: tuple[int, ...] = ()
    """Of a real link, the process that keeps each node's namespace."""

    def node_of(self, rank: int, n_procs: int) -> int:
        """Return the node of a rank: the first has the first ranks."""
        self.check(n_procs)
        return rank // (n_procs // self.n_nodes)

    def check(self, n_procs: int) -> None:
        """Raise ValueError unless so many ranks fill the nodes evenly."""
        if n_procs % self.n_nodes:
            raise ValueError(
                "n_procs must be a multiple of the link's nodes, which have as many "
                f"ranks each; got n_procs={n_procs} for {self.n_nodes} nodes. Set "
                f"n_procs={-(-n_procs // self.n_nodes) * self.n_nodes}."
            )

    def place(self, rank: int, n_procs: int) -> Place:
        """Return where a rank is started."""
        n_nodes = self.n_nodes
        if self.kind != "real":
            return Place(
                n_nodes=n_nodes, bits_per_second=self.bits_per_second, is_timed=True
            )
        return Place(
            n_nodes=n_nodes,
            prefix=_inside(self.pids[self.node_of(rank, n_procs)]),
            device=DEVICE,
            host=ADDRESS.format(1),
            port=PORT,
            is_timed=True,
        )

    def __repr__(self) -> str:
        speed = rate(self.bits_per_second, "bit/s")
        why = f": {self.why}" if self.why else ""
        return f"SlowLink({self.n_nodes} nodes, {speed}, {self.kind}{why})"


@contextmanager
def slow_link(bits_per_second: float, *, n_nodes: int = 2) -> Iterator[SlowLink]:
    """Join nodes by a slow link, for as long as the context lasts.

    Nothing is left of it afterwards, nor if this process is killed: the namespaces end
    with the processes in them, and these with this one.

    Args:
        bits_per_second: what each node sends and receives at most; `math.inf` joins
            them without a limit.
        n_nodes: how many. Ranks fill them evenly, the first ranks the first node.
    """
    require_whole({"n_nodes": n_nodes}, at_least=2)
    if bits_per_second != math.inf:
        require_above({"bits_per_second": bits_per_second}, 0)
    with ExitStack() as stack:
        try:
            pids, why = _nodes(stack, bits_per_second, n_nodes), ""
        except (OSError, subprocess.SubprocessError) as error:
            pids, why = (), _reason(error)
        yield SlowLink(
            bits_per_second=bits_per_second,
            n_nodes=n_nodes,
            kind="modelled" if why else "real",
            why=why,
            pids=pids,
        )


def bytes_sent() -> int:
    """Return the bytes that this rank's node has sent over its link, headers too.

    What still waits for the bucket is not among them: call it after an answer.
    """
    counters = Path("/proc/self/net/dev")  # of its own network namespace
    known = counters.read_text(encoding="ascii") if counters.exists() else ""
    for line in known.splitlines():
        name, _, counts = line.partition(":")
        if name.strip() == DEVICE:
            return int(counts.split()[8])
    raise ValueError(
        "bytes are counted by a real link, and this process is at none. Call it in a "
        "rank of launch(..., link=link) whose link.kind is 'real'."
    )


def _nodes(stack: ExitStack, bits_per_second: float, n_nodes: int) -> tuple[int, ...]:
    """Make a switch and nodes with cables to it; return who keeps each node."""
    switch = _namespace(stack, "unshare", "--user", "--map-root-user", "--net")
    _run(_inside(switch), "ip link add switch type bridge")
    _run(_inside(switch), "ip link set switch up")
    nodes = []
    for number in range(1, n_nodes + 1):
        user = ("nsenter", "--target", str(switch), "--user", "--preserve-credentials")
        node = _namespace(stack, *user, "unshare", "--net")
        port = f"port{number}"
        _run(
            _inside(switch),
            f"ip link add {port} type veth peer name {DEVICE} netns {node}",
        )
        _run(_inside(switch), f"ip link set {port} master switch up")
        _run(_inside(node), "ip link set lo up")
        _run(_inside(node), f"ip address add {ADDRESS.format(number)}/24 dev {DEVICE}")
        _run(_inside(node), f"ip link set {DEVICE} up")
        if bits_per_second != math.inf:
            _limit(switch, port, bits_per_second)
            _limit(node, DEVICE, bits_per_second)
        nodes.append(node)
    return tuple(nodes)


def _limit(pid: int, device: str, bits_per_second: float) -> None:
    bucket = f"rate {round(bits_per_second)}bit burst {BURST} latency {BACKLOG}"
    _run(_inside(pid), f"tc qdisc add dev {device} root tbf {bucket}")


def _namespace(stack: ExitStack, *command: str) -> int:
    """Start a process that keeps new namespaces, and return its id.

    It waits for the end of its input, which comes at the latest with our own end.
    """
    keeper = stack.enter_context(
        subprocess.Popen(
            (*command, "sh", "-c", "echo ready; exec cat"),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            start_new_session=True,
            text=True,
        )
    )
    stack.callback(keeper.kill)
    if keeper.stdout.readline() != "ready\n":
        raise subprocess.SubprocessError(keeper.stderr.read())
    return keeper.pid


def _run(prefix: tuple[str, ...], command: str) -> None:
    subprocess.run(
        (*prefix, *command.split()),
        check=True,
        capture_output=True,
        text=True,
        timeout=PATIENCE_SECONDS,
    )


def _inside(pid: int) -> tuple[str, ...]:
    """Return the command that runs another in the namespaces of a process."""
    names = ("--user", "--net", "--preserve-credentials")
    return ("nsenter", "--target", str(pid), *names)


def _reason(error: Exception) -> str:
    """Return in a line why a link cannot be made."""
    words = str(getattr(error, "stderr", None) or error).strip()
    return words.splitlines()[-1] if words else type(error).__name__
