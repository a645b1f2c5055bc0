// Dependency: com.google.ai.edge.litert:litert:2.3.0. Copy the metadata to the assets when you build the app:
// unzip -p model.tflite subquad.json > app/src/main/assets/subquad.json
import android.content.Context
import com.google.ai.edge.litert.Accelerator
import com.google.ai.edge.litert.CompiledModel
import org.json.JSONObject

/** A model among the assets. litert_torch names its input args_0, and its outputs output_0, output_1, ... */
class LiteRtModel(context: Context, asset: String = "model.tflite", metadataAsset: String = "subquad.json") : Model {
    private val model = CompiledModel.create(context.assets, asset, CompiledModel.Options(Accelerator.CPU))
    override val metadata = JSONObject(context.assets.open(metadataAsset).bufferedReader().use { it.readText() })

    override fun run(input: FloatArray): Map<String, FloatArray> {
        val image = model.createInputBuffer("args_0").apply { writeFloat(input) }
        val names = outputNames(metadata)
        val buffers = names.indices.associate { "output_$it" to model.createOutputBuffer("output_$it") }
        try {
            model.run(mapOf("args_0" to image), buffers)
            // Labels of a segmenter are integers; they follow from the logits.
            return names.withIndex().filter { it.value != "labels" }
                .associate { (n, name) -> name to buffers.getValue("output_$n").readFloat() }
        } finally {
            (buffers.values + image).forEach { it.close() }
        }
    }

    override fun close() = model.close()
}
