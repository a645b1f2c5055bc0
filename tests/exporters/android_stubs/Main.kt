// Run the examples with a model whose outputs are given: a folder holds metadata.json, size.json, picture.argb and
// NAME.f32 for each output, with the highest byte first. Writes the model's input.f32, and prints what is found.
import android.graphics.Bitmap
import org.json.JSONArray
import org.json.JSONObject
import java.io.File
import java.nio.ByteBuffer

fun main(folders: Array<String>) = folders.map(::File).forEach { folder ->
    val model = object : Model {
        override val metadata = JSONObject(folder.resolve("metadata.json").readText())

        override fun run(input: FloatArray): Map<String, FloatArray> {
            val bytes = ByteBuffer.allocate(4 * input.size).also { it.asFloatBuffer().put(input) }.array()
            folder.resolve("input.f32").writeBytes(bytes)
            return folder.listFiles()!!.filter { it.extension == "f32" && it.name != "input.f32" }
                .associate { it.nameWithoutExtension to floats(it) }
        }

        private fun floats(file: File) = ByteBuffer.wrap(file.readBytes()).asFloatBuffer().let { buffer ->
            FloatArray(buffer.remaining()).also { buffer.get(it) }
        }

        override fun close() = Unit
    }
    val size = JSONArray(folder.resolve("size.json").readText())
    val colors = ByteBuffer.wrap(folder.resolve("picture.argb").readBytes()).asIntBuffer()
    val picture = Bitmap(size.getInt(0), size.getInt(1), IntArray(colors.remaining()).also { colors.get(it) })
    when (model.metadata.getString("task")) {
        "classification" -> println("\"${model.classify(picture)}\"")
        "detection" -> println(model.detect(picture).map {
            listOf("\"${it.label}\"", it.score, it.left, it.top, it.right, it.bottom)
        })
        else -> println(model.segment(picture).toList())
    }
}
