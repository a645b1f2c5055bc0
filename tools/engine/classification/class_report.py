"""Tables, files and pictures of a classifier's predictions: by class, the frequent confusions, and the calibration."""
import csv
import io
from collections import Counter
from pathlib import Path
from typing import Any, Dict, List

import numpy as np

from ...common.canvas import figure, save
from ...common.imagenet import readable
from ...common.output import dumps, print_rows
from ...common.paths import write_text
from .prediction_metrics import BINS, Predictions, expected_calibration_error, reliability

SHOWN = 50                      # rows of a table on the terminal
LARGEST_MATRIX = 60             # classes whose confusion matrix can be read as a picture
BARS = 40                       # confusions in the picture of more classes


class ClassReport:
    """What a classifier's predictions say about each class; `take` fills it after an evaluation.

    Attributes:
        predictions: The predictions.
        classes: Names of the classes.
        by_class: Whether every image has one label. Otherwise (ReaL) only the calibration is defined.
    """

    predictions: Predictions
    classes: List[str]

    def take(self, predictions: Predictions, classes: List[str]) -> None:
        self.predictions, self.classes = predictions, readable(classes)
        self.by_class = bool((predictions.labels >= 0).all())

    def rows(self) -> List[Dict[str, Any]]:
        """Return dict(name, precision, recall, count) of each class that has images, the lowest recall first.

        Precision and recall are in percent; the precision of a class that is never predicted is NaN. Images with
        scores that are NaN or infinite count for the recall of their class.
        """
        from sklearn.metrics import precision_recall_fscore_support
        labels, predicted = self.predictions.labels, self.predictions.predicted
        present = np.unique(labels)
        precision, recall, _, count = precision_recall_fscore_support(
            labels, predicted, labels=present, average=None, zero_division=np.nan)
        rows = [dict(name=self.classes[n], precision=p * 100, recall=r * 100, count=int(c))
                for n, p, r, c in zip(present, precision.tolist(), recall.tolist(), count.tolist())]
        return sorted(rows, key=lambda row: (row['recall'], -row['count']))

    def confusions(self) -> List[Dict[str, Any]]:
        """Return dict(label, predicted, count, share) of each pair of confused classes, the most frequent first.

        `share` is the percentage of the label's images; `predicted` is None for scores that are NaN or infinite.
        """
        labels, predicted = self.predictions.labels, self.predictions.predicted
        total = np.bincount(labels)
        pairs = Counter((int(label), int(other)) for label, other in zip(labels, predicted) if label != other)
        return [dict(label=self.classes[label], predicted=self.classes[other] if other >= 0 else None, count=count,
                     share=100 * count / int(total[label])) for (label, other), count in
                sorted(pairs.items(), key=lambda item: (-item[1], item[0]))]

    def as_dict(self) -> Dict[str, Any]:
        """Return the tables and the bins of the calibration as values for JSON."""
        count, accuracy, confidence = reliability(self.predictions)
        bins = [dict(count=n, accuracy=a * 100, confidence=c * 100) for n, a, c in
                zip(count.tolist(), accuracy.tolist(), confidence.tolist())]
        tables = dict(classes=self.rows(), confusions=self.confusions()) if self.by_class else {}
        return dict(nonfinite=self.predictions.nonfinite, reliability=bins, **tables)

    def show(self) -> None:
        """Print the tables, at most `SHOWN` rows of each."""
        if not self.by_class:
            print('no table of classes: an image of ReaL can have several')
            return
        rows, pairs = self.rows(), self.confusions()
        print_rows(['class', 'precision %', 'recall %', 'images'], (
            (row['name'], 'never predicted' if np.isnan(row['precision']) else f"{row['precision']:.1f}",
             f"{row['recall']:.1f}", row['count']) for row in rows[:SHOWN]))
        if len(rows) > SHOWN:
            print(f'the {SHOWN} classes of {len(rows):,} with the lowest recall; --out FOLDER writes all')
        if pairs:
            print_rows(['class', 'predicted as', 'images', '% of the class'], (
                (row['label'], row['predicted'] or 'nothing (scores not finite)', row['count'], f"{row['share']:.1f}")
                for row in pairs[:20]))

    def write(self, folder: Path, metrics: Dict[str, float]) -> List[Path]:
        """Write reliability.png, report.json and, by class, confusion.png and classes.csv: their paths."""
        paths = [folder / 'reliability.png', folder / 'report.json']
        save(self._reliability_page(), paths[0])
        write_text(paths[1], dumps(dict(metrics=metrics, **self.as_dict()), indent=1))
        if self.by_class:
            paths += [folder / 'confusion.png', folder / 'classes.csv']
            save(self._confusion_page(), paths[2])
            write_text(paths[3], self._csv())
        return paths

    def _csv(self) -> str:
        file = io.StringIO()
        writer = csv.DictWriter(file, ['name', 'precision', 'recall', 'count'])
        writer.writeheader()
        writer.writerows({**row, 'precision': '' if np.isnan(row['precision']) else f"{row['precision']:.2f}",
                          'recall': f"{row['recall']:.2f}"} for row in self.rows())
        return file.getvalue()

    def _reliability_page(self) -> Any:
        """Draw accuracy over confidence, and the number of images in each bin below."""
        page = figure((5, 6))
        axes, counts = page.subplots(2, height_ratios=(3, 1))
        count, accuracy, confidence = reliability(self.predictions)
        edges, used = np.arange(BINS) / BINS, count > 0
        axes.bar(edges[used], accuracy[used] * 100, 1 / BINS, align='edge', edgecolor='white', label='accuracy')
        axes.plot(confidence[used], accuracy[used] * 100, 'k.', label='at the mean confidence of the bin')
        axes.plot([0, 1], [0, 100], '--', color='gray', label='calibrated')
        ece = 100 * expected_calibration_error(self.predictions)
        axes.set(ylabel='accuracy of the bin, %', ylim=(0, 102), xlim=(0, 1),
                 title=f'expected calibration error {ece:.2f} % ({BINS} bins)')
        axes.legend(loc='upper center', bbox_to_anchor=(0.5, -0.07), ncols=3, fontsize=7, frameon=False)
        counts.bar(edges, count, 1 / BINS, align='edge', edgecolor='white', color='gray')
        counts.set(xlabel='confidence', ylabel='images', xlim=(0, 1))
        return page

    def _confusion_page(self) -> Any:
        """Draw the confusion matrix, or for many classes the most frequent confusions as bars."""
        present = sorted({*self.predictions.labels.tolist()} | {*self.predictions.predicted.tolist()} - {-1})
        if len(present) <= LARGEST_MATRIX:
            return self._matrix_page(present)
        pairs = self.confusions()[:BARS]
        page = figure((9, 1 + 0.22 * max(len(pairs), 1)))
        axes = page.subplots()
        names = [f"{_short(row['label'])} \u2192 {_short(row['predicted'] or 'nothing')}" for row in pairs]
        axes.barh(range(len(pairs)), [row['count'] for row in pairs])
        axes.set_yticks(range(len(pairs)), names, fontsize=8)
        axes.invert_yaxis()
        axes.margins(y=0.01)
        axes.set(xlabel='images', title=f'the {len(pairs)} most frequent confusions (class \u2192 predicted class)')
        return page

    def _matrix_page(self, present: List[int]) -> Any:
        """Draw the confusion matrix of these classes, each row in percent of its images."""
        from sklearn.metrics import ConfusionMatrixDisplay, confusion_matrix
        matrix = confusion_matrix(self.predictions.labels, self.predictions.predicted, labels=present)
        # Rows of classes without images stay 0; images whose scores are not finite are in no column.
        total = np.array([(self.predictions.labels == n).sum() for n in present])[:, None]
        side = 2.5 + 0.45 * len(present) if len(present) <= 20 else 3.5 + 0.2 * len(present)
        page = figure((side + 1, side))
        axes = page.subplots()
        names = [_short(self.classes[n]) for n in present]
        ConfusionMatrixDisplay(100 * matrix / np.maximum(total, 1), display_labels=names).plot(
            ax=axes, cmap='Blues', xticks_rotation='vertical', include_values=len(present) <= 20, values_format='.0f',
            im_kw=dict(vmin=0, vmax=100), text_kw=dict(fontsize=8))
        axes.set(xlabel='predicted class', ylabel='class', title='% of the images of each class')
        axes.tick_params(labelsize=8 if len(present) <= 20 else 6)
        return page


def _short(name: str, longest: int = 28) -> str:
    """Return a class's name for a picture, without the signs that matplotlib takes for a formula."""
    name = name.replace('$', r'\$')
    return name if len(name) <= longest else f'{name[:longest - 3]}...'
