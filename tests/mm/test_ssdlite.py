"""SSDLite of the MobileViTv2 authors in MMDetection, compared with formulas and files of the authors' library."""
import pytest
import torch
import torch.nn.functional as F
from cvnets_files import authors_file, encoder_entries, ssd_entries
from helpers import ROOT

pytest.importorskip('mmdet')

from mmdet.structures import DetDataSample
from mmengine.config import Config
from mmengine.registry import MODELS, DefaultScope
from mmengine.structures import InstanceData

from subquad.backbones.mm import cvnets
from subquad.backbones.mm.ssdlite import SSDLiteAnchorGenerator, SSDLiteBoxCoder, SSDLiteJointHead

CONFIGS = ROOT / 'configs'
WIDTHS = {'050': (2_035_395, 1_113_593, 130_944, 790_858), '075': (3_584_955, 2_481_009, 165_120, 938_826),
          '100': (5_608_883, 4_388_841, 199_296, 1_020_746), '125': (8_173_227, 6_837_089, 233_472, 1_102_666),
          '150': (11_277_987, 9_825_753, 267_648, 1_184_586), '175': (14_923_163, 13_354_833, 301_824, 1_266_506),
          '200': (19_108_755, 17_424_329, 336_000, 1_348_426)}        # total, encoder, extra layers, heads
# Width and height of the authors' anchors for each level, with six digits.
SIZES = [
    [(.1, .1), (.160728, .160728), (.141421, .070711), (.070711, .141421), (.173205, .057735), (.057735, .173205)],
    [(.258333,) * 2, (.328084,) * 2, (.365339, .182669), (.182669, .365339), (.447446, .149149), (.149149, .447446)],
    [(.416667,) * 2, (.489473,) * 2, (.589256, .294628), (.294628, .589256), (.721688, .240563), (.240563, .721688)],
    [(.575,) * 2, (.649359,) * 2, (.813173, .406586), (.406586, .813173), (.995929, .331976), (.331976, .995929)],
    [(.733333,) * 2, (.808634,) * 2, (1, .518545), (.518545, 1), (1, .423390), (.423390, 1)],
    [(.891667,) * 2, (.967600,) * 2, (1, .630504), (.630504, 1)]]
MAPS = [(20, 20), (10, 10), (5, 5), (3, 3), (2, 2), (1, 1)]


def build(cfg, library='mmdet'):
    with DefaultScope.overwrite_default_scope(library):
        return MODELS.build(cfg)


def config(width='100'):
    return Config.fromfile(CONFIGS / 'detection' / f'ssdlite_mobilevitv2-{width}_coco-320.py')


def small():
    """Build a detector of width 0.25 with three classes."""
    model = config().model
    model.backbone.arch, model.neck.in_channels = 'test', [96, 128]
    model.bbox_head.update(in_channels=[96, 128, 256, 128, 128, 64], num_classes=3)
    return build(model)


def batch(model, truths, size=(320, 320), training=True):
    """Return preprocessed random images with (boxes, labels).

    Their metadata say that they were resized to `size` from 4 x the height and 2 x the width.
    """
    meta = dict(img_shape=size, ori_shape=(size[0] * 4, size[1] * 2), scale_factor=(0.5, 0.25))
    samples = [DetDataSample(metainfo=meta, gt_instances=InstanceData(
        bboxes=torch.tensor(boxes).reshape(-1, 4), labels=torch.tensor(labels).long())) for boxes, labels in truths]
    inputs = [torch.randint(0, 256, (3, *size), dtype=torch.uint8) for _ in truths]
    return model.data_preprocessor(dict(inputs=inputs, data_samples=samples), training)


def authors_anchors(maps):
    """Return center x, center y, width and height as fractions; rows are ordered by level, y, x and anchor."""
    return torch.tensor([((x + .5) / width, (y + .5) / height, w, h) for (height, width), sizes in zip(maps, SIZES)
                         for y in range(height) for x in range(width) for w, h in sizes], dtype=torch.float64)


def corners(boxes):
    return torch.cat((boxes[..., :2] - boxes[..., 2:] / 2, boxes[..., :2] + boxes[..., 2:] / 2), -1)


def authors_boxes(anchors, t):
    center = anchors[:, :2] + 0.1 * t[:, :2] * anchors[:, 2:]
    return corners(torch.cat((center, anchors[:, 2:] * (0.2 * t[:, 2:]).exp()), 1))


def iou(a, b):
    """Return the pairwise IoU (N, M) of boxes (N, 4) and (M, 4)."""
    sides = torch.minimum(a[:, None, 2:], b[:, 2:]) - torch.maximum(a[:, None, :2], b[:, :2])
    both = sides.clamp(min=0).prod(-1)
    return both / ((a[:, 2:] - a[:, :2]).prod(-1)[:, None] + (b[:, 2:] - b[:, :2]).prod(-1) - both)


def authors_ssd(weights, l4, l5):
    """Compute the authors' extra layers and heads: maps at strides 16 and 32 -> rows (B, anchors, 85)."""
    def unit(name, x, stride=1, act=True):
        kernel = weights[f'{name}.block.conv.weight']
        x = F.conv2d(x, kernel, weights.get(f'{name}.block.conv.bias'), stride, kernel.shape[-1] // 2,
                     groups=x.shape[1] // kernel.shape[1])
        norm = [weights.get(f'{name}.block.norm.{part}') for part in ('running_mean', 'running_var', 'weight', 'bias')]
        x = x if norm[0] is None else F.batch_norm(x, *norm, eps=1e-5)
        return F.relu(x) if act else x

    levels = [l4, l5]
    for level in (64, 128, 256):
        x = unit(f'extra_layers.os_{level}.dw_conv', levels[-1], 2, act=False)
        levels.append(unit(f'extra_layers.os_{level}.pw_conv', x))
    levels.append(unit('extra_layers.os_-1.1', levels[-1].mean((2, 3), keepdim=True)))
    rows = []
    for level, x in enumerate(levels):
        for part in ('proj_layer', 'loc_cls_layer.dw_conv', 'loc_cls_layer.pw_conv', 'loc_cls_layer'):
            if f'ssd_heads.{level}.{part}.block.conv.weight' in weights:
                x = unit(f'ssd_heads.{level}.{part}', x, act=part == 'proj_layer')
        rows.append(x.permute(0, 2, 3, 1).reshape(len(x), -1, 85))
    return torch.cat(rows, 1)


def rows_of(scores, codes, classes=80):
    """Convert the outputs of the head to the authors' rows: box, background, classes."""
    scores, codes = (torch.cat([m.permute(0, 2, 3, 1).reshape(len(m), -1, width) for m in maps], 1)
                     for maps, width in ((scores, classes + 1), (codes, 4)))
    return torch.cat((codes, scores[..., classes:], scores[..., :classes]), -1)


@pytest.mark.parametrize('width', WIDTHS)
def test_parameter_counts_are_the_authors(width):
    with torch.device('meta'):
        model = build(config(width).model)
    parts = (model, model.backbone, model.neck, model.bbox_head)
    assert tuple(sum(p.numel() for p in part.parameters()) for part in parts) == WIDTHS[width]


@pytest.mark.parametrize('width', ['050', '100'])
def test_authors_ssdlite_file_loads_and_computes_the_same(width):
    scale = int(width) / 100
    weights = authors_file(encoder_entries(scale), ssd_entries(scale))
    assert len(weights) == (352 if width == '050' else 358)
    model = build(config(width).model).eval()
    translated = cvnets.translate(weights, model)
    assert translated.keys() == model.state_dict().keys() and model.load_state_dict(translated)
    encoder = [value for key, value in weights.items() if key.startswith('encoder.')]
    own = list(model.backbone.state_dict().values())                    # in the same order
    assert len(encoder) == len(own) == 267 and all(torch.equal(a, b) for a, b in zip(encoder, own))
    for value in model.state_dict().values():
        value.zero_()
    model.load_state_dict(weights)                       # every way of loading accepts the authors' keys
    assert all(torch.equal(value, translated[key]) for key, value in model.state_dict().items())
    torch.manual_seed(1)
    l4, l5 = (torch.randn(2, int(c * scale), n, n) for c, n in ((384, 20), (512, 10)))
    ours, theirs = rows_of(*model.bbox_head(model.neck((l4, l5)))), authors_ssd(weights, l4, l5)
    assert ours.shape == (2, 3232, 85) and theirs.std() > 0.01
    torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-4)


def test_joint_layer_has_the_authors_channel_order():
    head = SSDLiteJointHead(num_classes=3).eval()
    for last in (getattr(level.joint, 'pointwise_conv', level.joint).conv for level in head.levels):
        last.weight.data.zero_()
        last.bias.data = torch.arange(len(last.bias)).float()
    scores, codes = head([torch.rand(1, c, 2, 2) for c in head.in_channels])
    for anchors, score, code in zip(head.num_base_priors, scores, codes):
        first = 8 * torch.arange(anchors).float()                         # 4 of the box, background, 3 classes
        assert torch.equal(code[0, :, 1, 0].reshape(anchors, 4), first[:, None] + torch.arange(4))
        assert torch.equal(score[0, :, 1, 0].reshape(anchors, 4), first[:, None] + torch.tensor([5, 6, 7, 4]))


def test_anchors_equal_the_authors():
    generator = SSDLiteAnchorGenerator()
    priors = generator.grid_priors(MAPS, (320, 320))
    assert [len(level) for level in priors] == [2400, 600, 150, 54, 24, 4] and priors[0].dtype == torch.float32
    fractions = torch.cat([generator.fractions(size, level) for level, size in enumerate(MAPS)])
    torch.testing.assert_close(fractions, authors_anchors(MAPS), rtol=0, atol=6e-7)     # of a table with six digits
    torch.testing.assert_close(torch.cat(priors).double(), corners(fractions) * 320, rtol=0, atol=1e-4)
    maps = [(20, 16), (10, 8), (5, 4), (3, 2), (2, 1), (1, 1)]
    wide = torch.cat(generator.grid_priors(maps, (320, 256))) / torch.tensor([256, 320, 256, 320])
    torch.testing.assert_close(wide.double(), corners(authors_anchors(maps)), rtol=0, atol=1e-6)


def test_box_coder_equals_the_authors():
    coder = SSDLiteBoxCoder()
    anchors = authors_anchors(MAPS)[::50]
    torch.manual_seed(0)
    t = torch.randn(len(anchors), 4, dtype=torch.float64) * 3
    t[0, 2:] = 40.                                                        # MMDetection's coder stops at 20.7
    expected = authors_boxes(anchors, t)
    torch.testing.assert_close(coder.decode(corners(anchors), t), expected)
    torch.testing.assert_close(coder.decode(corners(anchors), t, max_shape=(0.5, 0.25)), torch.stack(
        [expected[:, n].clamp(0, (0.25, 0.5)[n % 2]) for n in range(4)], 1))
    torch.testing.assert_close(coder.encode(corners(anchors), expected).double(), t, rtol=1e-3, atol=1e-3)


def authors_loss(rows, truths):
    """Compute the authors' multibox loss of rows (B, anchors, 85); truths are boxes as fractions and labels from 0."""
    anchors, positives, total = authors_anchors(MAPS), 0, 0.
    for row, (boxes, labels) in zip(rows, truths):
        classes, targets = torch.zeros(len(anchors)).long(), torch.zeros(len(anchors), 4, dtype=torch.float64)
        if len(labels):
            overlap = iou(boxes, corners(anchors))
            best, index = overlap.max(0)
            for box, anchor in enumerate(overlap.argmax(1)):
                best[anchor], index[anchor] = 2, box
            classes = torch.where(best >= 0.5, labels[index] + 1, 0)
            near = boxes[index]
            targets[:, :2] = ((near[:, :2] + near[:, 2:]) / 2 - anchors[:, :2]) / anchors[:, 2:] / 0.1
            targets[:, 2:] = ((near[:, 2:] - near[:, :2]) / anchors[:, 2:]).log() / 0.2
        positive = classes > 0
        positives += int(positive.sum())
        cost = F.cross_entropy(row[:, 4:], classes, reduction='none')
        hardest = cost[~positive].sort(descending=True)[0][:3 * int(positive.sum())]
        total += cost[positive].sum() + hardest.sum()
        total += F.smooth_l1_loss(row[positive, :4], targets[positive], reduction='sum')
    return total / max(positives, 1)


def test_loss_equals_the_authors():
    head = build({**config().model.bbox_head, 'train_cfg': config().model.train_cfg})
    torch.manual_seed(0)
    scores, codes = ([torch.randn(3, a * n, *size, dtype=torch.float64) for a, size in zip(head.num_base_priors, MAPS)]
                     for n in (81, 4))
    truths = [(torch.tensor([[30., 40, 120, 200], [35, 45, 125, 190], [203, 5, 238, 62]]), torch.tensor([0, 79, 5])),
              (torch.zeros(0, 4), torch.zeros(0).long()), (torch.tensor([[0., 0, 320, 320]]), torch.tensor([17]))]
    meta = dict(batch_input_shape=(320, 320), pad_shape=(320, 320), img_shape=(320, 320))
    losses = head.loss_by_feat(scores, codes, [InstanceData(bboxes=b, labels=n) for b, n in truths], [meta] * 3)
    expected = authors_loss(rows_of(scores, codes), [(b.double() / 320, n) for b, n in truths])
    torch.testing.assert_close(sum(sum(part).sum() for part in losses.values()), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize('truths,size', [([([[9., 30, 90, 99]], [2]), ([], [])], (192, 192)), ([([], [])], (320, 320))])
def test_training_step_has_finite_gradients(truths, size):
    model = small().train()
    model.init_weights()
    losses, _ = model.parse_losses(model(**batch(model, truths, size), mode='loss'))
    losses.backward()
    assert losses.isfinite() and (losses > 0) == (len(truths) > 1)
    assert [name for name, p in model.named_parameters() if p.grad is None or not p.grad.isfinite().all()] == []


@pytest.mark.parametrize('size, maps', [((288, 288), (18, 10, 5, 3, 2, 1)), ((384, 256), (24, 12, 6, 3, 2, 1))])
def test_detection_at_other_image_sizes(size, maps):
    model = small().eval()
    data = batch(model, [([], [])] * 2, size, training=False)
    with torch.no_grad():
        assert [level.shape[2] for level in model.extract_feat(data['inputs'])] == list(maps)
        for sample in model(**data, mode='predict'):
            found = sample.pred_instances
            assert 0 < len(found) <= 200 and found.bboxes.shape == (len(found), 4)
            inside = found.bboxes.clamp(min=0).minimum(torch.tensor([size[1] * 2., size[0] * 4] * 2))
            torch.testing.assert_close(found.bboxes, inside)


def authors_detections(rows):
    """Compute the authors' detections: per class the 400 best above 0.01 after NMS, then the 200 best overall."""
    boxes, found = authors_boxes(authors_anchors(MAPS), rows[:, :4]), []
    for label, scores in enumerate(rows[:, 4:].softmax(-1).T[1:]):
        score, order = scores.sort(descending=True)
        order = order[score > 0.01][:400]
        while len(order):
            found.append((float(scores[order[0]]), label, boxes[order[0]]))
            order = order[1:][iou(boxes[order[:1]], boxes[order[1:]])[0] <= 0.5]
    return zip(*sorted(found, key=lambda item: -item[0])[:200])


def test_detections_equal_the_authors():
    head = build({**config().model.bbox_head, 'num_classes': 5, 'test_cfg': config().model.test_cfg})
    torch.manual_seed(0)
    scores = [2 * torch.randn(2, a * 6, *size) for a, size in zip(head.num_base_priors, MAPS)]
    codes = [4 * torch.randn(2, a * 4, *size) for a, size in zip(head.num_base_priors, MAPS)]
    codes[5][1, 2], scores[5][1, 3] = 600., 99.                           # an infinite box, the best of its class
    metas = [dict(batch_input_shape=(320, 320), img_shape=(320, 320), scale_factor=(0.5, 0.25))] * 2
    results = head.predict_by_feat(scores, codes, batch_img_metas=metas, rescale=True)
    for found, rows in zip(results, rows_of(scores, codes, 5).double()):
        assert len(found) == 200 and ((rows[:, 5:].softmax(-1) > 0.01).sum(0) > 400).all()
        score, label, box = authors_detections(rows)
        torch.testing.assert_close(found.scores.tolist(), list(score), rtol=1e-4, atol=1e-6)
        expected = torch.stack(box).clamp(0, 1) * torch.tensor([640., 1280, 640, 1280])
        apart = (found.bboxes[:, None] - expected).abs().amax(-1) + 1e4 * (found.labels[:, None] != torch.tensor(label))
        # All are found, but scores that are equal in float32 may change places.
        assert (apart.amin(0) < 0.02).all() and apart.argmin(0).sort()[0].tolist() == list(range(200))
    assert found.labels[0] == 3 and found.bboxes[0, ::2].tolist() == [0, 640]
    candidates, _ = head.predict_by_feat(scores, codes, batch_img_metas=metas, with_nms=False)
    assert (candidates.labels.bincount() == 400).all()
    head.test_cfg.update(score_thr=1.0)
    assert len(head.predict_by_feat(scores, codes, batch_img_metas=metas)[0]) == 0


def test_nms_keeps_classes_apart_outside_the_image():
    head = build({**config().model.bbox_head, 'num_classes': 2, 'test_cfg': config().model.test_cfg})
    maps = list(zip(head.num_base_priors, [(1, 2), *[(1, 1)] * 5]))
    scores = [torch.tensor([0., 0, 99]).repeat(a)[:, None, None].repeat(1, 1, *size) for a, size in maps]
    codes = [torch.zeros(1, 4 * a, *size) for a, size in maps]
    # The small anchors of two cells: class-wise NMS would move the second class by 1457 pixels, onto the first.
    scores[0][0, :3, 0] = torch.tensor([[99., 0], [0, 99], [0, 0]])
    codes[0][0, :2, 0] = torch.tensor([[400, -105.3125], [400, -55.3125]])
    found, = head.predict_by_feat(scores, codes, batch_img_metas=[dict(pad_shape=(320, 320), img_shape=(320, 320))])
    assert sorted(found.labels.tolist()) == [0, 1]


def test_translation_keeps_other_files_and_unknown_keys():
    model = small()
    state, weights = model.state_dict(), authors_file(encoder_entries(0.25), [('ssd_heads.0.other', (2,))])
    assert cvnets.translate(state, model) is state and 'ssd_heads.0.other' in cvnets.translate(weights, model)
    model.backbone = torch.nn.Identity()
    assert cvnets.translate(weights, model) is weights


def test_levels_that_do_not_fit_the_anchors_are_refused():
    with pytest.raises(ValueError, match='must have 6 entries, one for each level of anchors'):
        SSDLiteJointHead(in_channels=(512, 256))
    with pytest.raises(ValueError, match='shorter'):
        SSDLiteJointHead()([torch.rand(1, 512, 4, 4)])
