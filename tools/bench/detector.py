"""Time and memory of a detector or segmenter on one image, and the share of its backbone."""
from typing import Any, Dict, Tuple

import torch
from mmengine.registry import MODELS, init_default_scope
from mmengine.structures import BaseDataElement

from ..engine.building import build
from ..engine.config import load
from .measure import peak_memory, time_interleaved
from .records import figure


def detector(repeats: int, *, config: str, size: Tuple[int, int]) -> Dict[str, Any]:
    """Inference on one image of random weights: a Mask R-CNN then has its full 1000 proposals and 100 masks or none,
    which is said.

    Args:
        repeats: rounds of timing.
        config: name of a detection config.
        size: image height and width in pixels.
    """
    settings = load(config)
    init_default_scope(settings.default_scope)
    torch.manual_seed(0)
    # All of what the heads propose counts, as it would after training.
    settings.merge_from_dict({'model.test_cfg.rcnn.score_thr': 0.0})
    model = build(MODELS, settings.model, 'model').eval()

    def call(height: int, width: int) -> Tuple[Any, torch.Tensor]:
        batch = model.data_preprocessor(dict(inputs=[torch.zeros(3, height, width, dtype=torch.uint8)],
                                             data_samples=[_sample(height, width)]))
        image = torch.randn(batch['inputs'].shape)

        def run() -> BaseDataElement:
            with torch.no_grad():
                return model.predict(image, batch['data_samples'])[0]
        return run, image

    call(64, 64)[0]()                                     # lazy initialisation is not the model's memory
    run, image = call(*size)

    def backbone() -> Any:
        with torch.no_grad():
            return model.backbone(image)

    peaks = {'backbone': peak_memory(backbone), 'detector': peak_memory(run)}
    times = time_interleaved({'backbone': backbone, 'detector': run}, repeats)
    masks = len(run().pred_instances)
    return {'times_ms': times, 'peak_mb': peaks, 'floor': None, 'figures': [
        *(figure(f'peak memory, {name}', peak, 'MB') for name, peak in peaks.items()),
        figure("peak memory of the backbone alone over the detector's", peaks['backbone'] / peaks['detector'], 'x'),
        figure('objects with a mask', masks, '')]}


def _sample(height: int, width: int) -> BaseDataElement:
    from mmdet.structures import DetDataSample
    return DetDataSample(metainfo=dict(img_shape=(height, width), ori_shape=(height, width), scale_factor=(1., 1.)))
