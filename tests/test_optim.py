"""Optimizers: equal to torch's where torch has them, each parameter once, decay on matrices only."""

import copy
import io
import math

import pytest
import torch
from torch import nn

from softattn_lm.errors import UserError
from softattn_lm.model.decoder import ParameterRole
from softattn_lm.training.muon import muon_dtype, orthogonal, orthogonal_updates
from softattn_lm.training.optim import AdamW, MuonAdamW

SHAPES = {"qkv": (48, 16), "out": (16, 16), "up": (64, 16), "down": (16, 64)}
PARTS = {"qkv": (16, 16, 16)}


def make_roles(seed: int = 0) -> list[ParameterRole]:
    generator = torch.Generator().manual_seed(seed)
    roles = []
    for name, shape in SHAPES.items():
        parameter = nn.Parameter(torch.randn(shape, generator=generator))
        roles.append(ParameterRole(name, parameter, "hidden", PARTS.get(name, (shape[0],))))
    for name, shape in {"embedding": (11, 16), "head": (11, 16), "vector": (16,)}.items():
        parameter = nn.Parameter(torch.randn(shape, generator=generator))
        roles.append(ParameterRole(name, parameter, name, (shape[0],)))
    return roles


def give_gradients(roles: list[ParameterRole], step: int) -> None:
    generator = torch.Generator().manual_seed(1000 + step)
    for role in roles:
        role.parameter.grad = torch.randn(role.parameter.shape, generator=generator)


@pytest.mark.parametrize("compute", ["float32", "bfloat16"])
@pytest.mark.parametrize("decay", [0.0, 0.1])
def test_hidden_matrices_move_as_under_torchs_muon(compute, decay):
    ours, theirs = make_roles(), make_roles()
    optimizer = MuonAdamW(ours, lr=0.1, weight_decay=decay, compute=compute)
    # Torch knows of no fused matrices, so there the parts are parameters of their own.
    parts = {
        role.name: [nn.Parameter(p.detach().clone()) for p in role.parameter.split(list(role.rows))]
        for role in theirs
        if role.role == "hidden"
    }
    reference = torch.optim.Muon(
        [p for ps in parts.values() for p in ps], lr=0.1, weight_decay=decay, adjust_lr_fn="original"
    )
    for step in range(8):
        give_gradients(ours, step)
        for role in ours:
            if role.role == "hidden":
                for part, gradient in zip(parts[role.name], role.parameter.grad.split(list(role.rows)), strict=True):
                    part.grad = gradient.clone()
        optimizer.step()
        reference.step()
    start = {role.name: role.parameter for role in theirs}
    for role in ours:
        if role.role == "hidden":
            expected = torch.cat(list(parts[role.name]))
            moved = (expected - start[role.name]).abs().max()
            assert moved > 0.2  # far enough for the comparison to mean something
            torch.testing.assert_close(role.parameter, expected, atol=2e-2, rtol=0)


def test_other_parameters_move_as_under_torchs_adamw_bit_for_bit():
    ours, theirs = make_roles(), make_roles()
    optimizer = MuonAdamW(ours, lr=0.02, adam_weight_decay=0.1)
    multiples = {"embedding": 5.0, "head": 0.25, "vector": 0.5}
    groups = [
        {
            "params": [role.parameter],
            "lr": 0.02 * multiples[role.role],
            "weight_decay": 0.0 if role.role == "vector" else 0.1,
        }
        for role in theirs
        if role.role in multiples
    ]
    reference = torch.optim.AdamW(groups, betas=(0.8, 0.95), eps=1e-10, fused=True)
    for step in range(10):
        give_gradients(ours, step)
        give_gradients(theirs, step)
        optimizer.step()
        reference.step()
    for mine, other in zip(ours, theirs, strict=True):
        if mine.role in multiples:
            assert torch.equal(mine.parameter, other.parameter), mine.name


def test_fused_adamw_is_the_written_out_one_to_rounding():
    ours, theirs = make_roles(), make_roles()
    optimizer = AdamW(ours, lr=1e-3)
    reference = torch.optim.AdamW(
        [
            {"params": [role.parameter for role in theirs if role.role != "vector"], "weight_decay": 0.1},
            {"params": [role.parameter for role in theirs if role.role == "vector"], "weight_decay": 0.0},
        ],
        lr=1e-3,
        betas=(0.9, 0.99),
        foreach=False,
        fused=False,
    )
    for step in range(10):
        give_gradients(ours, step)
        give_gradients(theirs, step)
        optimizer.step()
        reference.step()
    for mine, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(mine.parameter, other.parameter, atol=5e-7, rtol=0)


def test_an_orthogonal_update_has_singular_values_near_one_and_the_direction_of_the_momentum():
    matrices = torch.randn(3, 8, 20, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    update = orthogonal(matrices, torch.float64)
    values = torch.linalg.svdvals(update)
    assert values.min() > 0.6 and values.max() < 1.3
    u, _, v = torch.linalg.svd(matrices, full_matrices=False)
    # The same singular vectors: what remains after rotating them away is diagonal.
    core = u.mT @ update @ v.mT
    torch.testing.assert_close(core, torch.diag_embed(core.diagonal(dim1=1, dim2=2)), atol=1e-9, rtol=0)


def test_parts_of_a_fused_matrix_are_made_orthogonal_apart():
    generator = torch.Generator().manual_seed(0)
    parts = [torch.randn(16, 16, generator=generator) * size for size in (100.0, 1.0, 0.01)]
    (fused,) = orthogonal_updates([torch.cat(parts)], [(16, 16, 16)], torch.float32)
    alone = orthogonal_updates(parts, [(16,)] * 3, torch.float32)
    torch.testing.assert_close(fused, torch.cat(alone), atol=1e-5, rtol=0)
    (as_one,) = orthogonal_updates([torch.cat(parts)], [(48,)], torch.float32)
    assert as_one[32:].norm() < 0.1 * fused[32:].norm()  # the smallest part would hardly move


def test_tall_parts_are_scaled_by_the_root_of_rows_over_columns():
    wide, tall = torch.randn(8, 32, generator=torch.Generator().manual_seed(0)), None
    tall = wide.mT.contiguous()
    a, b = orthogonal_updates([wide, tall], [(8,), (32,)], torch.float32)
    torch.testing.assert_close(b, 2.0 * a.mT, atol=1e-6, rtol=0)


@pytest.mark.parametrize("make", [lambda roles: AdamW(roles, lr=0.1), lambda roles: MuonAdamW(roles, lr=0.1)])
def test_each_parameter_is_in_exactly_one_group(make):
    roles = make_roles()
    held = [id(p) for group in make(roles).param_groups for p in group["params"]]
    assert sorted(held) == sorted(id(role.parameter) for role in roles)


@pytest.mark.parametrize(
    "make",
    [
        lambda roles: AdamW(roles, lr=0.1, weight_decay=0.5),
        lambda roles: MuonAdamW(roles, lr=0.1, weight_decay=0.5, adam_weight_decay=0.5),
    ],
)
def test_without_gradients_to_follow_matrices_shrink_and_vectors_stay(make):
    roles = make_roles()
    before = {role.name: role.parameter.detach().clone() for role in roles}
    optimizer = make(roles)
    for role in roles:
        role.parameter.grad = torch.zeros_like(role.parameter)
    optimizer.step()
    for role in roles:
        if role.role == "vector":
            assert torch.equal(role.parameter, before[role.name])
        else:
            assert (role.parameter.abs() < before[role.name].abs()).all(), role.name


def test_one_rate_scales_all_groups_together():
    rates = {}
    for lr in (0.02, 0.04):
        rates[lr] = {group["role"]: group["lr"] for group in MuonAdamW(make_roles(), lr=lr).param_groups}
    assert rates[0.02] == pytest.approx({"hidden": 0.02, "embedding": 0.1, "head": 0.005, "vector": 0.01})
    assert rates[0.04] == pytest.approx({role: 2 * lr for role, lr in rates[0.02].items()})


@pytest.mark.parametrize("make", [lambda roles: AdamW(roles, lr=0.01), lambda roles: MuonAdamW(roles, lr=0.01)])
def test_a_saved_optimizer_goes_on_bit_for_bit(make):
    roles = make_roles()
    optimizer = make(roles)
    for step in range(3):
        give_gradients(roles, step)
        optimizer.step()
    file = io.BytesIO()
    torch.save({"optimizer": optimizer.state_dict(), "values": [role.parameter.detach() for role in roles]}, file)
    file.seek(0)
    loaded = torch.load(file, weights_only=True)
    others = make_roles(seed=1)
    for role, value in zip(others, loaded["values"], strict=True):
        role.parameter.data.copy_(value)
    continued = make(others)
    continued.load_state_dict(loaded["optimizer"])
    for step in range(3, 6):
        for rs, o in ((roles, optimizer), (others, continued)):
            give_gradients(rs, step)
            o.step()
    assert all(torch.equal(a.parameter, b.parameter) for a, b in zip(roles, others, strict=True))


def test_a_parameter_without_a_gradient_is_left_alone():
    roles = make_roles()
    before = copy.deepcopy([role.parameter for role in roles])
    optimizer = MuonAdamW(roles, lr=0.1, weight_decay=0.1)
    give_gradients(roles, 0)
    roles[1].parameter.grad = None
    roles[4].parameter.grad = None
    optimizer.step()
    same = [torch.equal(role.parameter, old) for role, old in zip(roles, before, strict=True)]
    assert same == [False, True, False, False, True, False, False]


SETTINGS_OUT_OF_RANGE = [
    {"beta1": 1.0}, {"lr": -0.1}, {"lr": 0.0}, {"lr": math.inf}, {"lr": math.nan}, {"weight_decay": -1.0},
    {"weight_decay": math.inf}, {"eps": math.nan},
]  # fmt: skip


@pytest.mark.parametrize("setting", SETTINGS_OUT_OF_RANGE)
def test_a_number_out_of_range_is_named(setting):
    ((name, _),) = setting.items()
    with pytest.raises(UserError, match="^lr=" if name == "lr" else f"^optimizer.{name}="):
        AdamW(make_roles(), **{"lr": 0.1, **setting})


def test_the_iteration_runs_in_the_type_asked_for():
    assert muon_dtype("float32", torch.device("cpu")) == torch.float32
    assert muon_dtype("bfloat16", torch.device("cpu")) == torch.bfloat16
