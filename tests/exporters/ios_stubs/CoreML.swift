// What CoreML.swift uses of Core ML. A model returns the outputs in `stubOutputs`, and has the metadata in `stubMetadata`.
import CoreGraphics

nonisolated(unsafe) public var stubOutputs: [String: MLFeatureValue] = [:]
nonisolated(unsafe) public var stubMetadata = ""

public struct MLModelMetadataKey: Hashable { public static let creatorDefinedKey = MLModelMetadataKey() }
public final class MLImageConstraint {}
public final class MLFeatureDescription { public let imageConstraint: MLImageConstraint? = MLImageConstraint() }
public final class MLModelDescription {
    public var metadata: [MLModelMetadataKey: Any] { [.creatorDefinedKey: ["subquad": stubMetadata]] }
    public let inputDescriptionsByName = ["image": MLFeatureDescription()]
}
public final class MLMultiArray {
    let values: [Double]
    public init(_ values: [Double]) { self.values = values }
}
public protocol MLShapedArrayScalar { init(stub: Double) }
extension Float: MLShapedArrayScalar { public init(stub: Double) { self = Float(stub) } }
extension Int32: MLShapedArrayScalar { public init(stub: Double) { self = Int32(stub) } }
public struct MLShapedArray<Scalar: MLShapedArrayScalar> {
    public let scalars: [Scalar]
    public init(converting array: MLMultiArray) { scalars = array.values.map(Scalar.init(stub:)) }
}
public final class MLFeatureValue {
    public struct ImageOption: Hashable {}
    public let stringValue: String, multiArrayValue: MLMultiArray?
    public init(string: String) { (stringValue, multiArrayValue) = (string, nil) }
    public init(multiArray: MLMultiArray) { (stringValue, multiArrayValue) = ("", multiArray) }
    public init(cgImage: CGImage, constraint: MLImageConstraint, options: [ImageOption: Any]?) throws {
        (stringValue, multiArrayValue) = ("", nil)
    }
}
public protocol MLFeatureProvider { func featureValue(for name: String) -> MLFeatureValue? }
public final class MLDictionaryFeatureProvider: MLFeatureProvider {
    let values: [String: Any]
    public init(dictionary: [String: Any]) throws { values = dictionary }
    public func featureValue(for name: String) -> MLFeatureValue? { values[name] as? MLFeatureValue }
}
public final class MLModel {
    public let modelDescription = MLModelDescription()
    public init(contentsOf url: URL) throws {}
    public func prediction(from input: MLFeatureProvider) throws -> MLFeatureProvider {
        precondition(input.featureValue(for: "image") != nil)
        return try MLDictionaryFeatureProvider(dictionary: stubOutputs)
    }
}
