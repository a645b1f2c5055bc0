"""The table that `subquad export` prints."""
import sys
from typing import Any, Dict, Sequence

from rich.table import Table

from ..common.output import add_row, print_table
from .pipeline import Report


def row(report: Report) -> Dict[str, Any]:
    """Return a report as a dict that JSON can hold."""
    conversion, errors = report.conversion, report.errors
    return dict(
        format=report.format,
        file=str(report.path) if report.passed else None,
        passed=report.passed,
        bytes=report.bytes,
        operators=dict(conversion.operators),
        delegates=conversion.delegates,
        delegated_macs=conversion.delegated_macs,
        absolute_error=errors and errors.absolute,
        relative_error=errors and errors.relative,
        output=errors and errors.output,
        unequal_labels=errors and errors.unequal,
        tolerance=report.tolerance,
        latency_ms={str(threads): dict(file=file, eager=eager)
                    for threads, (file, eager) in report.latency.items()},
        notes=report.notes,
    )


def print_reports(reports: Sequence[Report]) -> None:
    """Print the reports as a table on stdout; notes and errors above the tolerance go to stderr."""
    threads = sorted({number for report in reports for number in report.latency})
    table = Table('format', 'file', 'MB', 'operators', 'max error', 'relative',
                  *(f"ms, {number} thread{'s' if number > 1 else ''} (eager)" for number in threads))
    for report in reports:
        errors = report.errors
        add_row(
            table,
            report.format,
            str(report.path) if report.passed else 'not written',
            f'{report.bytes / 1e6:.2f}',
            operators(report),
            'not run' if errors is None else f'{errors.absolute:.1e}',
            '' if errors is None else f'{errors.relative:.1e}',
            *('{:.1f} ({:.1f})'.format(*report.latency[number]) if number in report.latency else ''
              for number in threads),
        )
    if reports:
        print_table(table)
    for report in reports:
        for note in report.notes:
            print(f'note: {note}', file=sys.stderr)
        if not report.passed:
            print(f'error: {report.format}: {too_far(report)}, so {report.path} is not written', file=sys.stderr)


def too_far(report: Report) -> str:
    """Say which error is above the tolerance."""
    errors = report.errors
    if errors.relative <= report.tolerance:
        return f'{errors.unequal:.1%} of the labels differ from those of the ordinary model'
    return (f'the relative error {errors.relative:.1e} of {errors.output} is above the tolerance '
            f'{report.tolerance:g}')


def operators(report: Report) -> str:
    """Describe the number of operators, and how many of them a delegate runs."""
    conversion = report.conversion
    count = sum(conversion.operators.values())
    if conversion.delegated_macs is None:
        return str(count)
    return f'{count} + {conversion.delegates} delegates with {conversion.delegated_macs:.0%} of the MACs'
