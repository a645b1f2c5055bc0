"""Names and codes of the recurrences of LCSM: what `EosMixer(mixer=...)` accepts, and the table that its errors print.

Qin et al., "Unlocking the Secrets of Linear Complexity Sequence Model from A Unified Perspective", 2024. Rows of its
Table 1 have names. Codes e-o-s-a are those of its Tables 2 and 3, with the numbers of the published code; the paper's
text seems to exchange the oscillations 2 and 3, and 4 and 5 (`numbering='paper'`). All others have one number.
"""
from typing import Dict, NamedTuple, NoReturn, Optional

# With m_t = o_t . m_{t-1} + e_t i_t' and y_t = m_t' s_t, K keys and D channels of a head, and
# sigma(z) = sigmoid(z)^(1/tau).
PRESETS: Dict[str, str] = {
    's4': 'S4 in the basis of its modes: constant complex e, o, s for each channel, from HiPPO-LegS',
    's4d': 'S4D: the same, from S4D-Lin',
    's5': 'S5: all channels in one system of complex modes, e = B i, y = Re(C m)',
    'dss': 'DSS: complex modes that the channels of a head share, e = 1',
    'tnn': 'TNN as a recurrence: complex modes that the channels of a head share, s = 1',
    'mamba': 'Mamba: i = delta v, o = exp(-delta A), e and s of the token; the same as the code 0-1-0-1-0',
    'linear_attention': 'linear attention without a denominator: o = 1, features 1 + elu',
    'cosformer': 'cosFormer: o = e^(i pi/2T), features relu, divided by the sum of the weights',
    'lrpe': 'LRPE: o = e^(i theta) with learned angles, features 1 + elu',
    'retnet': 'RetNet without its rotation: o = 1 - 2^(-5-h) for head h',
    'tnl': 'TNL: o = exp(-slope of the head), slopes of ALiBi, features silu',
    'gla': 'gated linear attention: o = sigma(W x) for each key, features silu',
    'gateloop': 'GateLoop: o = sigma(W x) e^(i U x) for each key',
    'dur': 'DUR: o = sigma(W x) sigma(U x)\', an outer product',
    'gfw': 'gated fast weights: the same as dur',
    'rwkv4': 'RWKV-4: weighted means with decay exp(-w) and a bonus for the token itself, a memory for each channel',
    'hgrn': 'HGRN: h = f e^(i theta) h + (1 - f) v, f = sigma(W x), a memory for each channel',
    'lrn': 'LRN: the same without angles',
    'deltanet': 'DeltaNet: o = I - b k k\', e = b k, b = sigmoid(W x), keys of length 1',
    'fwp': 'fast weight programming: the same as deltanet',
    'm1': 'o = I - k k\', keys of length 1',
    'm2': 'o = I - k f\' with a second key f, both of length 1; over thousands of tokens its memory can overflow',
    'm3': 'o = I - Diag(k), k = 1 - sigma(W x)',
}
OSCILLATIONS = {
    0: 'sigma(O), O (K, D) learned',
    1: 'sigma(W x)_k sigma(U x)_d',
    2: 'sigma(W x)_d',
    3: 'sigma(W x)_k',
    4: 'sigma(a)_k, a learned',
    5: 'sigma(a)_d, a learned',
    6: 'sigma(z_k O_kd), z = W x',
    7: 'sigma(z_d O_kd), z = W x',
    8: 'sigma(z_d a_k), z = W x',
    9: 'sigma(z_k a_d), z = W x',
    10: '1',
    11: 'e^(i theta_k), theta_k = 10000^(-2k/K); needs e = s = 1',
    12: 'exp(c_(t-1) - c_t)_k, c = logcumsumexp(W x), e times 1 - o; needs e = 1',
}
ACTIVATIONS = {0: 'x', 1: 'relu', 2: 'sigmoid', 3: '1 + elu', 4: 'silu', 5: 'elu', 6: 'relu^2', 7: 'x^2'}
NUMBERINGS = ('code', 'paper')
# Oscillations of the published code by the number that the paper seems to give them.
_PAPER = {2: 3, 3: 2, 4: 5, 5: 4}
# Rows without a temperature, and rows whose memory has no keys.
WITHOUT_TAU = ('s4', 's4d', 's5', 'dss', 'tnn', 'mamba', 'linear_attention', 'cosformer', 'lrpe', 'retnet', 'tnl',
               'rwkv4', 'deltanet', 'fwp', 'm1', 'm2')
WITHOUT_KEYS = ('rwkv4', 'hgrn', 'lrn')
# Oscillations that have a learned constant, which `learned_decay=False` replaces by the slope of the head.
CONSTANT = (0, 4, 5)


class Code(NamedTuple):
    """A code p-e-o-s-a, with the oscillation's number in the published code.

    Attributes:
        linear: False for the prefix 0, which computes steps and decays as Mamba does.
        expand, shrink: 0 for a learned matrix (K, D), 1 for a linear map of the token.
        oscillation: 0 to 12.
        activation: 0 to 7, of expand and shrink.
    """

    linear: bool
    expand: int
    oscillation: int
    shrink: int
    activation: int


def table() -> str:
    """Return the presets and the codes as text."""
    rows = [f'  {name:<17}{text}' for name, text in PRESETS.items()]
    oscillations = [f'    {number:<4}{text}' for number, text in OSCILLATIONS.items()]
    activations = ', '.join(f'{number} {text}' for number, text in ACTIVATIONS.items())
    return '\n'.join([
        'presets:',
        *rows,
        "codes 'e-o-s-a' or '1-e-o-s-a', such as '1-1-1-6', with sigma(z) = sigmoid(z)^(1/tau), tau > 0:",
        '  e   expand: 0 learned matrix (K, D), 1 linear map of the token to K keys',
        '  o   oscillation:',
        *oscillations,
        "      numbering='paper' exchanges 2 and 3, and 4 and 5; the others are the same",
        '  s   shrink: as e',
        f'  a   activation of e and s: {activations}',
        "code '0-1-0-1-a': steps and decays as in Mamba",
    ])


def refuse(problem: str) -> NoReturn:
    """Raise ValueError with the table of codes."""
    raise ValueError(f'{problem}\n{table()}')


def parse(mixer: str, numbering: str = 'code') -> Optional[Code]:
    """Return the code that `mixer` writes, or None for a preset.

    Raises:
        ValueError: it is neither, or the numbering does not apply; the message has the table of codes.
    """
    if numbering not in NUMBERINGS:
        refuse(f'numbering must be one of {NUMBERINGS}, got {numbering!r}')
    if mixer in PRESETS:
        if numbering != 'code':
            refuse(f'numbering={numbering!r} is for codes, but {mixer!r} is a preset')
        return None
    parts = mixer.split('-') if isinstance(mixer, str) else []
    if len(parts) not in (4, 5) or not all(part.isdecimal() and part.isascii() for part in parts):
        refuse(f'mixer must be a preset or a code, got {mixer!r}')
    numbers = [int(part) for part in parts]
    prefix, (expand, oscillation, shrink, activation) = numbers[0] if len(numbers) == 5 else 1, numbers[-4:]
    if (prefix not in (0, 1) or expand not in (0, 1) or shrink not in (0, 1) or oscillation not in OSCILLATIONS
            or activation not in ACTIVATIONS):
        refuse(f'mixer={mixer!r} has a number that is not in the table')
    if numbering == 'paper':
        oscillation = _PAPER.get(oscillation, oscillation)
    code = Code(bool(prefix), expand, oscillation, shrink, activation)
    _check_fit(mixer, code)
    return code


def _check_fit(mixer: str, code: Code) -> None:
    """Raise ValueError for a code whose parts have shapes that do not fit each other."""
    if not code.linear and (code.expand, code.oscillation, code.shrink) != (1, 0, 1):
        refuse(f'mixer={mixer!r}: the prefix 0 has its own oscillation and linear maps: write '
               f'0-1-0-1-{code.activation}')
    if code.oscillation == 11 and not code.expand & code.shrink:
        refuse(f'mixer={mixer!r}: oscillation 11 turns keys of tokens, so expand and shrink must be 1')
    if code.oscillation == 12 and not code.expand:
        refuse(f'mixer={mixer!r}: oscillation 12 weights the expand state of each token, so expand must be 1')


def has_tau(mixer: str, code: Optional[Code]) -> bool:
    return mixer not in WITHOUT_TAU if code is None else code.linear and code.oscillation < 10
