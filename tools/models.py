"""List the models of this package with their parameters, input sizes and descriptions."""
import argparse
import fnmatch
from typing import Any, Dict, List, Optional

from .common.cli import UserError, nearest
from .common.output import dumps, print_rows


def metadata(name: str) -> Dict[str, Any]:
    """Name, parameters, input size (None for a model of tokens) and one-line description of a registered model."""
    import timm

    from .engine.zoo import create
    model = create(name, device='meta')          # shapes only, without memory or random numbers
    size = model.pretrained_cfg.get('input_size')
    description = (timm.models.model_entrypoint(name).__doc__ or '').strip().split('\n')[0]
    return dict(name=name, parameters=sum(p.numel() for p in model.parameters()),
                input_size=size and list(size), description=description)


def main(argv: Optional[List[str]] = None) -> Optional[int]:
    from .engine.zoo import our_models
    parser = argparse.ArgumentParser('subquad models', description=__doc__)
    parser.add_argument('filter', nargs='?', default='*',
                        help='a pattern such as "ppma*", or a part of a name (default: all models)')
    parser.add_argument('--json', action='store_true', help='print JSON')
    args = parser.parse_args(argv)
    pattern = args.filter if any(c in args.filter for c in '*?[') else f'*{args.filter}*'
    names = fnmatch.filter(our_models(), pattern)
    if not names:
        raise UserError(f'no model matches {args.filter!r}{nearest(args.filter, our_models())}')
    rows = [metadata(name) for name in names]
    if args.json:
        print(dumps(rows, indent=2))
        return 0
    print_rows(['model', 'parameters', 'input size', 'description'], (
        (row['name'], f"{row['parameters']:,}", 'x'.join(map(str, row['input_size'] or ['tokens'])), row['description'])
        for row in rows))
    return 0
