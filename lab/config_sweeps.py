"""Train one config with many options, and record each result: the recurrences of LCSM on associative recall and text.

Each sweep has the shape of a figure or a table of Qin et al. (2024), at a small size. All runs of a sweep take the same
steps. A run that the file of records already has is not repeated, so that an interrupted sweep continues.
"""
import argparse
import itertools
import json
from pathlib import Path
from typing import Any, Dict, Iterator, List, NamedTuple, Optional, Sequence

from subquad.tools.common.cli import UserError, nearest
from subquad.tools.common.paths import expanded
from subquad.tools.engine.config import load
from subquad.tools.engine.records import append, environment

from .documents import read_records
from .short_training import train_and_test
from .sweep_tables import LEARNING_RATE

LEARNING_RATES = (5e-3, 1e-2)


class Sweep(NamedTuple):
    """A config, and the values of each option that is varied.

    Attributes:
        config: name of the config.
        options: values by dotted key; all combinations are trained.
        shows: what the sweep compares.
    """

    config: str
    options: Dict[str, Sequence[Any]]
    shows: str


def _codes(*codes: str) -> Dict[str, Sequence[Any]]:
    return {'model.mixer': codes, LEARNING_RATE: LEARNING_RATES}


SWEEPS: Dict[str, Sweep] = {
    'recall': Sweep('lcsm_mqar-small', _codes('1-0-1-0', '1-1-1-0', '0-0-0-0', '0-1-0-0'),
                    'expand and shrink of the token, and learned matrices'),
    'parametrization': Sweep('lcsm_mqar-small', _codes('0-1-0-1-0', '1-1-1-0'), 'Figure 3: SSM and linear attention'),
    'codes': Sweep('lcsm_mqar-small', _codes(*(f'{e}-{o}-{s}-0' for e, o, s in itertools.product((0, 1), repeat=3))),
                   'Figure 4: expand, oscillation and shrink'),
    'oscillations': Sweep('lcsm_mqar-small', _codes(*(f'1-{o}-1-0' for o in range(12))), 'Figure 5: oscillation'),
    'activations': Sweep('lcsm_mqar-small', _codes(*(f'1-1-1-{a}' for a in range(8))), 'Figure 6: activation'),
    'tau': Sweep('lcsm_mqar-small', {**_codes('1-1-1-0'), 'model.tau': (1, 2, 4, 8, 16, 32, 64)},
                 'Figure 7: temperature'),
    'language': Sweep('lcsm_language-stdlib', {'model.mixer': ('1-1-1-4', '1-10-1-0')}, 'Tables 4 and 6: text'),
}


def train_once(config_name: str, options: Dict[str, Any]) -> Dict[str, Any]:
    """Train a config with options and test the last weights; see `train_and_test`.

    Raises:
        UserError: the config or an option is wrong, or the loss is not finite.
    """
    return train_and_test(load(config_name, options))


def combinations(options: Dict[str, Sequence[Any]]) -> Iterator[Dict[str, Any]]:
    """Yield every combination of the values."""
    for values in itertools.product(*options.values()):
        yield dict(zip(options, values))


def run_sweep(name: str, file: Path, fixed: Dict[str, Any]) -> None:
    """Train every combination that the file lacks, and append a record of each.

    Args:
        name: name of the sweep.
        file: file of JSON lines.
        fixed: further options for all runs, which replace the sweep's values of the same key.

    Raises:
        UserError: a run fails, or the file cannot be read or written.
    """
    sweep = SWEEPS[name]
    for options in combinations({**sweep.options, **{key: (value,) for key, value in fixed.items()}}):
        if any((line['config'], line['options']) == (sweep.config, options) for line in read_records(file)):
            continue
        record = train_once(sweep.config, options)
        append(file, {'config': sweep.config, 'options': options, **record, **environment()})
        shown = '  '.join(f'{key} {value:.4g}' for key, value in record.items())
        print(' '.join(f'{key}={value}' for key, value in options.items()), '', shown, flush=True)


def main(argv: Optional[List[str]] = None) -> Optional[int]:
    import subquad  # noqa: F401  (before timm)
    parser = argparse.ArgumentParser('python -m lab.config_sweeps', description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('name', help=f"name of the sweep: {', '.join(SWEEPS)}")
    parser.add_argument('--record', default='sweeps.jsonl', metavar='FILE',
                        help='file of JSON lines to append to (default: sweeps.jsonl)')
    parser.add_argument('--set', nargs='+', default=[], metavar='KEY=VALUE',
                        help='options of all runs, such as model.dim=128 train_cfg.max_epochs=64; VALUE is JSON or '
                        'text')
    args = parser.parse_args(argv)
    if args.name not in SWEEPS:
        raise UserError(f"unknown sweep {args.name!r}{nearest(args.name, list(SWEEPS))} (allowed: {', '.join(SWEEPS)})")
    run_sweep(args.name, expanded(args.record), dict(map(setting, args.set)))
    return 0


def setting(text: str) -> Sequence[Any]:
    """Return the key and the value of KEY=VALUE."""
    key, equals, value = text.partition('=')
    if not equals:
        raise UserError(f'--set takes KEY=VALUE, got {text!r}')
    try:
        return key, json.loads(value)
    except ValueError:
        return key, value


if __name__ == '__main__':
    from subquad.tools.common.cli import run
    run(main)
