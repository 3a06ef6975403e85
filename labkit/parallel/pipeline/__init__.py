"""Pipelines: in which order ranks work, when, and what they keep meanwhile."""

from labkit.parallel.pipeline.actions import Action, parse, written
from labkit.parallel.pipeline.orders import SCHEDULES, orders
from labkit.parallel.pipeline.published import published_bubble, published_live
from labkit.parallel.pipeline.timeline import (
    Span,
    Timeline,
    Times,
    pipeline_timeline,
    timeline_of,
)

__all__ = [
    "SCHEDULES",
    "Action",
    "Span",
    "Timeline",
    "Times",
    "orders",
    "parse",
    "pipeline_timeline",
    "published_bubble",
    "published_live",
    "timeline_of",
    "written",
]
