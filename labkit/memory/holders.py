"""Who keeps an object alive, in the names that a programmer gave.

The garbage collector knows what refers to what. From an object we climb, referrer by
referrer, until one has a name: a variable, an attribute, the hooks of a module.
"""

import gc
import sys
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from types import CellType, FrameType, FunctionType, MethodType, ModuleType
from typing import NamedTuple

from torch import Tensor, nn
from torch.optim import Optimizer

MAX_DEPTH = 8
"""Referrers between an object and a name: more are no answer to a reader."""

FEW_OBJECTS = 300
"""As many as the garbage collector finds the referrers of faster than we do."""

HOOKS = {
    "_forward_hooks": "forward hooks",
    "_forward_pre_hooks": "forward pre-hooks",
    "_backward_hooks": "backward hooks",
    "_backward_pre_hooks": "backward pre-hooks",
    "_post_accumulate_grad_hooks": "gradient hooks",
}
"""Attributes of modules and tensors in which PyTorch keeps hooks."""


class Holder(NamedTuple):
    """What keeps an object alive."""

    name: str
    """As in "`losses` in train()" or "`history` of Monitor"."""

    within: str = ""
    """The collection in which the owner of the attribute stands, if in one."""

    owner: int = 0
    """The id of the attribute's owner."""

    closure: str = ""
    """The captured variable on the way, as in "`out` of make.<locals>.call"."""

    is_hook: bool = False
    is_bounded: bool = False
    """Whether it lets go by itself: a deque with a length, or an optimizer's state,
    of which there is one for each parameter."""

    @property
    def text(self) -> str:
        """The name, and the collection's."""
        return f"{self.name}, in {self.within}" if self.within else self.name


NOBODY = Holder("nobody who can be seen")


def hook_owners(model: nn.Module) -> dict[str, Mapping[int, object]]:
    """Return a model's hooks, by the words for where they hang."""
    owners = [(name, module) for name, module in model.named_modules()]
    owners += model.named_parameters()
    return {
        f"{text} of `{name}`" if name else f"{text} of the model": hooks
        for name, owner in owners
        for attribute, text in HOOKS.items()
        if (hooks := getattr(owner, attribute, None)) is not None
    }


def find_holders(
    objects: Sequence[object], model: nn.Module, pool: Sequence[object]
) -> list[Holder]:
    """Return what keeps each object alive; what lets go by itself comes last.

    Local variables count in functions that are running.

    Args:
        objects: what is held.
        model: names its parts.
        pool: where to look for what holds it, as from `gc.get_objects()`.

    >>> class Monitor:
    ...     def __init__(self):
    ...         self.history = [["loss"]]
    >>> monitor = Monitor()
    >>> find_holders(monitor.history[:], nn.Module(), gc.get_objects())[0].name
    '`history` of Monitor'
    """
    if not objects:
        return []
    climber = _Climber(model, pool)
    unseen = {id(x): x for x in objects}
    found, n_last = [NOBODY for _ in objects], 0
    for _ in range(MAX_DEPTH):
        unseen = climber.look_above(unseen, pool)
        found = [climber.holder_of(x) for x in objects]
        n_last += all(holder is not None for holder in found)
        # A named owner may itself stand in a collection: that has a name, two up.
        if n_last > 2 or not unseen:
            break
    return [holder or NOBODY for holder in found]


class _Climber:
    """Climbs from objects to names, level by level."""

    def __init__(self, model: nn.Module, pool: Sequence[object]) -> None:
        self.pool = set(map(id, pool))
        self.names = {id(part): f"`{name}`" for name, part in model.named_modules()}
        self.names |= {id(p): f"`{name}`" for name, p in model.named_parameters()}
        self.names[id(model)] = "the model"
        self.hooks = {id(hooks): name for name, hooks in hook_owners(model).items()}
        self.variables = dict(_local_variables())
        self.above: dict[int, list[object]] = {}
        """What refers to an object, by the object's id."""
        self.known: dict[int, Holder | None] = {}

    def look_above(
        self, objects: Mapping[int, object], pool: Sequence[object]
    ) -> dict[int, object]:
        """Find what refers to objects, by id; return those of it that are new."""
        wanted, new = objects.keys(), {}
        self.above |= {key: [] for key in wanted}
        # The collector compares each reference with each object; a set does not.
        is_few = len(objects) <= FEW_OBJECTS
        for referrer in gc.get_referrers(*objects.values()) if is_few else pool:
            if wanted.isdisjoint(map(id, gc.get_referents(referrer))):
                continue
            # Frames are our own functions'; those of others have variables.
            if id(referrer) not in self.pool or isinstance(referrer, FrameType):
                continue
            for key in wanted & set(map(id, gc.get_referents(referrer))):
                self.above[key].append(referrer)
            if id(referrer) not in self.above and not self._is_end(referrer):
                new[id(referrer)] = referrer
        return new

    def _is_end(self, x: object) -> bool:
        """Return whether nothing above an object can name it better."""
        is_known = any(id(x) in names for names in (self.names, self.variables))
        return is_known or isinstance(x, type | ModuleType) or _is_namespace(x)

    def holder_of(self, x: object) -> Holder | None:
        """Return what holds an object; None if that is not known yet."""
        self.known.clear()
        if not self.above[id(x)] and id(x) not in self.variables:
            return NOBODY
        places = [self.name_place(referrer, x) for referrer in self.above[id(x)]]
        holders = [holder for holder in places if holder is not None]
        if id(x) in self.variables:
            holders.append(Holder(self.variables[id(x)]))
        return min(holders, key=lambda holder: holder.is_bounded, default=None)

    def name_of(self, x: object) -> Holder | None:
        """Return what holds something that has no place of its own in words."""
        if id(x) not in self.known:
            self.known[id(x)] = None  # it may hold itself
            self.known[id(x)] = self._look_up(x)
        return self.known[id(x)]

    def _look_up(self, x: object) -> Holder | None:
        if id(x) in self.hooks:
            return Holder(self.hooks[id(x)], is_hook=True)
        if id(x) in self.variables:
            return Holder(self.variables[id(x)])
        places = (self.name_place(r, x) for r in self.above.get(id(x), ()))
        return next((holder for holder in places if holder is not None), None)

    def name_place(self, referrer: object, x: object) -> Holder | None:
        """Return the name of the place in which a referrer holds an object."""
        if isinstance(referrer, CellType):
            return self._name_cell(referrer)
        if isinstance(referrer, dict) and id(referrer) not in self.hooks:
            key = next((key for key, value in referrer.items() if value is x), None)
            if _is_namespace(referrer):
                return Holder(f"`{key}`")
            for owner in self.above.get(id(referrer), ()):
                own = getattr(owner, "__dict__", None)
                # A class shows its dictionary through a view.
                is_class = isinstance(owner, type)
                if own is referrer or (is_class and own.get(key) is x):
                    return self._name_attribute(owner, str(key))
        for attribute in _attributes(referrer):
            if getattr(referrer, attribute, None) is x:
                return self._name_attribute(referrer, attribute)
        holder = self.name_of(referrer)
        if holder and isinstance(referrer, deque) and referrer.maxlen is not None:
            holder = holder._replace(is_bounded=True)
        return holder

    def _name_attribute(self, owner: object, attribute: str) -> Holder:
        if isinstance(owner, type):
            return Holder(f"`{attribute}` of the class {owner.__name__}")
        kind = type(owner).__name__
        if id(owner) in self.names:
            return Holder(f"`{attribute}` of {self.names[id(owner)]} ({kind})")
        is_state = isinstance(owner, Optimizer) and attribute == "state"
        within = ""
        for around in self.above.get(id(owner), ()):
            if isinstance(around, list | tuple | set | deque):
                outer = self.name_place(around, owner)
                within = within or (outer.name if outer else "")
        return Holder(
            f"`{attribute}` of {kind}", within, id(owner), is_bounded=is_state
        )

    def _name_cell(self, cell: CellType) -> Holder | None:
        """Return the holder of a function that has captured a variable."""
        for captured in self.above.get(id(cell), ()):
            for function in self.above.get(id(captured), ()):
                if not isinstance(function, FunctionType):
                    continue
                if function.__closure__ is captured:
                    index = next(i for i, c in enumerate(captured) if c is cell)
                    variable = function.__code__.co_freevars[index]
                    closure = f"`{variable}` of {function.__qualname__}"
                    holder = self.name_of(function) or NOBODY
                    return holder._replace(closure=closure)
        return None


def _attributes(x: object) -> Iterator[str]:
    """Yield the attributes that an object has besides those in a dictionary."""
    if isinstance(x, FunctionType | MethodType | list | tuple | set | deque | dict):
        return
    if isinstance(x, Tensor):
        yield from ("_backward_hooks", "_post_accumulate_grad_hooks")
        return
    yield from getattr(x, "__dict__", ())
    for kind in type(x).__mro__:
        slots = kind.__dict__.get("__slots__", ())
        yield from (slots,) if isinstance(slots, str) else slots


def _is_namespace(x: object) -> bool:
    """Return whether an object holds the global variables of a module or notebook."""
    return isinstance(x, dict) and "__name__" in x and "__builtins__" in x


def _local_variables() -> Iterator[tuple[int, str]]:
    """Yield the ids of what local variables hold, and the variables' names."""
    frames = []
    frame: FrameType | None = sys._getframe()
    while frame is not None:
        if _is_ours(frame):
            frames.clear()  # also of what our functions were called through
        frames.append(frame)
        frame = frame.f_back
    for frame in frames[1:]:
        code = frame.f_code
        if code.co_name != "<module>":
            for name, value in frame.f_locals.items():
                yield id(value), f"`{name}` in {code.co_qualname}()"


def _is_ours(frame: FrameType) -> bool:
    return str(frame.f_globals.get("__name__", "")).startswith("labkit.memory.")
