"""Files of `subquad export` as models, for `subquad predict` and `subquad test`.

They need the metadata and the runtime of the file alone; detectors and segmenters also MMDetection or MMSegmentation.
"""
import statistics
import time
from pathlib import Path
from typing import Any, Callable, Dict, List, Optional

import torch
from timm.data.transforms import MaybeToTensor, ResizeKeepRatio, str_to_interp_mode
from torch import Tensor, nn
from torchvision import transforms

from ..common.cli import UserError, shown
from ..common.output import progress
from ..data.image_sets import IGNORED, ImageFolder
from ..engine.classification.prediction_metrics import AccuracyMetric
from .formats import FORMATS, exporter, format_of


class ExportedModel(nn.Module):
    """An exported file.

    Attributes:
        metadata: What the file says about itself; see `subject.describe`.
        milliseconds: Time of each run so far.
        multi_label: Whether each class of a classifier has a probability of its own.
    """

    def __init__(self, file: str, threads: int = 1):
        super().__init__()
        path, name = Path(file).expanduser(), format_of(file)
        if not path.exists():
            raise UserError(f'there is no file {shown(file)}')
        if not FORMATS[name].runs:
            raise UserError(f'{FORMATS[name].title} has no runtime for Python, so {shown(file)} cannot be run here')
        module = exporter(name)
        self.metadata: Dict[str, Any] = module.read_metadata(path)
        if self.metadata['task'] == 'features':
            raise UserError(f'{shown(file)} returns feature maps; only classes, boxes and masks can be shown or tested')
        self.milliseconds: List[float] = []
        self.multi_label = self.metadata['postprocessing']['type'] == 'sigmoid'
        self._run = module.load(path, threads)

    def outputs(self, image: Tensor) -> Dict[str, Tensor]:
        """Run the file on an image (1, C, H, W), float32, and return its outputs by name."""
        start = time.perf_counter()
        outputs = self._run(image)
        self.milliseconds.append(1e3 * (time.perf_counter() - start))
        return dict(zip((output['name'] for output in self.metadata['outputs']), outputs))

    def forward(self, images: Tensor) -> Tensor:
        """Return the logits (B, classes) of a classifier, one image after the other."""
        return torch.cat([self.outputs(image)['logits'] for image in images.split(1)])

    def transform(self) -> Callable:
        """Return the transform of PIL images for a classifier; see `subject.preprocessing`."""
        steps, given = self.metadata['preprocessing'], self.metadata['input']
        resize = dict(steps['resize'])
        size, filter = resize['size'], resize['interpolation']
        if resize['keep_ratio'] and not isinstance(size, int):
            first = ResizeKeepRatio(size, interpolation=filter)
        else:
            first = transforms.Resize(size, interpolation=str_to_interp_mode(filter))
        last = (transforms.Lambda(lambda x: x * given['range'][1]) if steps['normalize_in_graph'] else
                transforms.Normalize(steps['mean'], steps['std']))
        gray = [transforms.Grayscale()] if given['color'] == 'gray' else []
        return transforms.Compose([*gray, first, transforms.CenterCrop(steps['crop']), MaybeToTensor(), last])

    def classes(self) -> List[str]:
        """Return the labels of a classifier, or their numbers if the file has none."""
        return self.metadata['labels'] or [str(n) for n in range(self.metadata['outputs'][0]['shape'][-1])]


def test_classifier(model: ExportedModel, folder: str, other: Optional[nn.Module] = None,
                    other_transform: Optional[Callable] = None) -> Dict[str, float]:
    """Test a classifier's file on a folder with a subfolder of images for each class.

    Args:
        model: The file.
        folder: The folder, or the one above with a subfolder `val`.
        other: The PyTorch model to compare with, in evaluation mode.
        other_transform: How its images are prepared.

    Returns:
        accuracy/top1 and top5 in percent, latency/median in milliseconds; with the other model also model/top1, and
        agreement/top1, the percentage of images for which both choose one class.
    """
    if model.multi_label:
        raise UserError('the file gives several classes for an image, and a folder has one')
    root = Path(folder).expanduser()
    data, labels = ImageFolder(str(root / 'val' if (root / 'val').is_dir() else root)), model.classes()
    data.evaluated = True
    unknown = [name for name in data.classes if name not in labels]
    if unknown:
        raise UserError(f'the folder {shown(unknown[0])} in {shown(folder)} is no class of the file, whose classes are '
                        f'{", ".join(map(shown, labels[:8]))}{" ..." if len(labels) > 8 else ""}')
    pairs = [(model, model.transform()), *([(other, other_transform)] if other else [])]
    metrics, equal = [AccuracyMetric() for _ in pairs], []
    for index in progress(range(len(data)), 'images'):
        image, label = data[index].values()
        if label == IGNORED:
            continue
        with torch.inference_mode():
            scores = [run(prepare(image)[None])[0] for run, prepare in pairs]
        for metric, row in zip(metrics, scores):
            metric.process(None, [dict(scores=row, label=labels.index(data.classes[label]))])
        equal.append(len({int(row.argmax()) for row in scores}) == 1)
    accuracy = [metric.compute_metrics(metric.results) for metric in metrics]
    result = {f'accuracy/{name}': value for name, value in accuracy[0].items() if name == 'top1' or len(labels) > 5}
    if other:
        result.update({'model/top1': accuracy[1]['top1'], 'agreement/top1': 100 * statistics.mean(equal)})
    return {**result, 'latency/median': statistics.median(model.milliseconds)}
