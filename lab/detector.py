"""Time and memory of a detector on one image, and the share of its backbone."""
from typing import Any, Dict, Tuple

import torch

from subquad.tools.bench.measure import peak_memory, time_interleaved
from subquad.tools.bench.metrics import metric, peak_memory_metrics


def detector(repeats: int, *, config: str, size: Tuple[int, int]) -> Dict[str, Any]:
    """Measure inference on one image with random weights.

    A Mask R-CNN with random weights proposes its full 1000 regions and 100 masks, or none; the record says how many.

    Args:
        repeats: Rounds of timing.
        config: Name of a detection config.
        size: Image height and width in pixels.
    """
    model = _build(config)

    def call(height: int, width: int) -> Tuple[Any, torch.Tensor]:
        batch = model.data_preprocessor(dict(inputs=[torch.zeros(3, height, width, dtype=torch.uint8)],
                                             data_samples=[_sample(height, width)]))
        image = torch.randn(batch['inputs'].shape)

        def run() -> Any:
            with torch.no_grad():
                return model.predict(image, batch['data_samples'])[0]
        return run, image

    call(64, 64)[0]()                                     # so that the memory of lazy initialization does not count
    run, image = call(*size)

    def backbone() -> Any:
        with torch.no_grad():
            return model.backbone(image)

    peaks = {'backbone': peak_memory(backbone), 'detector': peak_memory(run)}
    times = time_interleaved({'backbone': backbone, 'detector': run}, repeats)
    masks = len(run().pred_instances)
    return {'times_ms': times, 'peak_mb': peaks, 'floor': None, 'metrics': [
        *peak_memory_metrics(peaks),
        metric('peak memory of the backbone / whole detector', peaks['backbone'] / peaks['detector'], 'x'),
        metric('objects with a mask', masks, '')]}


def _build(config: str) -> Any:
    """The config's detector with random weights; every proposal counts, as it does after training."""
    from mmengine.registry import MODELS, init_default_scope

    from subquad.tools.engine.config import load
    from subquad.tools.engine.training.building import build
    settings = load(config)
    init_default_scope(settings.default_scope)
    torch.manual_seed(0)
    settings.merge_from_dict({'model.test_cfg.rcnn.score_thr': 0.0})
    return build(MODELS, settings.model, 'model').eval()


def _sample(height: int, width: int) -> Any:
    from mmdet.structures import DetDataSample
    return DetDataSample(metainfo=dict(img_shape=(height, width), ori_shape=(height, width), scale_factor=(1., 1.)))
