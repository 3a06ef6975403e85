"""Objects are named by who holds them: variables, attributes, closures, hooks.

Nothing is asked inside an assert: pytest would hold the object in variables of its own.
"""

import gc
from collections import deque

import torch
from torch import nn

from labkit.memory.holders import NOBODY, Holder, find_holders

KEPT = []
PLAIN = nn.Module()


def test_a_variable_of_a_running_function():
    values = [torch.zeros(1)]
    found = find_holders([values[0]], PLAIN, gc.get_objects())

    assert found == [Holder("`values` in test_a_variable_of_a_running_function()")]


def test_a_global_variable():
    KEPT.append(torch.zeros(1))
    found = find_holders([KEPT[0]], PLAIN, gc.get_objects())
    KEPT.clear()

    assert found == [Holder("`KEPT`")]


def test_an_attribute_of_an_object_of_a_class_and_of_a_module():
    class Owner:
        shared = [torch.zeros(1)]

        def __init__(self) -> None:
            self.own = {"a": torch.zeros(1)}

    class Slotted:
        __slots__ = ("own",)

    owner, slotted, model = Owner(), Slotted(), nn.Sequential(nn.Tanh())
    slotted.own = (torch.zeros(1),)
    model[0].seen = [torch.zeros(1)]
    found = find_holders(
        [owner.own["a"], Owner.shared[0], slotted.own[0], model[0].seen[0]],
        model,
        gc.get_objects(),
    )
    names = [holder.name for holder in found]

    assert names == [
        "`own` of Owner",
        "`shared` of the class Owner",
        "`own` of Slotted",
        "`seen` of `0` (Tanh)",
    ]


def test_a_captured_variable_and_the_holder_of_its_function():
    def make(x):
        return lambda: x

    functions = [make(torch.zeros(1))]
    (found,) = find_holders(
        [functions[0].__closure__[0].cell_contents], PLAIN, gc.get_objects()
    )

    test = "test_a_captured_variable_and_the_holder_of_its_function"
    assert found.name == f"`functions` in {test}()"
    assert found.closure == f"`x` of {test}.<locals>.make.<locals>.<lambda>"


def test_a_hook():
    def register(module, x):
        module.register_forward_hook(lambda *_: x)

    model = nn.Sequential(nn.Tanh())
    register(model[0], torch.zeros(1))
    hooks = model[0]._forward_hooks
    (found,) = find_holders(
        [[*hooks.values()][0].__closure__[0].cell_contents], model, gc.get_objects()
    )

    assert (found.name, found.is_hook) == ("forward hooks of `0`", True)
    assert found.closure == "`x` of test_a_hook.<locals>.register.<locals>.<lambda>"


def test_a_deque_with_a_length_and_an_optimizers_state_are_bounded():
    recent = deque([torch.zeros(1)], maxlen=2)
    endless = deque([torch.zeros(1)])
    layer = nn.Linear(1, 1)
    optimizer = torch.optim.Adam(layer.parameters())
    layer(torch.zeros(1)).backward()
    optimizer.step()
    found = find_holders(
        [recent[0], endless[0], optimizer.state[layer.weight]["exp_avg"]],
        PLAIN,
        gc.get_objects(),
    )

    assert [holder.is_bounded for holder in found] == [True, False, True]


def test_what_only_a_graph_holds_has_no_holder():
    loss = nn.Linear(2, 2)(torch.ones(1, 2)).exp().sum()
    found = find_holders(
        [loss.grad_fn.next_functions[0][0]._saved_result], PLAIN, gc.get_objects()
    )

    assert found == [NOBODY]
