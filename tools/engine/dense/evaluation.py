"""Test a detector or segmenter: metrics of its config's evaluator, and pictures."""
import tempfile
from pathlib import Path
from typing import Any, Dict, Optional, Sequence, Union

from mmengine.config import Config, ConfigDict
from mmengine.hooks import Hook
from mmengine.model import BaseModel

from ....backbones.mm.checkpoints import load_checkpoint
from ...common.cli import UserError, quiet, weight_errors
from ...common.paths import writable_folder
from ..training.building import close_log, made
from ..training.runner import build_runner
from .overlays import draw_sample
from .photographs import pixels
from .prediction import PictureNames, palette_of
from .task import classes_of, network_options


class PicturesHook(Hook):
    """Writes each test image with its predictions into a folder, beside its annotations if the pipeline loads them."""

    def __init__(self, folder: Path):
        self.folder, self.names = folder, PictureNames()

    def after_test_iter(self, runner, batch_idx: int, data_batch: Any = None,
                        outputs: Optional[Sequence[Any]] = None) -> None:
        for sample in outputs or ():
            image = pixels(sample.img_path, sample.ori_shape)
            path = self.folder / self.names(Path(sample.img_path))
            dataset = runner.cfg.test_dataloader.dataset
            draw_sample(image, sample.cpu(), classes_of(dataset), palette_of(dataset), 0.3, annotations=True).save(path)


def evaluate(config: Config, checkpoint: Union[str, BaseModel], show_dir: Optional[str] = None, tta: bool = False,
             allow_nonfinite: bool = False) -> Dict[str, float]:
    """Compute the metrics of a checkpoint on the config's test data, as the evaluator names and scales them.

    `checkpoint` is a file, the name of published weights, or a model in place of the config's; `show_dir` an empty
    folder for pictures; `tta` tests with the config's `tta_model` and `tta_pipeline`.
    """
    if tta:
        if 'tta_model' not in config or 'tta_pipeline' not in config:
            raise UserError('--tta: the config has no tta_model and tta_pipeline')
        config = Config(config.to_dict())
        config.test_dataloader.dataset.pipeline = config.tta_pipeline
        config.model = ConfigDict(**config.tta_model, module=config.model)
    hooks = []
    if show_dir:
        if any(writable_folder(show_dir).iterdir()):
            raise UserError(f'--show-dir: {show_dir} is not empty; pictures could replace its files')
        hooks = [PicturesHook(writable_folder(show_dir))]
    with tempfile.TemporaryDirectory() as folder, quiet():
        runner = build_runner(config, folder, training=False, hooks=hooks)
        model = getattr(runner.model, 'module', runner.model)        # inside a distributed wrapper
        if isinstance(checkpoint, BaseModel):
            runner.model = checkpoint
        else:
            with weight_errors('; --allow-nonfinite tests it anyway'):
                load_checkpoint(getattr(model, 'module', model), checkpoint,
                                classes_of(config.test_dataloader.dataset), allow_nonfinite, network_options(config))
        made(lambda: runner.test_loop, 'test_evaluator')         # build it now, not after minutes
        metrics = runner.test()
        close_log(runner)
    return {name: float(value) for name, value in metrics.items()}
