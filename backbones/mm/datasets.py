"""The data set of `subquad make-dataset shapes` for MMSegmentation."""
from mmengine.registry import DATASETS
from mmseg.datasets import BaseSegDataset


@DATASETS.register_module()
class ShapesDataset(BaseSegDataset):
    """Coloured shapes on photographs: images `*.jpg`, label maps `*.png`. Label 0, the background, is a class like the
    others.

    Args:
        kwargs: of BaseSegDataset: data_root, data_prefix=dict(img_path=..., seg_map_path=...), pipeline, ...
    """

    METAINFO = dict(classes=('background', 'circle', 'ring', 'triangle', 'square', 'star'),
                    palette=[[0, 0, 0], [228, 26, 28], [77, 175, 74], [55, 126, 184], [255, 217, 47], [231, 41, 138]])
