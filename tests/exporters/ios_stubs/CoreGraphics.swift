// What CoreML.swift uses of Core Graphics, without drawing: a picture has the name of a size only.
@_exported import Foundation

public struct CGImage {
    public let width: Int, height: Int
    public init(width: Int, height: Int) { (self.width, self.height) = (width, height) }
}
public struct CGColor { public init(srgbRed: CGFloat, green: CGFloat, blue: CGFloat, alpha: CGFloat) {} }
public struct CGColorSpace {
    public static let sRGB: NSString = ""
    public init?(name: NSString) {}
}
public enum CGImageAlphaInfo: UInt32 { case noneSkipLast = 5 }
public enum CGInterpolationQuality { case low, high }
public final class CGContext {
    public var interpolationQuality = CGInterpolationQuality.low
    let width: Int, height: Int
    public init?(data: UnsafeMutableRawPointer?, width: Int, height: Int, bitsPerComponent: Int, bytesPerRow: Int,
                 space: CGColorSpace, bitmapInfo: UInt32) { (self.width, self.height) = (width, height) }
    public func setFillColor(_ color: CGColor) {}
    public func fill(_ rect: CGRect) {}
    public func draw(_ image: CGImage, in rect: CGRect) {}
    public func makeImage() -> CGImage? { CGImage(width: width, height: height) }
}
