// Preparation of a picture for a model, shared by the programs of this folder: the steps of examples/export/pictures.py
// with the same arithmetic. The bitmap must be opaque, with the configuration ARGB_8888.
import android.graphics.Bitmap
import org.json.JSONArray
import org.json.JSONObject
import kotlin.math.abs
import kotlin.math.floor
import kotlin.math.max
import kotlin.math.min
import kotlin.math.round

/** What a model takes, in its layout. [width] and [height] are the size of the resized picture in it. */
class Input(val values: FloatArray, val width: Int, val height: Int)

private class Plane(val width: Int, val height: Int, val pixels: IntArray) {
    fun transposed() = Plane(height, width, IntArray(pixels.size) { pixels[it % height * width + it / height] })
}

/** Resize, crop, normalize and pad a picture as the metadata says. */
fun prepare(picture: Bitmap, metadata: JSONObject): Input {
    val steps = metadata.getJSONObject("preprocessing")
    val input = metadata.getJSONObject("input")
    var planes = split(picture, input.getString("color"))
    steps.optJSONObject("resize")?.let { resize -> planes = planes.map { resized(it, resize) } }
    val (width, height) = Pair(planes[0].width, planes[0].height)
    steps.optJSONArray("crop")?.let { crop -> planes = planes.map { cropped(it, crop.getInt(1), crop.getInt(0)) } }

    val pad = steps.optJSONObject("pad")
    val rows = pad?.getJSONArray("to")?.getInt(0) ?: planes[0].height
    val columns = pad?.getJSONArray("to")?.getInt(1) ?: planes[0].width
    val values = FloatArray(planes.size * rows * columns)
    val last = input.getString("layout") == "NHWC"                  // channels beside each other, not planes
    for ((channel, plane) in planes.withIndex()) {
        val (scale, mean, std) = if (steps.getBoolean("normalize_in_graph")) {
            Triple(input.getJSONArray("range").getDouble(1) / 255, 0.0, 1.0)
        } else {
            Triple(steps.getDouble("scale"), steps.getJSONArray("mean").getDouble(channel),
                steps.getJSONArray("std").getDouble(channel))
        }
        val (start, step) = if (last) Pair(channel, planes.size) else Pair(channel * rows * columns, 1)
        pad?.let {
            val border = it.getJSONArray("value").getDouble(channel).toFloat()
            for (n in 0 until rows * columns) values[start + n * step] = border
        }
        for ((n, pixel) in plane.pixels.withIndex()) {
            val place = n / plane.width * columns + n % plane.width
            values[start + place * step] = ((pixel * scale - mean) / std).toFloat()
        }
    }
    return Input(values, width, height)
}

private fun split(picture: Bitmap, color: String): List<Plane> {
    val colors = IntArray(picture.width * picture.height)
    picture.getPixels(colors, 0, picture.width, 0, 0, picture.width, picture.height)
    fun plane(value: (Int) -> Int) = Plane(picture.width, picture.height, IntArray(colors.size) { value(colors[it]) })
    val red = { argb: Int -> argb shr 16 and 255 }
    val green = { argb: Int -> argb shr 8 and 255 }
    val blue = { argb: Int -> argb and 255 }
    return when (color) {
        "gray" -> listOf(plane { (red(it) * 19595 + green(it) * 38470 + blue(it) * 7471 + 32768) shr 16 })
        "BGR" -> listOf(plane(blue), plane(green), plane(red))
        else -> listOf(plane(red), plane(green), plane(blue))
    }
}

private fun resized(plane: Plane, resize: JSONObject): Plane {
    val (width, height) = resizedSize(plane.width, plane.height, resize)
    val filter = resize.getString("interpolation")
    return when {
        width == plane.width && height == plane.height -> plane
        resize.optBoolean("antialias", true) -> averagedLines(
            averagedLines(plane, width, filter).transposed(), height, filter).transposed()
        filter == "bilinear" -> resizedLikeOpenCv(plane, width, height)
        else -> error("this example cannot resize by OpenCV's $filter filter")
    }
}

/** Return the width and height to which [resize] of the metadata takes a picture. */
internal fun resizedSize(width: Int, height: Int, resize: JSONObject): Pair<Int, Int> {
    val size = resize.get("size")
    if (size !is JSONArray) {                                       // the shorter side
        val shorter = resize.getInt("size")
        val longer = (shorter.toLong() * max(width, height) / min(width, height)).toInt()
        return if (width <= height) Pair(shorter, longer) else Pair(longer, shorter)
    }
    if (!resize.getBoolean("keep_ratio")) return Pair(size.getInt(1), size.getInt(0))
    if (!resize.has("enlarge")) {                                   // a classifier's picture covers the size
        val ratio = min(height / size.getDouble(0), width / size.getDouble(1))
        return Pair(round(width / ratio).toInt(), round(height / ratio).toInt())
    }
    val fitting = min(size.getDouble(0) / height, size.getDouble(1) / width)
    val factor = if (resize.getBoolean("enlarge")) fitting else min(fitting, 1.0)
    return Pair(max(1, floor(width * factor + 0.5).toInt()), max(1, floor(height * factor + 0.5).toInt()))
}

/** Resize the lines of a plane to [width] pixels as Pillow does, which averages over all pixels. */
private fun averagedLines(plane: Plane, width: Int, filter: String): Plane {
    if (width == plane.width) return plane
    val scale = plane.width / width.toDouble()
    val stretch = max(scale, 1.0)
    val support = stretch * if (filter == "bicubic") 2 else 1
    val pixels = IntArray(width * plane.height)
    for (x in 0 until width) {
        val center = (x + 0.5) * scale
        val first = max(0, (center - support + 0.5).toInt())
        val end = min(plane.width, (center + support + 0.5).toInt())
        val raw = List(end - first) { weight((first + it - center + 0.5) / stretch, filter) }
        val sum = raw.sum()
        val weights = raw.map { it / sum * (1 shl 22) }.map { (if (it < 0) it - 0.5 else it + 0.5).toInt() }
        for (y in 0 until plane.height) {
            var mixed = 1 shl 21
            for ((k, weight) in weights.withIndex()) mixed += plane.pixels[y * plane.width + first + k] * weight
            pixels[y * width + x] = (mixed shr 22).coerceIn(0, 255)
        }
    }
    return Plane(width, plane.height, pixels)
}

private fun weight(distance: Double, filter: String): Double {
    val x = abs(distance)
    return when (filter) {
        "bilinear" -> max(0.0, 1 - x)
        "bicubic" -> if (x < 1) (1.5 * x - 2.5) * x * x + 1 else if (x < 2) ((2.5 - 0.5 * x) * x - 4) * x + 2 else 0.0
        else -> error("this example cannot resize by the $filter filter")
    }
}

/** Resize by two neighbors a side, with the integer arithmetic of OpenCV. */
private fun resizedLikeOpenCv(plane: Plane, width: Int, height: Int): Plane {
    val columns = List(width) { Neighbors(it, plane.width, width) }
    val lines = List(height) { Neighbors(it, plane.height, height) }
    fun fixed(weight: Double) = round(2048 * weight).toInt()
    val pixels = IntArray(width * height)
    for ((y, line) in lines.withIndex()) for ((x, column) in columns.withIndex()) {
        fun mixed(start: Int) = (plane.pixels[start + column.first] * fixed(1 - column.weight) +
            plane.pixels[start + column.second] * fixed(column.weight)) shr 4
        val above = mixed(line.first * plane.width) * fixed(1 - line.weight) shr 16
        val below = mixed(line.second * plane.width) * fixed(line.weight) shr 16
        pixels[y * width + x] = above + below + 2 shr 2
    }
    return Plane(width, height, pixels)
}

/** Both neighbors of pixel [n] of [to] on a side of [size] pixels, and the weight of the second. */
internal class Neighbors(n: Int, size: Int, to: Int, alignCorners: Boolean = false) {
    private val place = (if (alignCorners) n * ((size - 1) / max(to - 1, 1).toDouble())
        else (n + 0.5) * size / to - 0.5).toFloat()
    private val before = floor(place).toInt()
    val first = before.coerceIn(0, size - 1)                        // the pixels at the border repeat beyond it
    val second = (before + 1).coerceIn(0, size - 1)
    val weight = place.toDouble() - before
}

private fun cropped(plane: Plane, width: Int, height: Int): Plane {
    val (left, top) = Pair(margin(plane.width, width), margin(plane.height, height))
    return Plane(width, height, IntArray(width * height) {
        val (x, y) = Pair(it % width + left, it / width + top)
        if (x in 0 until plane.width && y in 0 until plane.height) plane.pixels[y * plane.width + x] else 0
    })
}

private fun margin(size: Int, crop: Int) =
    if (size >= crop) round((size - crop) / 2.0).toInt() else -((crop - size) / 2)
