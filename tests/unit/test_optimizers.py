"""Every optimizer that a recipe can name, beside an implementation that is not ours, and its bytes."""

from __future__ import annotations

import math
from functools import partial
from typing import get_args

import pytest
import torch
from torch._dynamo.utils import counters
from torch.optim import adam

from samecurve.config.schema import Optimizer
from samecurve.errors import ConfigurationError
from samecurve.optim import adamw_bf16
from samecurve.optim.adamw_bf16 import first_hash, random_bits, rounded, to_nearest
from samecurve.optim.factory import build_optimizer, check_shards
from samecurve.optim.muon import orthogonalize
from samecurve.optim.schedule import set_learning_rate
from samecurve.specs.optimizers import OPTIMIZERS, SMALLEST_8BIT, OptimizerName

RATES = [0.01, 0.02, 0.005, 0.01, 0.01, 0.003]
DECAY = 0.1
KAHAN = {"bf16_rounding": "kahan"}


def settings(name: str, **more) -> Optimizer:
    return Optimizer(name=name, learning_rate=RATES[0], weight_decay=DECAY, **more)


def weights() -> list[torch.nn.Parameter]:
    draw = torch.Generator().manual_seed(0)
    return [torch.nn.Parameter(torch.randn(shape, generator=draw)) for shape in ((72, 64), (33,), (1,))]


def trained(make) -> list[torch.Tensor]:
    """Weights after six updates, with gradients that depend on them and rates that change. make: of parameters."""
    parameters = weights()
    made, draw = make(parameters), torch.Generator().manual_seed(1)
    optimizers = made if isinstance(made, tuple) else (made,)
    for rate in RATES:
        for optimizer in optimizers:
            set_learning_rate(optimizer, rate)
        for parameter in parameters:
            gradient = torch.randn(parameter.shape, generator=draw) + 0.1 * parameter.detach()
            parameter.grad = gradient.to(parameter.dtype)
        for optimizer in optimizers:
            optimizer.step()
    return [parameter.detach() for parameter in parameters]


def ours(name: str, precision: str = "fp32", **more):
    def make(params):
        groups = [
            {"params": [p for p in params if (p.dim() == 2) == matrix], "weight_decay": DECAY, "muon": matrix}
            for matrix in (True, False)
        ]
        if name == "adamw_bf16":
            for group in groups:
                group["names"] = [f"{tuple(p.shape)}" for p in group["params"]]
                for p in group["params"]:
                    p.data = p.data.bfloat16()
        return build_optimizer([group for group in groups if group["params"]], settings(name, **more), precision)

    return make


def muon_and_adamw_of_torch(params):
    matrix, *others = params
    muon = torch.optim.Muon([matrix], lr=RATES[0], weight_decay=DECAY, momentum=0.9, adjust_lr_fn="match_rms_adamw")
    return muon, REFERENCES["adamw"](others)


def lion_of_bitsandbytes(params):
    bitsandbytes = pytest.importorskip("bitsandbytes")
    return bitsandbytes.optim.Lion32bit(params, lr=RATES[0], betas=(0.9, 0.95), weight_decay=DECAY)


REFERENCES = {
    "adamw": lambda params: torch.optim.AdamW(
        params, lr=RATES[0], betas=(0.9, 0.95), weight_decay=DECAY, foreach=False, fused=False
    ),
    "lion": lion_of_bitsandbytes,
    "sgd": lambda params: torch.optim.SGD(params, lr=RATES[0], momentum=0.9, weight_decay=DECAY, foreach=False),
    "adafactor": lambda params: torch.optim.Adafactor(params, lr=RATES[0], weight_decay=DECAY),
    "muon": muon_and_adamw_of_torch,
}
# bitsandbytes' class is what is run; what it is near to is fp32. And so is what is rounded at random
REFERENCES["adamw_8bit"] = REFERENCES["adamw_bf16"] = REFERENCES["adamw"]


def test_every_optimizer_has_a_reference():
    assert REFERENCES.keys() == OPTIMIZERS.keys()


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_updates_are_those_of_another_implementation(name):
    # torch's Muon orthogonalises in bf16 only, as ours does where the recipe computes in bf16
    precision = "bf16" if name == "muon" else "fp32"
    found, expected, first = trained(ours(name, precision)), trained(REFERENCES[name]), weights()
    for mine, other, start in zip(found, expected, first, strict=True):
        assert (other - start).abs().max() > 1e-3
        if name == "adamw_8bit" and start.numel() >= SMALLEST_8BIT:
            assert not torch.allclose(mine, other, rtol=1e-5, atol=1e-6)
            assert (mine - other).norm() < 0.05 * (other - start).norm()
        elif name == "adamw_bf16":  # rounded six times, by half of 2 ** -8 of a weight on average
            assert mine.dtype == torch.bfloat16
            assert (mine - other).norm() < 6**0.5 * 2**-8 * start.norm()
        else:
            assert torch.allclose(mine, other, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("kind", ["fused", "foreach", "for_loop"])
def test_the_three_ways_to_compute_an_adamw_update_agree(kind, monkeypatch):
    """Which one was taken is asked of torch: all of them give nearly the same numbers."""
    taken = []

    def noting(name: str, plain):
        return lambda *given, **more: (taken.append(name), plain(*given, **more))

    for name in ("fused", "multi_tensor", "single_tensor"):
        monkeypatch.setattr(adam, f"_{name}_adam", noting(name, getattr(adam, f"_{name}_adam")))
    found = trained(ours("adamw", implementation=kind))
    assert {*taken} == {{"foreach": "multi_tensor", "for_loop": "single_tensor"}.get(kind, kind)}
    for mine, other in zip(found, trained(REFERENCES["adamw"]), strict=True):
        assert torch.allclose(mine, other, rtol=1e-6, atol=1e-7)


def test_lion_by_hand():
    """m = 0, g = -3: w = 2 (1 - 0.1 * 0.1) + 0.1, m = 0.05 * -3. Then g = 0.2: 0.9 m + 0.1 g is still negative."""
    weight = torch.nn.Parameter(torch.tensor([2.0]))
    optimizer = build_optimizer([{"params": [weight], "weight_decay": 0.1}], settings("lion"))
    set_learning_rate(optimizer, 0.1)
    weight.grad = torch.tensor([-3.0])
    optimizer.step()
    assert weight.item() == pytest.approx(2.08)
    assert optimizer.state[weight]["exp_avg"].item() == pytest.approx(-0.15)
    weight.grad = torch.tensor([0.2])
    optimizer.step()
    assert weight.item() == pytest.approx(2.08 * 0.99 + 0.1)
    assert optimizer.state[weight]["exp_avg"].item() == pytest.approx(-0.15 * 0.95 + 0.2 * 0.05)


@pytest.mark.parametrize("shape", [(24, 40), (40, 24), (16, 16)])
def test_muons_direction_is_near_the_orthogonal_factor(shape):
    matrix = torch.randn(shape, generator=torch.Generator().manual_seed(2))
    u, s, v = torch.linalg.svd(matrix, full_matrices=False)
    found = orthogonalize(matrix)
    values = u.T @ found @ v.T  # diagonal: the singular vectors stay, their values come near 1
    kept = torch.diagonal(values)[s > 0.05 * s[0]]
    assert len(kept) > 10 and kept.min() > 0.6 and kept.max() < 1.3
    assert (values - torch.diag(torch.diagonal(values))).abs().max() < 1e-4


@pytest.mark.parametrize("shape", [(4, 24, 40), (4, 40, 24), (0, 4, 6)])
def test_each_expert_of_a_stack_is_orthogonalized_alone(shape):
    stack = torch.randn(shape, generator=torch.Generator().manual_seed(2))
    weight, gradient = torch.nn.Parameter(stack.clone()), torch.randn_like(stack)
    apart = [torch.nn.Parameter(matrix.clone()) for matrix in stack]
    for parameters, gradients in (([weight], [gradient]), (apart, [*gradient])):
        if parameters:
            groups = [{"params": parameters, "weight_decay": DECAY, "muon": True}]
            optimizer = build_optimizer(groups, settings("muon"))
            for parameter, value in zip(parameters, gradients, strict=True):
                parameter.grad = value.clone()
            optimizer.step()
    assert weight.shape == shape and (not apart or all(map(partial(torch.allclose, atol=1e-6), weight, apart)))


def test_names_and_builders_are_one_registry():
    assert set(get_args(OptimizerName)) == OPTIMIZERS.keys()
    classes = {name: type(ours(name)(weights())).__name__ for name in OPTIMIZERS}
    assert len(set(classes.values())) == len(OPTIMIZERS), classes


def test_a_name_without_a_builder_is_an_error():
    unknown = settings("adamw").model_copy(update={"name": "radam"})
    with pytest.raises(KeyError, match="radam"):
        build_optimizer([{"params": weights()}], unknown)


def test_rounding_at_random_is_right_on_average_and_lands_on_a_neighbour():
    exact = torch.full(
        (2**16,), 1.0 + 2**-8 * 1.25
    )  # a quarter of the way from one bf16 number to the next, 2 ** -7 on
    exact = torch.cat([exact, -exact])
    low, high = 1.0, 1.0 + 2**-7
    found = rounded(exact.clone(), random_bits(first_hash(0, salt=7), exact)).float()
    assert {*found.abs().tolist()} == {low, high}
    share = (found.abs() == high).float().mean().item()
    assert share == pytest.approx(0.625, abs=0.01)
    assert found[: 2**16].mean().item() == pytest.approx(exact[0].item(), abs=1e-4)
    assert torch.equal(
        rounded(found.clone(), random_bits(first_hash(0, salt=8), exact)).float(), found
    )  # what fits stays


def test_the_random_bits_belong_to_a_place_a_step_and_a_weight():
    whole = random_bits(first_hash(0, salt=1), torch.empty(5000))
    assert torch.equal(random_bits(first_hash(1234, salt=1), torch.empty(5000 - 1234)), whole[1234:])
    assert whole.unique().numel() > 4500 and 0 <= int(whole.min()) and int(whole.max()) < 2**16
    other = random_bits(first_hash(0, salt=2), torch.empty(5000))
    assert (whole == other).sum() < 10
    assert abs(torch.corrcoef(torch.stack([whole[1:], whole[:-1]]).double())[0, 1]) < 0.05


def test_kahan_keeps_what_rounding_cuts_off():
    """The two together are the fp32 weight, to the 16 bits that they have."""
    weight = torch.nn.Parameter(torch.linspace(0.5, 2, 4096))
    exact = torch.nn.Parameter(weight.detach().bfloat16().float())
    optimizer, reference = ours("adamw_bf16", **KAHAN)([weight]), REFERENCES["adamw"]([exact])
    for each, parameter in ((optimizer, weight), (reference, exact)):
        each.param_groups[0]["weight_decay"] = 0.01
        set_learning_rate(each, 1e-4)
        for _ in range(200):
            parameter.grad = torch.ones_like(parameter)
            each.step()
    compensation = optimizer.state[weight]["compensation"]
    assert compensation.dtype == torch.bfloat16
    assert (exact - weight.float()).abs().max() < 2**-7  # the last place of numbers from 1 to 2
    assert (exact - weight.float() - compensation.float()).abs().max() < 200 * 2**-17


@pytest.mark.parametrize("update", ["stochastic", "kahan"])
def test_updates_that_the_nearest_bf16_undoes_move_weights(update):
    """200 steps of 1e-3 from 1.0, where bf16 numbers are 2 ** -8 apart below and 2 ** -7 above: 0.8 in fp32."""
    weight = torch.nn.Parameter(torch.full((4096,), 1.0))
    optimizer = ours("adamw_bf16", bf16_rounding=update)([weight])
    for group in optimizer.param_groups:
        group["weight_decay"] = 0.0
    set_learning_rate(optimizer, 1e-3)
    for _ in range(200):
        weight.grad = torch.ones_like(weight)
        optimizer.step()
    assert weight.float().mean().item() == pytest.approx(0.8, abs=2e-3)


@pytest.mark.parametrize("update", ["stochastic", "kahan"])
def test_one_kernel_updates_as_many_do(update, monkeypatch):
    """As on a GPU, compiled for this CPU: the same weights, moments and rest, but for what contracted operations leave
    in the last bit of fp32. One program for all sizes, steps and rates."""
    made = []
    torch._dynamo.reset()  # another test may have compiled it
    for compiled in (False, True):
        monkeypatch.setattr(adamw_bf16, "can_compile_update", lambda *_, compiled=compiled: compiled)
        sizes = (72, 64), (33,), (5, 7, 11)
        parameters = [torch.nn.Parameter(torch.linspace(-2, 2, math.prod(size)).view(size)) for size in sizes]
        optimizer = ours("adamw_bf16", bf16_rounding=update)(parameters)
        before = counters["stats"]["unique_graphs"]
        for rate in RATES[:4]:
            set_learning_rate(optimizer, rate)
            for parameter in parameters:
                parameter.grad = parameter.detach().cos()
            optimizer.step()
        assert counters["stats"]["unique_graphs"] - before == compiled
        kept = [value for p in parameters for value in optimizer.state[p].values() if isinstance(value, torch.Tensor)]
        made.append([*parameters, *kept])
    same = sum(int((one == other).sum()) for one, other in zip(*made, strict=True))
    assert same >= 0.999 * sum(tensor.numel() for tensor in made[0])


@pytest.mark.parametrize("kahan", [False, True])
def test_a_kernel_that_cannot_be_had_or_is_wrong_is_not_used(kahan, monkeypatch):
    cpu = torch.device("cpu")
    assert adamw_bf16.compiled_update_agrees(cpu, kahan) and not adamw_bf16.can_compile_update(cpu, kahan)

    def broken(*_):
        raise RuntimeError("no C compiler\nand more")

    monkeypatch.setattr(adamw_bf16, "compiled_update", lambda: broken)
    with pytest.warns(UserWarning, match=r"without its fused kernel \(RuntimeError: no C compiler\)"):
        assert not adamw_bf16.compiled_update_agrees(cpu, kahan)

    def forgetful(numbers, hashed, *tensors):
        adamw_bf16.update_part(numbers, hashed, *tensors)
        tensors[-1].zero_()  # Kahan's compensation, as where a compiler drops the cast

    for wrong in (lambda *_: None, forgetful):
        monkeypatch.setattr(adamw_bf16, "compiled_update", lambda wrong=wrong: wrong)
        with pytest.warns(UserWarning, match="its results are wrong"):
            assert not adamw_bf16.compiled_update_agrees(cpu, kahan)


def test_bits_round_as_a_cast_does():
    values = torch.cat([torch.linspace(-3, 3, 4097), torch.tensor([1 + 2**-8, 1 + 3 * 2**-8, 2**-130, 3e38, 0.0])])
    assert torch.equal(rounded(values.clone(), to_nearest(values)), values.bfloat16().float())


@pytest.mark.parametrize(
    ("shape", "num_shards", "values"), [((300, 32), 2, 4800), ((5120,), 8, 640), ((33, 300), 4, 2700)]
)
def test_shards_that_would_cut_blocks_are_refused(shape, num_shards, values):
    shapes = {"good": (4096, 4096), "vector": (4096,), "small": (63, 65), "bad": shape}
    told = rf"adamw_8bit, which quantizes .* each of {num_shards} shards of bad .* has {values} values"
    with pytest.raises(ConfigurationError, match=told):
        check_shards("adamw_8bit", shapes, num_shards)
    check_shards("lion", shapes, num_shards)
    check_shards("adamw_8bit", {name: shape for name, shape in shapes.items() if name != "bad"}, num_shards)


BYTES = {
    "adamw": 16,
    "lion": 12,
    "sgd": 12,
    "adafactor": 8,
    "muon": 12,
    "adamw_8bit": 10.03,
    "adamw_bf16": 8,
}  # the table of docs/optimizers.md has them, and 2 more with kahan


@pytest.mark.parametrize(
    ("name", "more", "expected"), [*((name, {}, BYTES[name]) for name in OPTIMIZERS), ("adamw_bf16", KAHAN, 10)]
)
def test_bytes_per_parameter_are_those_of_the_live_tensors(name, more, expected):
    weight = torch.nn.Parameter(torch.randn(1024, 2048))
    optimizer = ours(name, **more)([weight])
    weight.grad = torch.randn_like(weight)
    optimizer.step()
    # the maps from codes to values are shared by all weights
    state = {key: value for key, value in optimizer.state[weight].items() if not key.startswith("qmap")}
    kept = [value for value in state.values() if isinstance(value, torch.Tensor)]
    total = sum(tensor.untyped_storage().nbytes() for tensor in (weight, weight.grad, *kept))
    assert total / weight.numel() == pytest.approx(expected, rel=2e-3)
