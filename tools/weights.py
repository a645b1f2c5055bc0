"""List, download and check the published weights that this package can load; convert and publish weights."""
import argparse
import fnmatch
from dataclasses import asdict
from typing import Any, Callable, Dict, List, Optional

from ..backbones.weights import WeightsError
from ..backbones.weights.cache import locked_entry, sha256_of
from ..backbones.weights.download import cached_file, check, fetch, renew, why_by_hand
from ..backbones.weights.registry import WEIGHTS, PublishedWeights, find
from .common.cli import UserError, add_weight_choice, nearest, weight_errors
from .common.output import dumps, print_rows
from .engine.weights.conversion import add_convert_arguments, convert_command
from .engine.weights.hub_folder import add_push_arguments, push_command


def main(argv: Optional[List[str]] = None) -> Optional[int]:
    args = _parser().parse_args(argv)
    with weight_errors():
        return args.run(args)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser('subquad weights', description=__doc__)
    commands = parser.add_subparsers(dest='command', metavar='COMMAND', required=True)

    def add(name: str, run: Callable[[argparse.Namespace], Optional[int]]) -> argparse.ArgumentParser:
        what = run.__doc__.split('\n')[0]
        command = commands.add_parser(name, help=what[:1].lower() + what[1:].rstrip('.'), description=what)
        command.add_argument('--json', action='store_true', help='print JSON')
        command.set_defaults(run=run)
        return command

    command = add('list', _list)
    command.add_argument('filter', nargs='?', default='*', help='a pattern such as "ppma*.in1k", or a part of a name '
                         '(default: all weights)')
    command.add_argument('--task', choices=['classification', 'detection', 'segmentation'], help='list this task only')
    command = add('info', _info)
    command.add_argument('name', help='name of the weights, ARCH.TAG, or ARCH for its default classifier')
    command = add('download', _download)
    command.add_argument('names', nargs='+', metavar='NAME', help='ARCH.TAG, ARCH, or a pattern such as "ppma*.in1k"')
    command.add_argument('--update', action='store_true', help='accept the file that is published now, even if it '
                         'differs from the recorded one')
    command = add('verify', _verify)
    command.add_argument('names', nargs='*', metavar='NAME', help='names or patterns (default: all in the cache)')
    command = add('convert', convert_command)
    add_convert_arguments(command)
    add_weight_choice(command)
    add_push_arguments(add('push', push_command))
    return parser


def _matching(pattern: str) -> List[PublishedWeights]:
    """Return the weights whose names match a pattern or contain a text."""
    names = fnmatch.filter(WEIGHTS, pattern if set('*?[') & set(pattern) else f'*{pattern}*')
    if not names:
        raise UserError(f'no weights match {pattern!r}{nearest(pattern, list(WEIGHTS))} (`subquad weights list` shows '
                        'all)')
    return [WEIGHTS[name] for name in names]


def _named(names: List[str]) -> List[PublishedWeights]:
    """Return the weights of names, as `find` does, and of patterns, each once."""
    found = [weights for name in names for weights in (_matching(name) if set('*?[') & set(name) else [find(name)])]
    return list({weights.name: weights for weights in found}.values())


def _described(weights: PublishedWeights) -> Dict[str, Any]:
    """Return all fields of published weights, their entry in the lock file, and their file in the cache or None."""
    path, locked = cached_file(weights), locked_entry(weights.name, weights.source)
    return {'name': weights.name, **asdict(weights), 'terms': weights.terms, 'source': weights.source,
            'locked': asdict(locked) if locked else None, 'cached': str(path) if path else None}


def _list(args: argparse.Namespace) -> None:
    """List published weights with the figures that their authors report."""
    rows = [_described(weights) for weights in _matching(args.filter) if args.task in (None, weights.task)]
    if args.json:
        print(dumps(rows, indent=2))
        return
    print_rows(['name', 'task', 'input size', 'reported', 'license', 'cached'], (
        (row['name'], row['task'], 'x'.join(map(str, row['input_size'][1:])),
         ', '.join(f'{metric} {value:g}' for metric, value in row['reported'].items()), row['terms'],
         'yes' if row['cached'] else 'download by hand' if row['page'] else '')
        for row in rows))


def _info(args: argparse.Namespace) -> None:
    """Show all that is known of a file: source, license, preprocessing, hash."""
    row = _described(find(args.name))
    if args.json:
        print(dumps(row, indent=2))
        return
    for key, value in row.items():
        if value not in (None, {}):
            text = ', '.join(f'{name} {item}' for name, item in value.items()) if isinstance(value, dict) else value
            print(f'{key:14s}{text}')


def _download(args: argparse.Namespace) -> None:
    """Download weights that are not in the cache, check their hashes and print their paths."""
    rows = []
    for weights in _named(args.names):
        path = renew(weights) if args.update else fetch(weights)
        rows.append(dict(name=weights.name, path=str(path), size=path.stat().st_size, sha256=sha256_of(path)))
        if not args.json:
            print(path, flush=True)
    if args.json:
        print(dumps(rows, indent=2))


def _verify(args: argparse.Namespace) -> int:
    """Check the hashes of weights in the cache, without a network; exit with 1 if one is wrong or missing."""
    states, good = {}, ('ok', 'no known hash')
    for weights in _named(args.names) if args.names else filter(cached_file, WEIGHTS.values()):
        path = cached_file(weights)
        try:
            states[weights.name] = (
                why_by_hand(weights) if weights.page else
                f'not in the cache; `subquad weights download {weights.name}` gets it' if path is None else
                good[0] if check(weights, path) else good[1])
        except WeightsError as error:
            states[weights.name] = str(error)
    if args.json or not states:
        print(dumps(states, indent=2) if args.json else 'no published weights are in the cache')
    for name, state in () if args.json else states.items():
        print(f'{name}: {state}')
    return 0 if all(state in good for state in states.values()) else 1
