"""Test the mixer and the backbones of LCSM: every preset and code, against written-out sums and loops."""
import math

import pytest
import timm
import torch
import torch.nn.functional as F
from helpers import assert_close
from pairwise import pairwise, slow

from subquad import kernels
from subquad.backbones import LCSM
from subquad.backbones.mixers import EosMixer
from subquad.backbones.mixers.eos import BUILD, make_recurrence
from subquad.backbones.mixers.eos_codes import OSCILLATIONS, PRESETS, WITHOUT_KEYS, WITHOUT_TAU, parse
from subquad.backbones.timm_interface import init_linear

# Every oscillation, every activation, and every pair of expand and shrink that fits.
CODES = [f'{e}-{o}-{s}-{(o + 3 * e + s) % 8}' for o in OSCILLATIONS for e in (0, 1) for s in (0, 1)
         if not (o == 11 and not e * s or o == 12 and not e)]
ALL = [*PRESETS, *CODES, '0-1-0-1-4']


def mixer(name='gla', dim=32, heads=2, seed=0, dtype=torch.float64, **options):
    torch.manual_seed(seed)
    made = EosMixer(dim, heads, name, expand_dim=None if name in WITHOUT_KEYS else 4, dtype=dtype, **options)
    return made.apply(init_linear).eval()


def tokens(*shape, dtype=torch.float64):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(1), dtype=dtype)


def heads(x, count):
    """(B, T, C) -> (B, heads, T, C / heads)."""
    return x.unflatten(2, (count, -1)).transpose(1, 2)


def merged(x):
    return x.transpose(1, 2).flatten(2)


def test_every_preset_has_a_recurrence():
    assert list(BUILD) == list(PRESETS) and {*WITHOUT_TAU, *WITHOUT_KEYS} <= {*PRESETS}
    assert {int(code.split('-')[3]) for code in CODES} == set(range(8))


@pairwise('name, mode', ALL, ['axis', 'raster'], together=1)
def test_values_and_gradients_are_finite_and_all_parameters_matter(name, mode):
    made, x = mixer(name, mode=mode), tokens(2, 5, 4, 32).requires_grad_()
    y = made(x)
    assert y.shape == x.shape and y.isfinite().all()
    grads = torch.autograd.grad((y * tokens(2, 5, 4, 32).flip(0)).sum(), [x, *made.parameters()])
    for (key, _), grad in zip([('x', x), *made.named_parameters()], grads):
        assert grad.isfinite().all() and grad.abs().max() > 0, key


@pairwise('name, mode', ['gla', 's4d', 's5', 'mamba', 'rwkv4', 'cosformer', 'deltanet', 'hgrn', '1-12-1-0', '1-6-1-6'],
          ['axis', 'raster'], together=1)
def test_any_size(name, mode):
    made = mixer(name, mode=mode)
    for size in ((1, 1), (1, 7), (6, 1), (3, 70)):
        assert made(tokens(1, *size, 32)).isfinite().all() and made(tokens(1, *size, 32)).shape[1:3] == size


@pytest.mark.parametrize('name', ALL)
def test_the_result_turns_with_the_image(name):
    """The recurrences run in both directions with the same parameters, so a rotated image has a rotated result."""
    made, x = mixer(name, mode='raster'), tokens(1, 4, 3, 32)
    assert_close(made(x.flip(1, 2)), made(x).flip(1, 2), 1e-9)


@pytest.mark.parametrize('name', ALL)
def test_axis_mode_is_a_pass_over_columns_and_one_over_rows(name):
    made, x = mixer(name), tokens(2, 5, 3, 32)
    line = mixer(name, mode='raster')

    def along_rows(values, x):
        rows = [line.mix(values[:, row:row + 1], x[:, row:row + 1]) for row in range(x.shape[1])]
        return torch.cat(rows, 1)

    values = made.value(x)
    columns = along_rows(values.transpose(1, 2), x.transpose(1, 2)).transpose(1, 2)
    assert_close(made.mix(values, x), along_rows(F.layer_norm(columns, (32,), eps=1e-6), x), 1e-9)


# --- rows by definition: the result of the recurrence over a line x (1, 1, T, C)

def weights_of(name, made, x):
    """Return e, s and the weight of token j for token t of a bidirectional line, (B, heads, T, T, keys)."""
    part, length = made.recurrence, x.shape[2]
    found = {key: heads(value[0], 2) for key, value in part.tokens(x).items()}
    distance = (torch.arange(length)[:, None] - torch.arange(length)).abs().double()
    sums = torch.zeros(1, 2, length, length, 4, dtype=torch.float64)
    if name in ('gla', 'dur'):
        log = found['log_o_k']
        for t in range(length):
            for j in range(length):
                between = log[:, :, j + 1:t + 1] if j < t else log[:, :, t:j]
                sums[:, :, t, j] = between.sum(2)
    elif name == 'retnet':
        gamma = 1 - 2.0 ** (-5 - torch.arange(2).double())
        sums += gamma.log()[None, :, None, None, None] * distance[:, :, None]
    weights = sums.exp()
    if name == 'lrpe':
        weights = weights * (distance[:, :, None] * 10000.0 ** (-2 * torch.arange(4).double() / 4)).cos()
    return found, weights


@pytest.mark.parametrize('name', ['linear_attention', 'retnet', 'lrpe', 'gla'])
def test_rows_with_keys_are_sums_over_all_tokens(name):
    made, x = mixer(name, mode='raster'), tokens(1, 1, 9, 32)
    part, (found, weights) = made.recurrence, weights_of(name, made, x)
    activate = F.silu if name == 'gla' else (lambda z: z) if name == 'retnet' else lambda z: F.elu(z) + 1
    e, s = (activate(heads(linear(x)[0], 2)) for linear in (part.expand, part.shrink))
    assert_close(found['e'], e, 1e-12)
    values = heads(made.value(x)[0], 2)
    expected = torch.einsum('bhtk,bhjk,bhtjk,bhjd->bhtd', s, e, weights, values)
    assert_close(made.mix(made.value(x), x)[0], merged(expected), 1e-9)
    if name == 'gla':
        assert_close(found['log_o_k'], heads(F.logsigmoid(part.oscillation.gate_k(x))[0] / 16, 2), 1e-12)
    if name == 'linear_attention':
        assert_close(merged(expected), merged((s @ e.mT) @ values), 1e-9)


def test_cosformer_divides_by_its_weights():
    made, x = mixer('cosformer', mode='raster'), tokens(1, 1, 9, 32)
    e, s = (heads(linear(x)[0], 2).relu() for linear in (made.recurrence.expand, made.recurrence.shrink))
    distance = torch.arange(9)[:, None] - torch.arange(9)
    weights = s @ e.mT * (distance.double() * math.pi / 18).cos()
    expected = weights / weights.sum(-1, keepdim=True).clamp(min=1e-6) @ heads(made.value(x)[0], 2)
    assert_close(made.mix(made.value(x), x)[0], merged(expected), 1e-9)


def test_rwkv4_is_a_weighted_mean_with_a_bonus():
    made, x = mixer('rwkv4', mode='raster'), 3 * tokens(1, 1, 9, 32)
    part, key, values = made.recurrence, made.recurrence.key(x)[0, 0], made.value(x)[0, 0]
    distance = (torch.arange(9)[:, None] - torch.arange(9)).abs()[..., None]
    logs = key - part.log_rate.exp() * (distance - 1).clamp(min=0)
    logs = torch.where(distance == 0, key + part.bonus, logs)
    expected = torch.einsum('tjc,jc->tc', logs.softmax(1), values) * part.receptance(x)[0, 0].sigmoid()
    assert_close(made.mix(made.value(x), x)[0, 0], expected, 1e-9)


@pytest.mark.parametrize('name', ['s4', 's4d', 'dss', 'tnn', 's5'])
def test_constant_systems_are_convolutions(name):
    """The response to an impulse is the same, shifted, for an impulse elsewhere, and the same on both sides."""
    made = mixer(name, mode='raster')

    def response(place):
        values = torch.zeros(1, 1, 21, 32, dtype=torch.float64)
        values[0, 0, place] = torch.linspace(-1, 1, 32)
        return made.mix(values, torch.zeros_like(values))[0, 0]
    center = response(10)
    assert_close(response(7)[:18], center[3:], 1e-9)
    assert_close(center[:10], center[11:].flip(0), 1e-9)
    assert center[10:].abs().amax(1).min() > 0
    # S5 mixes the channels of all heads, the others mix none.
    values = torch.zeros(1, 1, 5, 32, dtype=torch.float64)
    values[..., 2, 3] = 1
    reached = made.mix(values, values)[0, 0, 0] != 0
    assert reached.all() if name == 's5' else reached.nonzero().tolist() == [[3]]


@pytest.mark.parametrize('name', ['mamba', 'deltanet', 'm1', 'm2', 'm3', 'lrn', 'hgrn', 'gateloop', '1-1-1-0',
                                  '0-0-0-0', '1-7-1-4', '1-12-1-0'])
def test_rows_are_their_loops(name):
    """In both directions, less the own term: the loops are written from the definitions."""
    made, x = mixer(name, mode='raster'), tokens(1, 1, 7, 32)
    values = made.value(x)

    def run(x, values):
        part, length = made.recurrence, x.shape[2]
        i = heads(values[0], 2)
        linear = {key: heads(child(x)[0], 2) for key, child in part.named_children() if callable(child)
                  and not isinstance(child, torch.nn.ModuleList) and key != 'oscillation'}
        inner = getattr(part, 'oscillation', None)
        gates = {key: heads(child(x)[0], 2) for key, child in inner.named_children()} if inner is not None else {}
        m = torch.zeros(2, 4, 16, dtype=torch.complex128)
        total, outputs, own = torch.zeros(2, 4, dtype=torch.float64), [], []
        for t in range(length):
            now = {key: value[0, :, t] for key, value in {**linear, **gates}.items()}
            u, ones = i[0, :, t], torch.ones(2, 4, 16, dtype=torch.float64)
            o, e, s = ones, now.get('expand'), now.get('shrink')
            if name == 'mamba':
                delta = F.softplus(now['step'] + part.step_bias.view(2, 16))
                o, u = (-delta[:, None] * part.A_log.exp()).exp(), delta * u
            elif name in ('deltanet', 'm1', 'm2'):
                k, s = (F.normalize(F.silu(now[key]), dim=-1) for key in ('key', 'query'))
                f = F.normalize(F.silu(now['second_key']), dim=-1) if name == 'm2' else k
                rate = now['rate'].sigmoid() if name == 'deltanet' else torch.ones(2, 1, dtype=torch.float64)
                e = rate * k
                m = m - (e[:, :, None] * (f[:, :, None] * m).sum(1, keepdim=True))
            elif name == 'm3':
                g = now['gate_k'].sigmoid() ** (1 / 16)
                o, e = g[:, :, None] * ones, 1 - g
            elif name in ('lrn', 'hgrn'):
                f = now['forget'].sigmoid() ** (1 / 16)
                turn = torch.polar(f, part.theta.view(2, 16)) if name == 'hgrn' else f
                o, u, gate = turn[:, None] * ones, (1 - f) * u, now['shrink'].sigmoid()
                e, s = ones[:, :, 0], ones[:, :, 0] / 4
            elif name == 'gateloop':
                o = torch.polar(now['gate_k'].sigmoid() ** (1 / 16), now['angle'])[:, :, None] * ones
            elif name == '1-1-1-0':
                o = (now['gate_k'].sigmoid()[:, :, None] * now['gate_d'].sigmoid()[:, None]) ** (1 / 16)
            elif name == '0-0-0-0':
                o = inner.decay.sigmoid() ** (1 / 16)
            elif name == '1-7-1-4':
                o = (now['z'][:, None] * inner.factor).sigmoid() ** (1 / 16)
                e, s = F.silu(e), F.silu(s)
            elif name == '1-12-1-0':
                before, total = total, total + now['logit'].exp()
                o, e = (before / total)[:, :, None] * ones, e * (1 - before / total)
            if name == '0-0-0-0':
                added, read = part.expand_matrix * u[:, None], part.shrink_matrix
            else:
                added, read = e[:, :, None] * u[:, None], s[:, :, None]
            m = o * m + added
            y, mine = (read * m).sum(1).real, (read * added).sum(1)
            if name == 'mamba':
                y = y + part.skip[:, 0] * i[0, :, t] / 2
            elif name in ('lrn', 'hgrn'):
                y, mine = y * gate, mine * gate
            outputs.append(y.flatten())
            own.append(mine.flatten())
        return torch.stack(outputs), torch.stack(own)

    forward, own = run(x, values)
    reverse, last = (y.flip(0) for y in run(x.flip(2), values.flip(2)))
    # The own terms are the same in both directions, except for oscillation 12.
    assert_close(made.mix(values, x)[0, 0], forward + reverse - (own + last) / 2, 1e-9)


# --- options

@pytest.mark.parametrize('name', [name for name in ALL if '-' not in name and name not in WITHOUT_TAU])
def test_tau_lengthens_the_memory(name):
    x = tokens(1, 1, 40, 32)
    short, long = (mixer(name, mode='raster', tau=tau) for tau in (2.0, 64.0))
    assert_close(mixer(name, mode='raster', tau=16.0)(x), mixer(name, mode='raster')(x), 1e-12)

    def reach(made):
        values = torch.zeros(1, 1, 40, 32, dtype=torch.float64)
        values[:, :, 0] = 1
        y = made.mix(values, x)[0, 0].abs().mean(1)
        return y[30:].sum() / y.sum()
    assert reach(long) > 2 * reach(short)


@pytest.mark.parametrize('number, other', [(2, 3), (3, 2), (4, 5), (5, 4), (1, 1), (9, 9)])
def test_numbering_of_the_paper(number, other):
    x = tokens(1, 3, 4, 32)
    found = mixer(f'1-{number}-1-6', numbering='paper')
    assert_close(found(x), mixer(f'1-{other}-1-6')(x), 1e-12)
    if number != other:
        assert {key: value.shape for key, value in found.state_dict().items()} != {
            key: value.shape for key, value in mixer(f'1-{number}-1-6').state_dict().items()}


def test_prefix_and_synonyms():
    assert parse('1-1-1-6') == parse('1-1-1-1-6')
    x = tokens(1, 3, 4, 32)
    for one, other in (('dur', 'gfw'), ('dur', '1-1-1-0'), ('deltanet', 'fwp'), ('mamba', '0-1-0-1-0'),
                       ('gla', '1-3-1-4'), ('linear_attention', '1-10-1-3'), ('lrpe', '1-11-1-3')):
        assert_close(mixer(one)(x), mixer(other)(x), 1e-12)
    assert 'recurrence.oscillation.theta' in mixer('lrpe').state_dict()
    assert 'recurrence.oscillation.theta' not in mixer('1-11-1-3').state_dict()


@pytest.mark.parametrize('code', ['1-0-1-0', '1-4-1-0', '1-5-1-0'])
def test_fixed_decays_are_the_slopes_of_the_heads(code):
    x = tokens(1, 1, 6, 32)
    made = mixer(code, mode='raster', learned_decay=False)
    assert not [key for key in made.state_dict() if 'decay' in key or 'log' in key]
    e, s = (heads(linear(x)[0], 2) for linear in (made.recurrence.expand, made.recurrence.shrink))
    slope = torch.tensor([2.0 ** -4, 2.0 ** -8]).double()[:, None, None]
    distance = (torch.arange(6)[:, None] - torch.arange(6)).abs()
    expected = ((s @ e.mT) * (-slope * distance).exp()) @ heads(made.value(x)[0], 2)
    assert_close(made.mix(made.value(x), x)[0], merged(expected), 1e-9)


@pytest.mark.parametrize('options, message', [
    (dict(mixer='glaa'), "mixer must be a preset or a code, got 'glaa'"),
    (dict(mixer='1-1-1'), "got '1-1-1'"), (dict(mixer='1-x-1-1'), 'got'), (dict(mixer='1-13-1-0'), 'not in the table'),
    (dict(mixer='1-1-1-8'), 'not in the table'), (dict(mixer='2-1-1-1-0'), 'not in the table'),
    (dict(mixer='0-1-1-1-0'), 'write 0-1-0-1-0'), (dict(mixer='0-11-1-0'), 'must be 1'),
    (dict(mixer='0-12-1-0'), 'must be 1'), (dict(tau=0), 'tau must be positive, got 0'),
    (dict(tau=-1.0), 'tau must be positive'), (dict(tau=float('nan')), 'tau must be positive'),
    (dict(numbering='paper'), "'gla' is a preset")], ids=str)
def test_errors_print_the_table(options, message):
    for make in (lambda: EosMixer(32, 2, **options), lambda: timm.create_model('test_lcsm', **options)):
        with pytest.raises(ValueError, match=message) as error:
            make()
        assert all(f'\n  {name} ' in str(error.value) for name in PRESETS) and '\n    12  exp(c' in str(error.value)


@pytest.mark.parametrize('options, unused', [
    (dict(mixer='mamba', tau=8.0), 'tau=8.0'), (dict(mixer='1-10-1-0', tau=8.0), 'tau=8.0'),
    (dict(mixer='1-0-1-0', tau=8.0, learned_decay=False), 'tau=8.0'),
    (dict(mixer='lrn', expand_dim=8), 'expand_dim=8'),
    (dict(mixer='1-3-1-0', learned_decay=False), 'learned_decay=False')], ids=str)
def test_options_without_effect_get_a_warning(options, unused):
    used = {name: value for name, value in options.items() if not unused.startswith(name)}
    torch.manual_seed(0)
    plain, x = EosMixer(32, 2, **used), torch.randn(1, 3, 4, 32)
    torch.manual_seed(0)
    with pytest.warns(UserWarning, match=f"{unused} has no effect on mixer='{options['mixer']}'"):
        made = EosMixer(32, 2, **options)
    assert torch.equal(made(x), plain(x))


# --- initial values, weights, precision

@pytest.mark.parametrize('name', ['gla', 'gateloop', 'dur', 'm3', 'lrn', 'hgrn', 'retnet', 'tnl', '1-0-1-0', '1-4-1-0',
                                  '1-5-1-0', '1-2-1-0'])
def test_initial_decays_are_near_1(name):
    torch.manual_seed(0)
    part = make_recurrence(64, 2, name).apply(init_linear)
    found = part.tokens(torch.randn(2, 5, 5, 64))
    inner = getattr(part, 'oscillation', None)
    if inner is not None:
        found = {**found, **inner.arguments(found, 5)}
    logs = [value for key, value in found.items() if key.startswith('log')]
    assert logs
    for log in logs:
        assert 0.5 < log.exp().min() and log.exp().max() < 1 and log.exp().mean() > 0.75


@pytest.mark.parametrize('name', ['s4', 's4d', 's5', 'dss', 'tnn'])
def test_initial_modes_decay(name):
    part = make_recurrence(64, 2, name)
    rate = part.log_rate.exp()
    step = part.log_step.exp()
    decay = (-(rate.unsqueeze(-1) if step.ndim == 3 else rate) * step).exp()
    assert 0.9 < decay.min() and decay.max() < 1 and part.frequency.min() >= 0


def test_state_dict_names():
    """Weight files depend on these names."""
    assert list(mixer('gla').state_dict()) == [
        'recurrence.oscillation.gate_k.weight', 'recurrence.oscillation.gate_k.bias', 'recurrence.expand.weight',
        'recurrence.expand.bias', 'recurrence.shrink.weight', 'recurrence.shrink.bias', 'value.weight', 'value.bias',
        'gate.weight', 'gate.bias', 'norm.weight', 'norm.bias', 'out.weight', 'out.bias']
    own = {name: [key.removeprefix('recurrence.') for key in mixer(name).state_dict()
                  if key.startswith('recurrence.') and not key.endswith(('.weight', '.bias'))] for name in ALL}
    assert own['s4d'] == ['log_rate', 'frequency', 'log_step', 'expand_matrix', 'shrink_matrix', 'skip']
    assert own['mamba'] == ['step_bias', 'A_log', 'skip'] and own['rwkv4'] == ['log_rate', 'bonus']
    assert own['retnet'] == [] and own['hgrn'] == ['theta']
    model = timm.create_model('test_lcsm', mixer='mamba')
    assert {key.split('.')[-1] for key in model.no_weight_decay()} == {'step_bias', 'A_log', 'skip'}


@pytest.mark.parametrize('name', ALL)
def test_bfloat16_and_autocast(name):
    x = tokens(1, 6, 5, 32, dtype=torch.float32)
    made = mixer(name, dtype=torch.float32)
    expected = made(x)
    with torch.autocast('cpu', torch.bfloat16):
        found = made(x)
    assert found.dtype == torch.bfloat16
    scale = expected.abs().max()
    assert (found.float() - expected).abs().max() < 0.1 * scale
    found = made.to(torch.bfloat16)(x.bfloat16())
    assert found.dtype == torch.bfloat16 and (found.float() - expected).abs().max() < 0.15 * scale


def test_backbone_passes_its_options_to_all_mixers():
    model = timm.create_model('test_lcsm', mixer='1-1-1-6', mode='raster', expand_dim=8, tau=8.0)
    assert isinstance(model, LCSM) and len(model.mixers()) == 5
    for made in model.mixers().values():
        assert made.mode == 'raster' and made.recurrence.oscillation.tau == 8
        assert made.recurrence.expand.out_features == 8 * made.num_heads
    for size in ('tiny', 'small', 'base'):
        model = timm.create_model(f'lcsm_{size}', device='meta')
        widths = [made.value.in_features // made.num_heads for made in model.mixers().values()]
        assert set(widths) <= {16, 32} and widths.count(32) > len(widths) - 5


EXPORTED = ['gla', '1-12-1-0', '1-1-1-6', '1-6-1-0', 'lrpe', 'rwkv4', 'deltanet', 'cosformer']


@pytest.mark.parametrize('name', EXPORTED)
def test_export_form(name):
    model, x = timm.create_model('test_lcsm', mixer=name, num_classes=5).eval(), torch.randn(1, 3, 64, 96)
    with kernels.use_backend('export'):
        exported = model(x)
    assert_close(exported, model(x), 1e-4)


@pytest.mark.parametrize('name', [EXPORTED[0], *slow(*EXPORTED[1:])])
def test_export(name):
    model = timm.create_model('test_lcsm', mixer=name, num_classes=5, depths=(1, 1, 1, 1)).eval()
    x = torch.randn(1, 3, 64, 96)
    program = torch.export.export(model, (x,))
    assert not [node for node in program.graph.nodes if 'subquad' in str(node.target)]
    assert_close(program.module()(x), model(x), 1e-4)


def test_a_delta_rule_can_be_traced():
    model, x = timm.create_model('test_lcsm', mixer='deltanet').eval(), torch.randn(1, 3, 64, 64)
    with torch.no_grad():
        assert torch.allclose(torch.jit.trace(model, x, check_trace=False)(x), model(x), atol=1e-6)
