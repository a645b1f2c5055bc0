"""Export forms of detectors and segmenters: the whole network as one module from an image to tensors."""
from typing import Any, Dict, Sequence, Tuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._higher_order_ops import while_loop

Size = Tuple[int, int]


class Maps(nn.Module):
    """Backbone and neck of a detector or segmenter: images (B, C, H, W) -> tuple of feature maps."""

    def __init__(self, model: nn.Module):
        super().__init__()
        self.backbone = model.backbone
        self.neck = getattr(model, 'neck', None) or nn.Identity()

    def forward(self, images: Tensor) -> Tuple[Tensor, ...]:
        return tuple(self.neck(self.backbone(images)))


class RawDetector(nn.Module):
    """SSDLite without NMS: images (B, C, H, W) -> boxes (B, N, 4), scores (B, N, classes).

    Boxes are x1, y1, x2, y2 in pixels of the input, not clipped to it. Scores are probabilities; the background has no
    column. The anchors are constants, so the size of the images is fixed. Rows have the order of the head's own
    prediction: levels, y, x and anchors.
    """

    def __init__(self, model: nn.Module, size: Size):
        super().__init__()
        self.maps, self.levels = Maps(model), model.bbox_head.levels
        head = model.bbox_head
        self.classes = head.num_classes
        with torch.no_grad():
            shapes = [y.shape[-2:] for y in self.maps(torch.zeros(1, model.backbone.in_chans, *size))]
        anchors = torch.cat(head.prior_generator.grid_priors(shapes, size, dtype=torch.float64))
        centers, extents = (anchors[:, :2] + anchors[:, 2:]) / 2, anchors[:, 2:] - anchors[:, :2]
        means, stds = (torch.tensor(values, dtype=torch.float64) for values in (head.bbox_coder.means,
                                                                                head.bbox_coder.stds))
        # center + (code * std + mean) * extent, and extent / 2 * exp(code * std + mean)
        for name, values in (('centers', centers + means[:2] * extents), ('steps', stds[:2] * extents),
                             ('halves', extents / 2 * means[2:].exp()), ('rates', stds[2:].expand(1, 2))):
            self.register_buffer(name, values.float()[None])

    def forward(self, images: Tensor) -> Tuple[Tensor, Tensor]:
        width = 5 + self.classes
        rows = torch.cat([level(features).permute(0, 2, 3, 1).reshape(images.shape[0], -1, width)
                          for level, features in zip(self.levels, self.maps(images))], 1)
        shifts, growths, logits = rows.split((2, 2, width - 4), -1)
        centers, halves = self.centers + shifts * self.steps, self.halves * (growths * self.rates).exp()
        return torch.cat((centers - halves, centers + halves), -1), logits.softmax(-1)[..., 1:]


class SelectingDetector(nn.Module):
    """A detector with non-maximum suppression: one image (1, C, H, W) -> boxes (n, 4), scores (n,), labels (n,), int64.

    Boxes are clipped to the image, and scores descend. The boxes and scores of `raw`, a `RawDetector`, follow. Each
    step takes the best box that is left, and removes those of its class that overlap it by more than the threshold.

    Args:
        raw: The detector without the selection.
        size: Height and width of the image.
        settings: The `postprocessing` of the metadata, see `onnx_graph.append_nms`.
    """

    def __init__(self, raw: nn.Module, size: Size, settings: Dict[str, Any]):
        super().__init__()
        self.raw, self.settings = raw, settings
        self.register_buffer('limit', torch.tensor([size[1], size[0]] * 2, dtype=torch.float32))

    def forward(self, images: Tensor) -> Tuple[Tensor, ...]:
        raw_boxes, raw_scores = self.raw(images)
        boxes, scores = raw_boxes[0], raw_scores[0].t()                                     # (N, 4), (classes, N)
        classes, count = scores.shape
        most = self.settings['max_detections']
        best = scores.topk(min(self.settings['candidates_per_class'], count), 1)
        scores = torch.zeros_like(scores).scatter(1, best.indices, best.values)
        areas = (boxes[:, 2:] - boxes[:, :2]).prod(1)

        def is_left(n: Tensor, left: Tensor, chosen: Tensor) -> Tensor:
            return (n < most) & (left.max() > self.settings['score_threshold'])

        def choose(n: Tensor, left: Tensor, chosen: Tensor) -> Tuple[Tensor, ...]:
            flat = left.flatten().argmax()
            label, index = flat // count, flat % count
            box = boxes.index_select(0, index[None])
            sides = boxes[:, 2:].minimum(box[:, 2:]) - boxes[:, :2].maximum(box[:, :2])
            common = sides.clamp(min=0).prod(1)
            overlap = common > self.settings['iou_threshold'] * (areas + areas.index_select(0, index[None]) - common)
            overlap |= torch.arange(count) == index
            left = left.masked_fill(overlap & (torch.arange(classes) == label)[:, None], 0)
            return n + 1, left, chosen.where(torch.arange(most) != n, flat)

        start = torch.zeros((), dtype=torch.int64), scores, torch.zeros(most, dtype=torch.int64)
        n, _, chosen = while_loop(is_left, choose, start)
        chosen = chosen[torch.arange(most) < n]
        return (boxes[chosen % count].clamp(min=0).minimum(self.limit), scores.flatten()[chosen], chosen // count,
                raw_boxes, raw_scores)


class ReferenceDetector(nn.Module):
    """The outputs of `RawDetector`, computed by the detector's own head, anchor generator and box coder."""

    def __init__(self, model: nn.Module, size: Size):
        super().__init__()
        self.model, self.size = model, size

    def forward(self, images: Tensor) -> Tuple[Tensor, Tensor]:
        head = self.model.bbox_head
        logits, codes = head(self.model.extract_feat(images))
        priors = torch.cat(head.prior_generator.grid_priors([y.shape[-2:] for y in logits], self.size))
        boxes = head.bbox_coder.decode(priors, _rows(codes, 4))
        return getattr(boxes, 'tensor', boxes), _rows(logits, head.cls_out_channels).softmax(-1)[..., :-1]


class Segmenter(nn.Module):
    """A segmenter: images (B, C, H, W) -> logits (B, classes, h, w) and, if asked for, labels (B, H, W), int64.

    The logits have the network's resolution. Labels are the classes of the largest logits after bilinear interpolation
    to `size`, that of the images, as in MMSegmentation.
    """

    def __init__(self, model: nn.Module, size: Size, labels: bool = True):
        super().__init__()
        self.maps, self.head = Maps(model), model.decode_head
        self.size, self.labels = tuple(size), labels

    def forward(self, images: Tensor) -> Tuple[Tensor, ...]:
        logits = self.head(self.maps(images))
        if not self.labels:
            return (logits,)
        resized = F.interpolate(logits, self.size, mode='bilinear', align_corners=self.head.align_corners)
        return logits, resized.argmax(1)


class MatrixPool(nn.Module):
    """Adaptive average pooling of maps of one size, (height, width), as a product with a matrix of averaging weights.

    Windows whose sizes differ have no counterpart in most runtimes.
    """

    def __init__(self, output_size: Size, size: Size):
        super().__init__()
        self.output_size = tuple(output_size)
        rows, columns = (_windows(cells, side) for cells, side in zip(output_size, size))
        self.register_buffer('weight', torch.kron(rows, columns).float())         # cells of the result x of the map

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x.flatten(2), self.weight).reshape(*x.shape[:2], *self.output_size)


def replace_pools(model: nn.Module, images: Tensor) -> None:
    """Replace the nn.AdaptiveAvgPool2d modules of a model by forms for maps of one size, that of `images`, in place.

    Global pooling is kept. Windows of equal sizes become nn.AvgPool2d, others `MatrixPool`.
    """
    sizes, handles = {}, []
    for module in model.modules():
        if isinstance(module, nn.AdaptiveAvgPool2d):
            handles.append(module.register_forward_pre_hook(
                lambda pool, args: sizes.__setitem__(pool, tuple(args[0].shape[-2:]))))
    try:
        with torch.no_grad():
            model(images)
    finally:
        for handle in handles:
            handle.remove()
    for parent in list(model.modules()):
        for name, pool in list(parent.named_children()):
            if pool in sizes:
                setattr(parent, name, _fixed_pool(pool, sizes[pool]))


def _fixed_pool(pool: nn.AdaptiveAvgPool2d, size: Size) -> nn.Module:
    given = pool.output_size if isinstance(pool.output_size, (tuple, list)) else (pool.output_size,) * 2
    cells = tuple(side if count is None else count for count, side in zip(given, size))
    if cells == (1, 1):
        return pool
    if all(side % count == 0 for count, side in zip(cells, size)):
        steps = tuple(side // count for count, side in zip(cells, size))
        return nn.AvgPool2d(steps, steps)
    return MatrixPool(cells, size)


def _windows(cells: int, side: int) -> Tensor:
    """Return the weights (cells, side), float64, of PyTorch's adaptive average pooling along one axis."""
    weights = torch.zeros(cells, side, dtype=torch.float64)
    for cell in range(cells):
        first, last = cell * side // cells, -(-(cell + 1) * side // cells)
        weights[cell, first:last] = 1 / (last - first)
    return weights


def _rows(levels: Sequence[Tensor], width: int) -> Tensor:
    """Reorder maps (B, A * width, H, W) of all levels to rows (B, anchors of all levels, width)."""
    return torch.cat([level.permute(0, 2, 3, 1).reshape(len(level), -1, width) for level in levels], 1)
