// Core ML is part of iOS 16 and macOS 13. Rename the package to Model.mlpackage and add it to the Xcode project, which
// compiles it to Model.mlmodelc. The program is for files whose input is an image. It resizes with Core Graphics, so that
// probabilities differ somewhat from those of the Python examples.
import CoreGraphics
import CoreML
import Foundation

struct Metadata: Decodable {
    enum Size: Decodable {
        case shorter(Int), sides(height: Int, width: Int)

        init(from decoder: Decoder) throws {
            let value = try decoder.singleValueContainer()
            if let side = try? value.decode(Int.self) {
                self = .shorter(side)
            } else {
                let sides = try value.decode([Int].self)
                self = .sides(height: sides[0], width: sides[1])
            }
        }
    }
    struct Input: Decodable { let name: String, shape: [Int] }
    struct Resize: Decodable { let size: Size, keep_ratio: Bool?, enlarge: Bool?, antialias: Bool? }
    struct Pad: Decodable { let value: [CGFloat] }
    struct Preprocessing: Decodable { let resize: Resize?, crop: [Int]?, pad: Pad? }
    struct Postprocessing: Decodable {
        let score_threshold: Float?, iou_threshold: Float?, candidates_per_class: Int?, max_detections: Int?
    }
    let input: Input, preprocessing: Preprocessing, postprocessing: Postprocessing?, labels: [String]
}

/// An object in a picture, with its box in the picture's pixels.
struct Detection { let label: String, score: Float, box: CGRect }

/// An exported model: try CoreMLModel().classify(picture). Keep it if it is used more than once.
final class CoreMLModel {
    private let model: MLModel
    private let metadata: Metadata

    init(_ file: URL = Bundle.main.url(forResource: "Model", withExtension: "mlmodelc")!) throws {
        model = try MLModel(contentsOf: file)
        let entries = model.modelDescription.metadata[.creatorDefinedKey] as! [String: String]
        metadata = try JSONDecoder().decode(Metadata.self, from: Data(entries["subquad"]!.utf8))
    }

    /// Return the likeliest label.
    func classify(_ picture: CGImage) throws -> String {
        let outputs = try run(prepare(picture, metadata).image)
        if let found = outputs.featureValue(for: "label") { return found.stringValue }
        let logits = floats("logits", of: outputs)                      // of a file without labels
        return label(logits.indices.max { logits[$0] < logits[$1] }!)
    }

    /// Return the objects with a score of at least `least`, the best first.
    func detect(_ picture: CGImage, least: Float = 0.3) throws -> [Detection] {
        let input = prepare(picture, metadata)
        let outputs = try run(input.image)
        let (boxes, scores) = (floats("boxes", of: outputs), floats("scores", of: outputs))
        let (x, y) = (CGFloat(picture.width) / input.size.width, CGFloat(picture.height) / input.size.height)
        return suppress(boxes, scores, metadata.postprocessing!).filter { $0.score >= least }.map { found in
            let corner = (0..<4).map { n in         // of the picture's part of the input
                min(max(CGFloat(boxes[4 * found.box + n]), 0), n % 2 == 0 ? input.size.width : input.size.height)
            }
            return Detection(label: label(found.label), score: found.score,
                             box: CGRect(x: corner[0] * x, y: corner[1] * y,
                                         width: (corner[2] - corner[0]) * x, height: (corner[3] - corner[1]) * y))
        }
    }

    /// Return the class of each pixel of the picture, line by line: indices of the metadata's labels.
    func segment(_ picture: CGImage) throws -> [Int] {
        let input = prepare(picture, metadata)
        let output = try run(input.image).featureValue(for: "labels")!.multiArrayValue!
        let labels = MLShapedArray<Int32>(converting: output).scalars   // of the model's input, which may be padded
        return (0..<picture.height).flatMap { y in
            (0..<picture.width).map { x in
                let column = Int((CGFloat(x) + 0.5) * input.size.width / CGFloat(picture.width))
                let line = Int((CGFloat(y) + 0.5) * input.size.height / CGFloat(picture.height))
                return Int(labels[line * self.metadata.input.shape[3] + column])
            }
        }
    }

    private func label(_ n: Int) -> String { metadata.labels.isEmpty ? String(n) : metadata.labels[n] }

    private func run(_ image: CGImage) throws -> MLFeatureProvider {
        let name = metadata.input.name
        let constraint = model.modelDescription.inputDescriptionsByName[name]!.imageConstraint!
        return try model.prediction(from: MLDictionaryFeatureProvider(
            dictionary: [name: MLFeatureValue(cgImage: image, constraint: constraint, options: nil)]))
    }

    private func floats(_ name: String, of outputs: MLFeatureProvider) -> [Float] {
        MLShapedArray<Float>(converting: outputs.featureValue(for: name)!.multiArrayValue!).scalars
    }
}

/// Resize, crop and pad: the image for the model, and the size of the resized picture in it. The model normalizes.
func prepare(_ picture: CGImage, _ metadata: Metadata) -> (image: CGImage, size: CGSize) {
    let steps = metadata.preprocessing
    let size = resizedSize(CGSize(width: picture.width, height: picture.height), steps.resize)
    let (height, width) = (metadata.input.shape[2], metadata.input.shape[3])
    let context = CGContext(data: nil, width: width, height: height, bitsPerComponent: 8, bytesPerRow: 4 * width,
                            space: CGColorSpace(name: CGColorSpace.sRGB)!,
                            bitmapInfo: CGImageAlphaInfo.noneSkipLast.rawValue)!
    if let pad = steps.pad?.value {
        context.setFillColor(CGColor(srgbRed: pad[0] / 255, green: pad[1] / 255, blue: pad[2] / 255, alpha: 1))
        context.fill(CGRect(x: 0, y: 0, width: width, height: height))
    }
    // A crop takes the center; other pictures begin at the top left, which is (0, height) in Core Graphics.
    let origin = steps.crop == nil ? CGPoint(x: 0, y: CGFloat(height) - size.height)
        : CGPoint(x: (CGFloat(width) - size.width) / 2, y: (CGFloat(height) - size.height) / 2)
    context.interpolationQuality = steps.resize?.antialias ?? true ? .high : .low
    context.draw(picture, in: CGRect(origin: origin, size: size))
    return (context.makeImage()!, size)
}

/// Return the size to which `resize` of the metadata takes a picture.
func resizedSize(_ size: CGSize, _ resize: Metadata.Resize?) -> CGSize {
    guard let resize else { return size }
    var factor: CGFloat
    switch resize.size {
    case .shorter(let side):
        factor = CGFloat(side) / min(size.width, size.height)
    case .sides(let height, let width):
        let factors = (CGFloat(width) / size.width, CGFloat(height) / size.height)
        if !(resize.keep_ratio ?? false) { return CGSize(width: width, height: height) }
        factor = max(factors.0, factors.1)                          // a classifier's picture covers the size
        if let enlarge = resize.enlarge {                           // others lie within the size
            factor = min(factors.0, factors.1, enlarge ? .infinity : 1)
        }
    }
    return CGSize(width: max(1, (size.width * factor).rounded()), height: max(1, (size.height * factor).rounded()))
}

/// Non-maximum suppression for each class: boxes (n, 4), scores (n, classes). Returns indices of boxes and classes.
func suppress(_ boxes: [Float], _ scores: [Float], _ settings: Metadata.Postprocessing)
    -> [(box: Int, label: Int, score: Float)] {
    let count = boxes.count / 4
    let classes = scores.count / count
    let chosen = (0..<classes).flatMap { label -> [(box: Int, label: Int, score: Float)] in
        let candidates = (0..<count).map { (box: $0, label: label, score: scores[$0 * classes + label]) }
            .filter { $0.score > settings.score_threshold! }
            .sorted { $0.score > $1.score }
            .prefix(settings.candidates_per_class!)
        var kept: [(box: Int, label: Int, score: Float)] = []
        for candidate in candidates
        where kept.allSatisfy({ overlap(boxes, $0.box, candidate.box) <= settings.iou_threshold! }) {
            kept.append(candidate)
        }
        return kept
    }
    return Array(chosen.sorted { $0.score > $1.score }.prefix(settings.max_detections!))
}

/// Return the intersection over union of two boxes.
func overlap(_ boxes: [Float], _ a: Int, _ b: Int) -> Float {
    func area(_ n: Int) -> Float { (boxes[4 * n + 2] - boxes[4 * n]) * (boxes[4 * n + 3] - boxes[4 * n + 1]) }
    func shared(_ at: Int) -> Float {
        max(0, min(boxes[4 * a + at + 2], boxes[4 * b + at + 2]) - max(boxes[4 * a + at], boxes[4 * b + at]))
    }
    let both = shared(0) * shared(1)
    return both / max(area(a) + area(b) - both, 1e-6)
}
