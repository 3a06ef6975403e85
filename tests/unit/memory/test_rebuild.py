"""Results that nobody keeps: when they are rebuilt, how often, and what is left."""

import gc

import torch
from torch.autograd.graph import saved_tensors_hooks

from labkit.memory import AllocationCount
from labkit.memory.rebuild import checkpointed, discarding, rebuilt


class Counted:
    """A function that counts its calls."""

    def __init__(self, function):
        self.function = function
        self.n_calls = 0

    def __call__(self, *inputs):
        self.n_calls += 1
        return self.function(*inputs)


def leaf(*shape):
    return torch.randn(*shape, requires_grad=True)


def test_a_result_is_not_kept_by_the_products_that_read_it():
    x, first, second = leaf(64, 8), leaf(8, 2), leaf(8, 1)
    with AllocationCount() as count, discarding():
        result = rebuilt(torch.exp, x)
        total = (result @ first).sum() + (result @ second).sum()
        del result

        assert count.live_bytes == total.nbytes
        total.backward()

    torch.testing.assert_close(
        x.grad, x.exp() * (first.sum(dim=1) + second.sum(dim=1)).detach()
    )
    torch.testing.assert_close(first.grad, x.exp().sum(dim=0)[:, None].expand(8, 2))


def test_outside_of_discarding_a_result_is_kept_and_gradients_are_the_same():
    x, weight = leaf(64, 8), leaf(8, 2)
    with AllocationCount() as count:
        total = (rebuilt(torch.exp, x) @ weight).sum()

    assert count.live_bytes == total.nbytes + x.nbytes
    total.backward()
    torch.testing.assert_close(x.grad, x.exp().detach() * weight.sum(dim=1).detach())


def test_one_run_serves_the_inside_and_all_readers_and_views():
    x = leaf(4, 6)
    inside = Counted(lambda x: (x.sin().cos(), x.exp()))
    with discarding():
        first, second = rebuilt(inside, x)
        total = (first.T[1:] @ second).square().sum() + (first[2] * second[:, :1]).sum()
    total.backward()

    assert inside.n_calls == 2
    y = x.detach().requires_grad_()
    a, b = y.sin().cos(), y.exp()
    ((a.T[1:] @ b).square().sum() + (a[2] * b[:, :1]).sum()).backward()
    assert torch.equal(x.grad, y.grad)


def test_a_result_may_be_rebuilt_from_another():
    x, weight = leaf(16, 8), leaf(8, 8)
    with AllocationCount() as count, discarding():
        inner = rebuilt(torch.sin, x)
        outer = rebuilt(torch.exp, inner)
        total = (outer @ weight).sum()
        del inner, outer
        assert count.live_bytes == total.nbytes
        total.backward()

    expected = x.sin().exp() * x.cos() * weight.sum(dim=1)
    torch.testing.assert_close(x.grad, expected.detach())


def test_a_graph_may_be_run_backward_twice():
    x, weight = leaf(4, 4), leaf(4, 4)
    with discarding():
        result = rebuilt(torch.exp, x)
        total = (result @ weight).sum() + (result * result).sum()
    total.backward(retain_graph=True)
    once = x.grad.clone()
    total.backward()

    assert torch.equal(x.grad, 2 * once)


def test_a_pass_to_some_readers_may_come_before_one_to_all():
    x, first, second = leaf(4, 4), leaf(4, 4), leaf(4, 4)
    with discarding():
        result = rebuilt(torch.exp, x)
        total = (result @ first).sum() + (result @ second).sum()
    alone = torch.autograd.grad(total, first, retain_graph=True)[0]
    total.backward()

    assert torch.equal(alone, first.grad)
    assert torch.equal(first.grad, second.grad)
    expected = x.exp() * (first.sum(dim=1) + second.sum(dim=1))
    torch.testing.assert_close(x.grad, expected.detach())


def test_what_was_rebuilt_is_freed_with_its_last_reader():
    x, weight = leaf(64, 8), leaf(8, 2)
    with discarding():
        result = rebuilt(torch.exp, x)
        total = (result @ weight).sum() + (result @ weight).square().sum()
    del result
    with AllocationCount() as count:
        total.backward(retain_graph=True)

    assert count.live_bytes == x.grad.nbytes + weight.grad.nbytes


def test_nothing_waits_for_the_garbage_collector():
    x, weight = leaf(64, 8), leaf(8, 2)
    gc.collect()
    gc.disable()
    try:
        with AllocationCount() as count, discarding():
            total = (rebuilt(torch.exp, x) @ weight).sigmoid().sum()
            del total
            assert count.live_bytes == 0
            (rebuilt(torch.exp, x) @ weight).sigmoid().sum().backward()
            assert count.live_bytes == x.grad.nbytes + weight.grad.nbytes
    finally:
        gc.enable()


def test_a_later_tensor_in_the_same_memory_is_not_taken_for_the_result():
    x, weight = leaf(32, 32), torch.ones(32, 1)
    with discarding():
        for _ in range(5):
            rebuilt(torch.exp, x).add(1)
        others = [torch.full((32, 32), float(i)) for i in range(5)]
        total = sum((leaf(32, 32) * other).sum() for other in others)
        total = total + (x * others[3] @ weight).sum()
    total.backward()

    assert torch.equal(x.grad, torch.full((32, 32), 3.0))


def test_a_result_seen_as_another_dtype_is_kept():
    x = leaf(4, 2)
    factor = torch.randn(4, dtype=torch.complex64, requires_grad=True)
    plain_factor = factor.detach().requires_grad_()
    with discarding():
        pairs = torch.view_as_complex(rebuilt(torch.exp, x))
        total = torch.view_as_real(pairs * factor).sum()
    total.backward()

    y = x.detach().requires_grad_()
    pairs = torch.view_as_complex(y.exp())
    torch.view_as_real(pairs * plain_factor).sum().backward()
    assert torch.equal(x.grad, y.grad)
    assert torch.equal(factor.grad, plain_factor.grad)


def test_hooks_around_discarding_see_the_other_tensors_and_none_of_its_own():
    x, weight = leaf(64, 8), leaf(8, 2)
    seen, given_back = [], []

    def pack(tensor):
        seen.append(tuple(tensor.shape))
        return tensor.detach()

    def unpack(tensor):
        given_back.append(tuple(tensor.shape))
        return tensor

    with saved_tensors_hooks(pack, unpack), discarding():
        total = (rebuilt(torch.exp, x) @ weight).sum()
    total.backward()

    # The input of what runs again, and the weight: not the product's other factor.
    assert seen == [(64, 8), (8, 2)]
    assert sorted(given_back) == sorted(seen)


def test_without_gradients_both_are_plain_calls():
    x = leaf(4)
    function = Counted(torch.exp)
    with torch.no_grad():
        for call in (rebuilt, checkpointed):
            assert torch.equal(call(function, x), x.exp())

    assert function.n_calls == 2
    assert not rebuilt(torch.exp, x.detach()).requires_grad


def test_a_checkpointed_call_keeps_its_inputs_alone():
    x = leaf(64, 8)
    with AllocationCount() as count:
        total = checkpointed(lambda x: x.sin().exp().cos().sum(), x)
        assert count.live_bytes == total.nbytes
    total.backward()

    y = x.detach().requires_grad_()
    y.sin().exp().cos().sum().backward()
    assert torch.equal(x.grad, y.grad)
