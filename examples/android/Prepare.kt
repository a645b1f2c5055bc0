// Preparation of a picture, shared by the programs of this folder. None of them was compiled or run.
// For RGB classifiers whose resize.size is a number. The bitmap must have the configuration ARGB_8888.
import android.graphics.Bitmap
import android.graphics.Color
import org.json.JSONObject
import kotlin.math.min
import kotlin.math.roundToInt

/** Resize the shorter side, crop the center and normalize: planes of red, green and blue. */
fun prepare(picture: Bitmap, metadata: JSONObject): FloatArray {
    val steps = metadata.getJSONObject("preprocessing")
    val shorter = steps.getJSONObject("resize").getInt("size")
    val height = steps.getJSONArray("crop").getInt(0)
    val width = steps.getJSONArray("crop").getInt(1)

    // createScaledBitmap looks at four pixels only: halve first, which averages over all of them.
    var image = picture
    while (min(image.width, image.height) >= 2 * shorter) {
        image = Bitmap.createScaledBitmap(image, image.width / 2, image.height / 2, true)
    }
    val factor = shorter.toFloat() / min(image.width, image.height)
    image = Bitmap.createScaledBitmap(
        image, (image.width * factor).roundToInt(), (image.height * factor).roundToInt(), true)
    val pixels = IntArray(width * height)
    image.getPixels(pixels, 0, width, (image.width - width) / 2, (image.height - height) / 2, width, height)

    val normalize = !steps.getBoolean("normalize_in_graph")
    val scale = if (normalize) steps.getDouble("scale") else 1.0
    val input = FloatArray(3 * pixels.size)
    for (channel in 0 until 3) {
        val mean = if (normalize) steps.getJSONArray("mean").getDouble(channel) else 0.0
        val std = if (normalize) steps.getJSONArray("std").getDouble(channel) else 1.0
        for ((n, pixel) in pixels.withIndex()) {
            val value = when (channel) {
                0 -> Color.red(pixel)
                1 -> Color.green(pixel)
                else -> Color.blue(pixel)
            }
            input[channel * pixels.size + n] = ((value * scale - mean) / std).toFloat()
        }
    }
    return input
}

/** Return the shape of the input, such as (1, 3, 256, 256). */
fun inputShape(metadata: JSONObject): LongArray {
    val shape = metadata.getJSONObject("input").getJSONArray("shape")
    return LongArray(shape.length()) { shape.getLong(it) }
}

/** Return the label of the largest logit. */
fun topClass(logits: FloatArray, metadata: JSONObject): String {
    val best = logits.indices.maxByOrNull { logits[it] } ?: error("no logits")
    return metadata.getJSONArray("labels").optString(best, best.toString())
}
