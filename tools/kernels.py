"""List the operators and, for each that does not run on a Triton kernel here, the reason."""
import argparse
from typing import List, Optional

from .common.output import dumps


def main(argv: Optional[List[str]] = None) -> None:
    parser = argparse.ArgumentParser('subquad kernels', description=__doc__)
    parser.add_argument('--json', action='store_true', help='print JSON')
    args = parser.parse_args(argv)
    from ..kernels import why_not
    from ..kernels.dispatch import OPERATORS
    reasons = {op: why_not(op) for op in OPERATORS}
    if args.json:
        print(dumps({op: dict(triton=reason is None, why_not=reason) for op, reason in reasons.items()}, indent=2))
        return
    for op, reason in reasons.items():
        print(f'{op:26s}' + (reason or f'{op} runs on Triton for CUDA tensors.'))
