"""Parameters and MACs of any timm model at any input size, beside the authors' figures.

Two counts, because papers differ in which they print: `all` is every multiply-add of convolutions, linear layers and
products of tokens with tokens; `weights` leaves the products of tokens with tokens out (attention, scans).
"""
import argparse
import ast
import json
from typing import Any, Dict, List, Optional, Tuple

from .cli import UserError

# Reported by the authors, at 224 x 224: millions of parameters, GMACs, ImageNet-1k top-1.
REPORTED = {'ppma_tiny': (14, 2.7, 82.6), 'ppma_small': (27, 4.9, 84.2), 'ppma_base': (54, 10.6, 85.0)}
# Operators with weights on one side. Everything else that a flop counter sees multiplies tokens with tokens.
_WITH_WEIGHTS = ('convolution', '_convolution', 'mm', 'addmm')


def size(text: str) -> Tuple[int, int]:
    """'224' -> (224, 224), '800x1280' -> (800, 1280) (height x width)."""
    parts = text.lower().split('x')
    if len(parts) > 2 or not all(part.isdecimal() and int(part) > 0 for part in parts):
        raise UserError(f'a size is a number or HEIGHTxWIDTH, got {text!r}')
    return int(parts[0]), int(parts[-1])


def count(name: str, height: int, width: int, **options: Any) -> Dict[str, Any]:
    """Parameters and MACs of one image, by running the model on the meta device: no memory, no time, no weights.

    Raises:
        UserError: unknown model, or an option or size that it refuses.
    """
    import torch
    from torch.utils.flop_counter import FlopCounterMode

    from .zoo import create, size_options
    model = create(name, device='meta', **{**size_options(name, (height, width)), **options}).eval()
    image = torch.empty(1, model.pretrained_cfg['input_size'][0], height, width, device='meta')
    with torch.no_grad(), FlopCounterMode(display=False) as counter:
        try:
            model(image)
        except (ValueError, AssertionError, RuntimeError) as error:
            raise UserError(f'{name} at {height}x{width}: {str(error).splitlines()[0]}') from error
    flops = {str(op).split('.')[-1]: n for op, n in counter.get_flop_counts()['Global'].items()}
    weights = sum(n for op, n in flops.items() if op in _WITH_WEIGHTS)
    parameters = sum(p.numel() for p in model.parameters())
    return dict(model=name, size=[height, width], options=options, parameters=parameters,
                macs=sum(flops.values()) // 2, macs_of_weights=weights // 2,
                reported_by_authors=dict(zip(('parameters_M', 'gmacs_at_224', 'top1'), REPORTED.get(name, ()))))


def _options(pairs: List[str]) -> Dict[str, Any]:
    options = {}
    for pair in pairs:
        key, equals, value = pair.partition('=')
        if not equals:
            raise UserError(f'--set takes KEY=VALUE, got {pair!r}')
        try:
            options[key] = ast.literal_eval(value)
        except (ValueError, SyntaxError):
            options[key] = value
    return options


def main(argv: Optional[List[str]] = None) -> Optional[int]:
    import subquad  # noqa: F401  (before timm)

    from .zoo import our_models
    parser = argparse.ArgumentParser('subquad stats', description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('model', nargs='*', help='timm names (default: all of ours)')
    parser.add_argument('--size', default='224', help='224 or HEIGHTxWIDTH (default: 224)')
    parser.add_argument('--set', nargs='+', default=[], metavar='KEY=VALUE', help='model options, such as paths=none')
    parser.add_argument('--json', action='store_true', help='print JSON')
    args = parser.parse_args(argv)
    height, width = size(args.size)
    rows = [count(name, height, width, **_options(args.set)) for name in args.model or our_models()]
    if args.json:
        print(json.dumps(rows, indent=2))
        return 0
    from rich.console import Console
    from rich.table import Table
    table = Table('model', 'parameters', 'GMACs, all', 'GMACs, weights', 'reported by the authors (224)',
                  title=f'one image of {height} x {width}')
    for row in rows:
        theirs = row['reported_by_authors']
        reported = f"{theirs['parameters_M']} M, {theirs['gmacs_at_224']} G, top-1 {theirs['top1']}" if theirs else '-'
        table.add_row(row['model'], f"{row['parameters']:,}", f"{row['macs'] / 1e9:.3f}",
                      f"{row['macs_of_weights'] / 1e9:.3f}", reported)
    Console().print(table)
    return 0


if __name__ == '__main__':
    from .cli import run
    run(main)
