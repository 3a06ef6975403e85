"""Exercises of notebook 09: the bias, the balance loss, placements, and a collapse."""

from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache

import torch
from jaxtyping import Float, Int
from torch import Tensor

from labkit.config import PRESETS
from labkit.model import Transformer
from labkit.model.moe import balance_loss
from labkit.parallel import Placement, balance_experts
from labkit.workbook.balance import collapsed_load
from labkit.workbook.exercises.spec import Case, Exercise, Misconception, Score


def next_bias(
    bias: Float[Tensor, "e"], load: Int[Tensor, "e"], rate: float
) -> Float[Tensor, "e"]:
    """Return the bias after a step: up where an expert saw too few tokens."""
    return bias + rate * torch.sign(load.float().mean() - load)


def _help_the_busy(bias: Tensor, load: Tensor, rate: float) -> Tensor:
    return bias + rate * torch.sign(load - load.float().mean())


def _in_proportion(bias: Tensor, load: Tensor, rate: float) -> Tensor:
    return bias + rate * (load.float().mean() - load)


def _forget(bias: Tensor, load: Tensor, rate: float) -> Tensor:
    return rate * torch.sign(load.float().mean() - load)


def _in_place(bias: Tensor, load: Tensor, rate: float) -> Tensor:
    bias += rate * torch.sign(load.float().mean() - load)
    return bias


def _from_the_median(bias: Tensor, load: Tensor, rate: float) -> Tensor:
    return bias + rate * torch.sign(load.float().median() - load)


def _mean_of_sequences(affinity: Tensor, k: int) -> Tensor:
    return balance_loss(affinity, k) / len(affinity)


def _as_they_are(affinity: Tensor, k: int) -> Tensor:
    _, n_tokens, n_experts = affinity.shape
    chosen = affinity.topk(k, dim=-1).indices
    counts = torch.zeros_like(affinity).scatter_(-1, chosen, 1.0).sum(dim=1)
    share = counts * (n_experts / (k * n_tokens))
    return (share * affinity.mean(dim=1)).sum()


def _first_sequence(affinity: Tensor, k: int) -> Tensor:
    return balance_loss(affinity[:1], k)


N_GPUS, N_NODES = 64, 8


def slowest(answer: tuple[int, int]) -> float:
    """Return the slowest GPU's load by the mean, for slots and groups."""
    n_replicas, n_groups = answer
    load = collapsed_load()
    return (
        balance_experts(
            load,
            n_replicas=n_replicas,
            n_gpus=N_GPUS,
            n_nodes=N_NODES,
            n_groups=n_groups,
        )
        .imbalance(load)
        .item()
    )


def n_slots(answer: tuple[int, int]) -> int:
    """Return the slots that an answer takes."""
    return answer[0]


SMALL_LOAD = torch.tensor([[80, 50, 90, 80, 10]])


def by_hand(gpus: Sequence[Sequence[int]]) -> Placement:
    """Return a placement that was written by hand."""
    experts = torch.tensor([[expert for gpu in gpus for expert in gpu]])
    return Placement(experts=experts, n_experts=5, n_gpus=len(gpus))


def most_tokens(gpus: Sequence[Sequence[int]]) -> float:
    """Return the tokens of the busiest GPU."""
    return by_hand(gpus).gpu_load(SMALL_LOAD).max().item()


def sizes(gpus: Sequence[Sequence[int]]) -> list[int]:
    """Return how many slots each GPU has."""
    return [len(gpu) for gpu in gpus]


@lru_cache
def balanced_model() -> Transformer:
    """Return a model of 16 experts that no text has taught, balanced on mixed bytes."""
    cfg = replace(PRESETS["tiny"], n_layers=2, mtp=None)
    moe = replace(cfg.moe, n_routed_experts=16, moe_inter_dim=8)
    cfg = replace(cfg, moe=replace(moe, n_expert_groups=1, n_limited_groups=1))
    generator = torch.Generator().manual_seed(0)
    model = Transformer(cfg, generator=generator).requires_grad_(False)
    mixed = torch.randint(32, 127, (8, 128), generator=generator)
    (routing,) = model.hidden(mixed)[1]
    (router,) = model.routers()
    affinity = routing.affinity.flatten(0, 1)
    for _ in range(60):  # affinities stay as they are, whatever the bias
        load = torch.bincount(router.choose(affinity).flatten(), minlength=16)
        model.update_router_bias(load.unsqueeze(0), 0.002)
    return model


def busiest_of(text: str) -> float:
    """Return the busiest expert's load by the mean, while the model reads a text."""
    model = balanced_model()
    tokens = torch.tensor([list(text.encode("utf-8"))[: model.cfg.max_seq_len]])
    with torch.no_grad():
        load = model.loss(tokens, tokens).load[0].double()
    return (load.max() / load.mean()).item()


EXERCISES = (
    Exercise(
        name="next_bias",
        kind="write",
        title="One step of the bias",
        difficulty=1,
        minutes=5,
        task="Write `next_bias(bias, load, rate)`: the routers' rule of DeepSeek-V3. "
        "After a step, an expert with fewer tokens than the mean gets `rate` added to "
        "its bias, one with more gets `rate` taken away, and one with exactly the mean "
        "keeps it. `bias` and `load` are tensors with a value per expert.",
        stub="def next_bias(bias, load, rate):\n    ...",
        cases=(
            Case(
                given="load [8, 0, 4, 4] from bias 0",
                args=(torch.zeros(4), torch.tensor([8, 0, 4, 4]), 0.1),
                expected=[-0.1, 0.1, 0.0, 0.0],
            ),
            Case(
                given="load [3, 1] from bias [0.5, -0.5]",
                args=(torch.tensor([0.5, -0.5]), torch.tensor([3, 1]), 0.25),
                expected=[0.25, -0.25],
            ),
            Case(
                given="load [97, 1, 1, 1] from bias 0",
                args=(torch.zeros(4), torch.tensor([97, 1, 1, 1]), 0.5),
                expected=[-0.5, 0.5, 0.5, 0.5],
            ),
        ),
        misconceptions=(
            Misconception(
                _help_the_busy, "that lifts the busy ones: the next step is worse"
            ),
            Misconception(
                _in_proportion,
                "only the sign counts: in proportion, one busy expert throws its bias "
                "far out in a single step",
            ),
            Misconception(_forget, "that forgets the bias of the steps before"),
            Misconception(
                _from_the_median,
                "experts are measured against the mean: where most are idle, the "
                "median is idle too, and nobody is helped",
            ),
            Misconception(
                _in_place, "return a new bias; the model still reads the old one"
            ),
        ),
        hints=(
            "`load.float().mean()` is what each expert should have.",
            "`torch.sign` is -1, 0 or 1.",
            "`bias + rate * torch.sign(mean - load)`",
        ),
        solution=next_bias,
        because="the size of the step is fixed, so γ alone sets pace and swing.",
    ),
    Exercise(
        name="balance_of_sequences",
        kind="fix",
        title="A loss that sees nothing",
        difficulty=2,
        minutes=10,
        task="The sequence-wise balance loss guards against a sequence that sends all "
        "its tokens to the same experts. For each sequence it multiplies, expert by "
        "expert, the share of the choices (1 if even) by the mean normalised affinity, "
        "adds that up, and adds up the sequences. This one stays silent when one "
        "sequence floods expert 0 and the next floods expert 1. Find the bug.",
        stub='''def sequence_balance(affinity, k):
    """Return the balance loss of affinities (sequence, token, expert)."""
    n_sequences, _, n_experts = affinity.shape
    tokens = affinity.flatten(0, 1)
    chosen = tokens.topk(k, dim=-1).indices
    counts = torch.bincount(chosen.flatten(), minlength=n_experts)
    share = counts * n_experts / (k * len(tokens))
    normalised = tokens / tokens.sum(dim=-1, keepdim=True)
    return n_sequences * (share * normalised.mean(dim=0)).sum()''',
        cases=(
            Case(
                given="one sequence that spreads evenly",
                args=((0.5 + 0.1 * torch.eye(4)).unsqueeze(0), 1),
                expected=1.0,
                tolerance=1e-5,
            ),
            Case(
                given="two sequences that flood an expert each",
                args=(
                    torch.tensor([[[0.9, 0.1]] * 2, [[0.2, 0.8]] * 2]),
                    1,
                ),
                expected=3.4,
                tolerance=1e-5,
            ),
            Case(
                given="affinities that sum to more than 1",
                args=(torch.tensor([[[0.8, 0.4]] * 3]), 1),
                expected=1.333333,
                tolerance=1e-5,
            ),
        ),
        misconceptions=(
            Misconception(
                _mean_of_sequences, "sequences are added up, not averaged, here"
            ),
            Misconception(
                _as_they_are,
                "affinities are logistic and need not sum to 1: divide each token's "
                "by their sum",
            ),
            Misconception(
                _first_sequence, "that looks at the first sequence and no other"
            ),
        ),
        hints=(
            "What are the shares over both sequences together?",
            "Counts and means belong to one sequence: sum and average over the token "
            "axis, `dim=1`.",
            "`torch.zeros_like(affinity).scatter_(-1, chosen, 1.0).sum(dim=1)` counts "
            "for each sequence.",
        ),
        solution=balance_loss,
        because="a batch can be even while each of its sequences is not.",
    ),
    Exercise(
        name="beat_the_balancer",
        kind="target",
        title="Better than greedy",
        difficulty=2,
        minutes=8,
        task="Five experts get 80, 50, 90, 80 and 10 tokens. Three GPUs have two slots "
        "each, so one slot is spare. The published steps give the busiest GPU 125 "
        "tokens. Place the experts by hand, as three lists of two, so that it gets at "
        "most 105: `gpus = [[…, …], […, …], […, …]]`. Slots of the same expert share "
        "its tokens evenly.",
        stub="gpus = None",
        cases=(
            Case(given="the slots of each GPU", measure=sizes, expected=[2, 2, 2]),
            Case(
                given="the busiest GPU", measure=most_tokens, at_most=105, unit="tokens"
            ),
        ),
        misconceptions=(
            Misconception(
                [[0, 2], [3, 4], [1, 2]],
                "that is what the published steps find: the busiest expert need not be "
                "the one to share",
            ),
            Misconception(
                [[0, 4], [1, 2], [0, 3]],
                "to share an 80 leaves the 50 with the 90, or with the other 80",
            ),
            Misconception(
                [[0, 1], [2, 4], [3, 3]],
                "two slots of one expert on one GPU share nothing with another",
            ),
        ),
        hints=(
            "The mean is a little above 103 tokens. Which sums of two come near it?",
            "90 and 10 fit. What is missing beside each 80?",
            "Let the expert of 50 tokens lie twice.",
        ),
        solution=[[0, 1], [1, 3], [2, 4]],
        because="greedy steps share the busiest expert first and never look back.",
        score=Score(of=most_tokens, unit="tokens"),
    ),
    Exercise(
        name="fewest_slots",
        kind="target",
        title="As few spare slots as will do",
        difficulty=2,
        minutes=8,
        task="A router of 256 experts in 8 groups has collapsed: its load is "
        "`balance.collapsed_load()`. They lie on 64 GPUs in 8 nodes. Give `n_replicas` "
        "and `n_groups` for `balance_experts`, as a pair, so that the slowest GPU has "
        "at most 1.1 times the mean, with as few slots as possible.",
        stub="answer = None",
        cases=(
            Case(given="the slowest GPU, by the mean", measure=slowest, at_most=1.1),
            Case(
                given="the slots",
                measure=n_slots,
                at_most=448,
                otherwise="slots do it, but fewer suffice",
            ),
        ),
        misconceptions=(
            Misconception(
                (448, 8),
                "each group stays on its node, and no spare slot takes tokens to "
                "another node",
            ),
            Misconception(
                (320, 1), "one spare slot per GPU leaves too many busy experts whole"
            ),
            Misconception(
                (256, 1), "without a spare slot the busiest expert stays on one GPU"
            ),
            Misconception((1024, 1), "try how few spare slots per GPU are enough"),
        ),
        hints=(
            "How busy is the busiest *node*, if its groups must stay there?",
            "`n_groups=1` places globally.",
            "Slots are a multiple of 64: try 0, 1, 2, … spare ones per GPU.",
        ),
        solution=(448, 1),
        because="a placement by node cannot be more even than the nodes are.",
        score=Score(of=n_slots, unit="slots"),
    ),
    Exercise(
        name="a_text_that_collapses",
        kind="break",
        title="Collapse it with a text",
        difficulty=2,
        minutes=6,
        task="A router of 16 experts, two for each token, was balanced on mixed "
        "bytes, on which the busiest has about 1.5 times the mean. Its weights and its "
        "bias are frozen. Write a `text` of at least 64 bytes on which the busiest "
        "expert has 7 times the mean or more; 8 is the most there is.",
        stub="text = None",
        cases=(
            Case(given="the length", measure=len, at_least=64, unit="bytes"),
            Case(
                given="the busiest expert",
                measure=busiest_of,
                at_least=7,
                unit="times the mean",
            ),
        ),
        misconceptions=(
            Misconception(
                "".join(map(chr, range(32, 127))),
                "every byte once is the most mixed text there is",
            ),
            Misconception(
                "the quick brown fox jumps over the lazy dog. " * 2,
                "ordinary words have many letters, and these go to many experts",
            ),
            Misconception("a" * 16, "that would do, if there were more of it"),
            Misconception(
                "ab" * 40, "two kinds of tokens keep two pairs of experts busy"
            ),
        ),
        hints=(
            "What decides where a token goes? Which tokens go to the same experts?",
            "How few kinds of tokens can a text have?",
            "One letter, again and again.",
        ),
        solution="a" * 64,
        because="a bias balances the traffic it saw; serving sees another, which is "
        "what spare slots are for.",
        score=Score(of=busiest_of, unit="times the mean", lower_wins=False),
        seconds=60,  # the model is built and balanced at the first check
    ),
)
