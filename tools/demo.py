"""Test a small PPMA of the package on 360 images of handwritten digits and draw what it computes, then train the same
network on 1,437 others, test it and draw its decay factors."""
import argparse
import os
import shutil
import sys
import time
from pathlib import Path
from typing import Any, List, Optional, Sequence, Tuple

from .common.paths import writable_folder

CONFIG = 'test-ppma_digits'
PRETRAINED = 'test_ppma.digits'         # made by the training that this command runs without --pretrained
SHOWN = 8                               # images in the picture of decay factors
PANELS = 4                              # images in the picture of `subquad visualize`


def main(argv: Optional[List[str]] = None) -> Optional[int]:
    parser = argparse.ArgumentParser('subquad demo', description=__doc__)
    parser.add_argument('--out', default='demo', metavar='FOLDER',
                        help='folder for weights, images and pictures (default: demo)')
    parser.add_argument('--pretrained', action='store_true',
                        help='only test and draw the network of the package, without training')
    args = parser.parse_args(argv)
    from .data.digits import write_digits
    from .engine.config import load
    from .engine.training.run import run_training
    out, config, weights = writable_folder(args.out), load(CONFIG), PRETRAINED
    images = out / 'images'
    files = write_digits(images, SHOWN)
    print(f'Testing {PRETRAINED}, whose weights are part of the package ...', flush=True)
    _test_and_draw(config, weights, files, out / 'digits.png', 'bundled weights')
    _draw_panels([file for file, _ in files[:PANELS]], out / 'panels.png')
    if not args.pretrained:
        epochs = config.train_cfg.max_epochs
        print(f'\nTraining {config.model.name} on 1,437 images for {epochs} epochs ...', flush=True)
        start = time.perf_counter()
        weights = str(run_training(config, str(out / 'train')))
        _test_and_draw(config, weights, files, out / 'trained.png',
                       f'trained in {time.perf_counter() - start:.0f} s')
    activate = Path(sys.prefix) / 'bin' / 'activate'
    hidden = not shutil.which('subquad') and activate.exists()          # `subquad` is not on the path
    print(f'\nweights   {weights}\nimages    {images}\n\nNext:\n' +
          (f'  source {os.path.relpath(activate)}\n' if hidden else '') +
          f'  subquad predict {weights} {images} --topk 3\n'
          f'  subquad visualize {weights} {images}\n'
          f'  subquad test {CONFIG} {weights}\n'
          '  subquad train ppma-tiny_folder --data YOUR_IMAGES   (YOUR_IMAGES/train/CLASS/*, YOUR_IMAGES/val/CLASS/*)\n'
          '  subquad --help')
    return 0


def _test_and_draw(config: Any, weights: str, files: Sequence[Tuple[Path, int]], picture: Path, how: str) -> None:
    """Print the accuracy and the classes of a few test images, and draw the decay factors for these."""
    import torch

    from ..backbones.prepare import prepare
    from .common.images import open_image
    from .data.digits import linear_accuracy
    from .engine.classification.evaluation import evaluate
    from .engine.classification.prediction import classify, print_classes
    from .engine.classification.weight_files import classifier_from_file
    from .engine.drawing.pictures import decay_factors, draw_classified
    accuracy = evaluate(config, weights)['accuracy/top1']
    print(f'\nAccuracy on 360 test images: {accuracy:.1f} % (linear classifier: {linear_accuracy():.1f} %); {how}.\n')
    model, transform, classes = classifier_from_file(weights)
    results = classify(prepare(model), transform, classes, [file for file, _ in files], topk=3)
    print_classes(results)
    inputs = torch.stack([transform(open_image(file)) for file, _ in files])
    horizontal, vertical = decay_factors(model, inputs)['stages.0.blocks.0']
    draw_classified(picture, files, [row['classes'][0]['name'] for row in results], horizontal, vertical,
                    f'{config.model.name} on digits, accuracy {accuracy:.1f} %: decay factors of the first block')
    print(f'drew {picture}', flush=True)


def _draw_panels(files: Sequence[Path], picture: Path) -> None:
    """Draw the first stage of the network of the package for a few images, as `subquad visualize` does."""
    from .common.images import open_image
    from .engine.drawing import subjects, visualization
    subject = subjects.load(PRETRAINED)
    images = [(file, subject.transform(open_image(file))) for file in files]
    visualization.visualize(picture, subject, images, visualization.Wish(layers=['stages.0']))
    print(f'drew {picture}', flush=True)
