package android.graphics

/** A bitmap that works: [colors] are ARGB. */
class Bitmap(val width: Int, val height: Int, private val colors: IntArray) {
    fun getPixels(pixels: IntArray, offset: Int, stride: Int, x: Int, y: Int, width: Int, height: Int) {
        for (line in 0 until height) {
            val start = (y + line) * this.width + x
            colors.copyInto(pixels, offset + line * stride, start, start + width)
        }
    }
}
