"""What papers state of pipeline schedules, to hold a timeline against.

The bubbles suppose passes that fit each other. Against `pipeline_timeline`, with I for
the backward pass without its weights (B - W), they hold

    gpipe, 1f1b            always
    zero-bubble            where W is at most F and at most I
    dualpipe, dualpipev    where F equals I and W is at most I

and elsewhere the timeline is right, which does what the schedule does. It shows more
there, and less only under DualPipe where F is shorter than I and W no longer than it.
"""

from labkit.config.checks import require_choice, require_whole
from labkit.parallel.pipeline.timeline import Times

PUBLISHED = ("gpipe", "1f1b", "zero-bubble", "dualpipe", "dualpipev")


def published_bubble(schedule: str, pp: int, times: Times | None = None) -> float:
    """Return the seconds that a rank waits in a step, as published.

    Table 2 of the DeepSeek-V3 report; DualPipeV from the same table as the description
    of DualPipe has it; GPipe waits like 1F1B (Narayanan et al. 2021, section 2.2). One
    virtual stage lies on each rank, and two on those of DualPipeV.

    Args:
        schedule: one of `PUBLISHED`.
        pp: ranks of the pipeline.
        times: of a virtual stage, the same for all.

    >>> published_bubble("1f1b", 16), published_bubble("dualpipe", 16)
    (45.0, 14.0)

    Raises:
        ValueError: nothing is published of that schedule, or stages differ.
    """
    require_choice({"schedule": schedule}, PUBLISHED)
    require_whole({"pp": pp})
    times = times or Times()
    if any(isinstance(value, tuple) for value in (times.f, times.b, times.w)):
        raise ValueError(
            "published bubbles suppose equal stages; got a time for each. Give one "
            "number, or ask pipeline_timeline."
        )
    f, b, w = times.f, times.b, times.w
    if schedule in ("gpipe", "1f1b"):
        return (pp - 1) * (f + b)
    if schedule == "zero-bubble":
        return (pp - 1) * (f + b - 2 * w)
    half = pp if schedule == "dualpipev" else pp // 2
    return (half - 1) * (f + b - times.hidden + b - 3 * w)


def published_live(schedule: str, pp: int) -> int:
    """Return of how many micro-batches the fullest rank keeps a stage's activations.

    From the same table; GPipe keeps all, and is not in it.

    >>> published_live("1f1b", 16), published_live("dualpipe", 16)
    (16, 17)

    Raises:
        ValueError: nothing is published of that schedule.
    """
    require_choice({"schedule": schedule}, PUBLISHED[1:])
    require_whole({"pp": pp})
    return {"dualpipe": pp + 1, "dualpipev": 2 * pp + 1}.get(schedule, pp)
