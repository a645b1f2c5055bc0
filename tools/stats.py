"""Count parameters and MACs of a timm model, or of a detection or segmentation config.

The counts stand beside the numbers that the authors report. Papers differ in what they count, so there are three:
- `all`: every multiply-add of convolutions, linear layers, attention and scans;
- `without attention products`: all multiply-adds except those between tokens (attention and scans);
- `without attention products, with norms`: the second count plus what fvcore, a common counting tool, adds for norms
  (2 per element for BatchNorm, 5 for GroupNorm and LayerNorm) and for bilinear resizing (4).
For a config, the count nearest to the reported number is named together with its deviation. The parameters of an
auxiliary head are printed after a plus sign.
"""
import argparse
import ast
from typing import Any, Dict, List, Optional

from .common.cli import UserError, parse_size
from .common.output import dumps, print_rows


def _options(pairs: List[str]) -> Dict[str, Any]:
    options = {}
    for pair in pairs:
        key, equals, value = pair.partition('=')
        if not equals:
            raise UserError(f'--cfg-options takes KEY=VALUE, got {pair!r}')
        try:
            options[key] = ast.literal_eval(value)
        except (ValueError, SyntaxError):
            options[key] = value
    return options


def main(argv: Optional[List[str]] = None) -> Optional[int]:
    from .engine.counting.counting_configs import count_config, is_config, reported
    from .engine.counting.counts import count
    from .engine.zoo import our_models, takes_images
    parser = argparse.ArgumentParser('subquad stats', description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('model', nargs='*',
                        help="names of timm models, names or paths of configs (default: this package's image models)")
    parser.add_argument('--size', help="image size, one number or HEIGHTxWIDTH (default: each model's own input size)")
    parser.add_argument('--cfg-options', nargs='+', default=[], metavar='KEY=VALUE',
                        help='options of a model, such as paths=none; for a config, model.backbone.paths=none')
    parser.add_argument('--json', action='store_true', help='print JSON')
    args = parser.parse_args(argv)
    height, width = parse_size(args.size) if args.size else (None, None)
    rows = [(count_config if is_config(name) else count)(name, height, width, **_options(args.cfg_options))
            for name in args.model or filter(takes_images, our_models())]
    if args.json:
        print(dumps(rows, indent=2))
        return 0
    print_rows(['model', 'image', 'parameters', 'GMACs: all', 'without attention products',
                'without attention products, with norms', 'reported by the authors'], (
        (row['model'], '{}x{}'.format(*row['size']), ' + '.join(f'{row[key]:,}' for key in (
            'parameters', 'parameters_of_auxiliary_head') if row.get(key)),
         *(f'{row[key] / 1e9:.3f}' for key in ('macs', 'macs_without_attention', 'macs_with_norms')), reported(row))
        for row in rows))
    return 0
