// Run the example with a model whose outputs are given, as Main.kt of the stubs for Android does: a folder holds
// metadata.json, size.json and NAME.f32 for each output, with the highest byte first.
import CoreGraphics
import CoreML

let folder = URL(fileURLWithPath: CommandLine.arguments[1])
func read(_ name: String) -> Data { try! Data(contentsOf: folder.appendingPathComponent(name)) }
func json(_ name: String) -> Any { try! JSONSerialization.jsonObject(with: read(name)) }

stubMetadata = String(data: read("metadata.json"), encoding: .utf8)!
for file in try FileManager.default.contentsOfDirectory(atPath: folder.path) where file.hasSuffix(".f32") {
    let bytes = [UInt8](read(file))
    stubOutputs[String(file.dropLast(4))] = MLFeatureValue(multiArray: MLMultiArray(
        stride(from: 0, to: bytes.count, by: 4).map { n in
            Double(Float(bitPattern: (0..<4).reduce(UInt32(0)) { $0 << 8 | UInt32(bytes[n + $1]) }))
        }))
}
let size = json("size.json") as! [Int]
let picture = CGImage(width: size[0], height: size[1])
let model = try CoreMLModel(folder)
switch (json("metadata.json") as! [String: Any])["task"] as! String {
case "classification":
    print("\"\(try model.classify(picture))\"")
case "detection":
    print(try model.detect(picture).map { found -> [Any] in
        [found.label, found.score, found.box.minX, found.box.minY, found.box.maxX, found.box.maxY]
    })
default:
    print(try model.segment(picture))
}
