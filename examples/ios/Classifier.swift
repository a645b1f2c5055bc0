// Core ML is part of iOS 16 and macOS 13. This program was not compiled or run. Rename the package to
// Model.mlpackage and add it to the Xcode project, which compiles it to Model.mlmodelc.
import CoreGraphics
import CoreML
import Foundation

struct Metadata: Decodable {
    struct Input: Decodable { let name: String, shape: [Int] }
    struct Output: Decodable { let name: String }
    struct Resize: Decodable { let size: Int }
    struct Preprocessing: Decodable {
        let resize: Resize, crop: [Int], scale: Float, mean: [Float], std: [Float], normalize_in_graph: Bool
    }
    let input: Input, outputs: [Output], preprocessing: Preprocessing, labels: [String]
}

/// Resize the shorter side, crop the center and normalize: planes of red, green and blue.
func prepare(_ picture: CGImage, _ steps: Metadata.Preprocessing) -> [Float] {
    let (height, width) = (steps.crop[0], steps.crop[1])
    let factor = CGFloat(steps.resize.size) / CGFloat(min(picture.width, picture.height))
    let size = CGSize(width: CGFloat(picture.width) * factor, height: CGFloat(picture.height) * factor)
    var bytes = [UInt8](repeating: 0, count: 4 * width * height)
    bytes.withUnsafeMutableBytes { buffer in
        let context = CGContext(data: buffer.baseAddress, width: width, height: height, bitsPerComponent: 8,
                                bytesPerRow: 4 * width, space: CGColorSpace(name: CGColorSpace.sRGB)!,
                                bitmapInfo: CGImageAlphaInfo.noneSkipLast.rawValue)!
        context.interpolationQuality = .high
        context.draw(picture, in: CGRect(x: (CGFloat(width) - size.width) / 2, y: (CGFloat(height) - size.height) / 2,
                                         width: size.width, height: size.height))
    }
    return (0..<3).flatMap { channel in
        (0..<width * height).map { n in
            let value = Float(bytes[4 * n + channel])
            return steps.normalize_in_graph ? value : (value * steps.scale - steps.mean[channel]) / steps.std[channel]
        }
    }
}

/// Return the label of the largest logit.
func classify(_ picture: CGImage) throws -> String {
    let model = try MLModel(contentsOf: Bundle.main.url(forResource: "Model", withExtension: "mlmodelc")!)
    let entries = model.modelDescription.metadata[.creatorDefinedKey] as! [String: String]
    let metadata = try JSONDecoder().decode(Metadata.self, from: Data(entries["subquad"]!.utf8))
    let pixels = MLShapedArray<Float>(scalars: prepare(picture, metadata.preprocessing), shape: metadata.input.shape)
    let input = try MLDictionaryFeatureProvider(
        dictionary: [metadata.input.name: MLFeatureValue(shapedArray: pixels)])
    let output = try model.prediction(from: input).featureValue(for: metadata.outputs[0].name)!
    let logits = MLShapedArray<Float>(converting: output.multiArrayValue!).scalars
    let best = logits.indices.max { logits[$0] < logits[$1] }!
    return metadata.labels.isEmpty ? String(best) : metadata.labels[best]
}
