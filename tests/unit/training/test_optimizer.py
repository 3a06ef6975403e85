import torch

from labkit.config import TrainConfig
from labkit.training.optimizer import build_optimizer


def test_norm_gains_do_not_decay_and_every_other_weight_does(make_model):
    model = make_model()
    optimizer = build_optimizer(model, TrainConfig(weight_decay=0.1))
    decay = {
        parameter: group["weight_decay"]
        for group in optimizer.param_groups
        for parameter in group["params"]
    }
    names = {name: decay[parameter] for name, parameter in model.named_parameters()}
    assert {name for name, value in names.items() if value == 0.0} == {
        name for name in names if name.endswith("norm.weight")
    }
    assert {names[key] for key in ("embed.weight", "head.weight")} == {0.1}
    assert names["layers.1.ffn.experts.w13"] == names["layers.1.ffn.gate.weight"] == 0.1


def test_the_first_step_moves_by_the_sign_of_the_gradient_and_the_decay():
    layer = torch.nn.Linear(2, 1, bias=False)
    layer.weight.data = torch.tensor([[1.0, -2.0]])
    layer.weight.grad = torch.tensor([[0.5, -4.0]])
    train = TrainConfig(lr=0.1, min_lr=0.01, weight_decay=0.1)
    build_optimizer(layer, train).step()
    # w (1 - lr * decay) - lr * sign(g): bias correction makes m / sqrt(v) = sign(g).
    expected = torch.tensor([[1.0 * 0.99 - 0.1, -2.0 * 0.99 + 0.1]])
    torch.testing.assert_close(layer.weight.data, expected)


def test_the_fused_kernel_equals_the_plain_loop(make_model):
    fused, plain = make_model(), make_model()
    train = TrainConfig()
    optimizers = [build_optimizer(fused, train)]
    optimizers.append(
        torch.optim.AdamW(
            plain.parameters(),
            lr=train.lr,
            betas=(train.beta1, train.beta2),
            weight_decay=0.0,
            foreach=False,
        )
    )
    for group in optimizers[0].param_groups:
        assert group["fused"]
        group["weight_decay"] = 0.0
    for _ in range(3):
        for ours, theirs in zip(fused.parameters(), plain.parameters(), strict=True):
            ours.grad = torch.randn_like(ours)
            theirs.grad = ours.grad.clone()
        for optimizer in optimizers:
            optimizer.step()
    for ours, theirs in zip(fused.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(ours, theirs)
