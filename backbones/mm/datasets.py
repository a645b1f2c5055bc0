"""MMSegmentation data set for the images of `subquad make-dataset shapes`."""
from mmengine.registry import DATASETS
from mmseg.datasets import BaseSegDataset


@DATASETS.register_module()
class ShapesDataset(BaseSegDataset):
    """Colored shapes on photographs, with images `*.jpg` and label maps `*.png`.

    Label 0 is the background and counts as a class.

    Args:
        kwargs: arguments of BaseSegDataset: data_root, data_prefix=dict(img_path=..., seg_map_path=...), pipeline, ...
    """

    METAINFO = dict(classes=('background', 'circle', 'ring', 'triangle', 'square', 'star'),
                    palette=[[0, 0, 0], [228, 26, 28], [77, 175, 74], [55, 126, 184], [255, 217, 47], [231, 41, 138]])
