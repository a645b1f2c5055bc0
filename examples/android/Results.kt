// What the outputs of a model mean, shared by the programs of this folder. Their models are OnnxModel, ExecuTorchModel
// and LiteRtModel: OnnxModel(context).use { it.classify(picture) }. Keep a model that is used more than once.
import android.graphics.Bitmap
import org.json.JSONObject
import kotlin.math.max
import kotlin.math.min

/** An exported model. */
interface Model : AutoCloseable {
    val metadata: JSONObject

    /** Run the model on a picture's [Input.values], and return its outputs by their names. */
    fun run(input: FloatArray): Map<String, FloatArray>
}

/** Return the shape of the input, such as (1, 3, 256, 256). */
fun inputShape(metadata: JSONObject): LongArray {
    val shape = metadata.getJSONObject("input").getJSONArray("shape")
    return LongArray(shape.length()) { shape.getLong(it) }
}

/** Return the width and height of the input. */
private fun inputSize(metadata: JSONObject): Pair<Int, Int> {
    val layout = metadata.getJSONObject("input").getString("layout")
    return inputShape(metadata).let { Pair(it[layout.indexOf('W')].toInt(), it[layout.indexOf('H')].toInt()) }
}

/** Return the names of the outputs in their order in the file. */
fun outputNames(metadata: JSONObject): List<String> {
    val outputs = metadata.getJSONArray("outputs")
    return List(outputs.length()) { outputs.getJSONObject(it).getString("name") }
}

/** An object in a picture, with its box in the picture's pixels. */
class Detection(
    val label: String, val score: Float, val left: Float, val top: Float, val right: Float, val bottom: Float)

/** Return the label of the largest logit. */
fun Model.classify(picture: Bitmap): String {
    val logits = run(prepare(picture, metadata).values).values.first()
    return label(best(logits.size) { logits[it].toDouble() })
}

/** Return the objects with a score of at least [least], the best first. */
fun Model.detect(picture: Bitmap, least: Float = 0.3f): List<Detection> {
    val input = prepare(picture, metadata)
    val outputs = run(input.values)
    val settings = metadata.getJSONObject("postprocessing")
    val (boxes, scores) = Pair(outputs.getValue("boxes"), outputs.getValue("scores"))
    val found = if (settings.getBoolean("in_graph")) {
        scores.indices.map { Candidate(it, outputs.getValue("labels")[it].toInt(), scores[it]) }
    } else {
        suppress(boxes, scores, settings)
    }
    return found.filter { it.score >= least }.map {
        fun x(n: Int) = boxes[4 * it.box + n].coerceIn(0f, input.width.toFloat()) * picture.width / input.width
        fun y(n: Int) = boxes[4 * it.box + n].coerceIn(0f, input.height.toFloat()) * picture.height / input.height
        Detection(label(it.label), it.score, x(0), y(1), x(2), y(3))
    }
}

/** Return the class of each pixel of the picture, line by line: indices of the metadata's labels. */
fun Model.segment(picture: Bitmap): IntArray {
    val input = prepare(picture, metadata)
    val outputs = run(input.values)
    val (width, _) = inputSize(metadata)
    val labels = outputs["labels"]                                  // of the model's input, which may be padded
    val likeliest = if (labels == null) likeliest(outputs.getValue("logits"), metadata) else null
    return IntArray(picture.width * picture.height) {
        val x = ((it % picture.width + 0.5) * input.width / picture.width).toInt()
        val y = ((it / picture.width + 0.5) * input.height / picture.height).toInt()
        likeliest?.invoke(x, y) ?: labels!![y * width + x].toInt()
    }
}

private fun Model.label(n: Int) = metadata.getJSONArray("labels").optString(n, n.toString())

private fun best(count: Int, value: (Int) -> Double): Int {
    var best = 0
    for (n in 1 until count) if (value(n) > value(best)) best = n
    return best
}

/** Return a function from a pixel (x, y) of the model's input to its class: bilinear resizing, then the maximum. */
private fun likeliest(logits: FloatArray, metadata: JSONObject): (Int, Int) -> Int {
    val output = metadata.getJSONArray("outputs").getJSONObject(outputNames(metadata).indexOf("logits"))
    val (classes, height, width) = List(3) { output.getJSONArray("shape").getInt(it + 1) }
    val (columnCount, lineCount) = inputSize(metadata)
    val aligned = metadata.getJSONObject("postprocessing").getJSONObject("resize").getBoolean("align_corners")
    val lines = List(lineCount) { Neighbors(it, height, lineCount, aligned) }
    val columns = List(columnCount) { Neighbors(it, width, columnCount, aligned) }
    return { x, y ->
        val (line, column) = Pair(lines[y], columns[x])
        best(classes) { n ->
            fun mixed(x: Int) = logits[(n * height + line.first) * width + x] * (1 - line.weight) +
                logits[(n * height + line.second) * width + x] * line.weight
            mixed(column.first) * (1 - column.weight) + mixed(column.second) * column.weight
        }
    }
}

private class Candidate(val box: Int, val label: Int, val score: Float)

/** Non-maximum suppression for each class: boxes (n, 4), scores (n, classes). */
private fun suppress(boxes: FloatArray, scores: FloatArray, settings: JSONObject): List<Candidate> {
    val count = boxes.size / 4
    val classes = scores.size / count
    val least = settings.getDouble("score_threshold").toFloat()
    val most = settings.getDouble("iou_threshold").toFloat()
    val chosen = (0 until classes).flatMap { label ->
        val kept = mutableListOf<Candidate>()
        (0 until count).map { Candidate(it, label, scores[it * classes + label]) }
            .filter { it.score > least }
            .sortedByDescending { it.score }
            .take(settings.getInt("candidates_per_class"))
            .filterTo(kept) { candidate -> kept.all { overlap(boxes, it.box, candidate.box) <= most } }
    }
    return chosen.sortedByDescending { it.score }.take(settings.getInt("max_detections"))
}

/** Return the intersection over union of two boxes. */
private fun overlap(boxes: FloatArray, a: Int, b: Int): Float {
    fun area(n: Int) = (boxes[4 * n + 2] - boxes[4 * n]) * (boxes[4 * n + 3] - boxes[4 * n + 1])
    fun shared(at: Int) =
        max(0f, min(boxes[4 * a + at + 2], boxes[4 * b + at + 2]) - max(boxes[4 * a + at], boxes[4 * b + at]))
    val shared = shared(0) * shared(1)
    return shared / max(area(a) + area(b) - shared, 1e-6f)
}
