"""List the operators and, for each that does not run on a Triton kernel here, the reason; say which run native code on
a CPU."""
import argparse
from typing import List, Optional

from .common.output import dumps


def main(argv: Optional[List[str]] = None) -> None:
    parser = argparse.ArgumentParser('subquad kernels', description=__doc__)
    parser.add_argument('--json', action='store_true', help='print JSON')
    args = parser.parse_args(argv)
    from ..kernels import native, why_not
    from ..kernels.dispatch import OPERATORS
    reasons = {op: why_not(op) for op in OPERATORS}
    objection = native.why_not()
    compiled = [op for op in OPERATORS if 'native' in OPERATORS[op].implementations]
    if args.json:
        print(dumps({op: dict(triton=reason is None, why_not=reason, native=op in compiled and objection is None)
                     for op, reason in reasons.items()}, indent=2))
        return
    for op, reason in reasons.items():
        print(f'{op:26s}' + (reason or f'{op} runs on Triton for CUDA tensors.'))
    if objection:
        print(f'On a CPU, all operators run on PyTorch: {objection}')
    else:
        print(f"On a CPU, native code for {native.INSTRUCTION_SET} runs {', '.join(compiled)}, and PyTorch the "
              'others.')
