// Dependency: com.google.ai.edge.litert:litert:2.3.0. Copy the metadata to the assets when you build the app:
// unzip -p model.tflite subquad.json > app/src/main/assets/subquad.json
import android.content.Context
import com.google.ai.edge.litert.Accelerator
import com.google.ai.edge.litert.CompiledModel
import org.json.JSONObject

/** A model among the assets, whose tensors have the names that the metadata state. */
class LiteRtModel(context: Context, asset: String = "model.tflite", metadataAsset: String = "subquad.json") : Model {
    private val model = CompiledModel.create(context.assets, asset, CompiledModel.Options(Accelerator.CPU))
    override val metadata = JSONObject(context.assets.open(metadataAsset).bufferedReader().use { it.readText() })

    override fun run(input: FloatArray): Map<String, FloatArray> {
        val name = metadata.getJSONObject("input").getString("name")
        val image = model.createInputBuffer(name).apply { writeFloat(input) }
        val buffers = outputNames(metadata).associateWith { model.createOutputBuffer(it) }
        try {
            model.run(mapOf(name to image), buffers)
            // Labels of a segmenter are integers; they follow from the logits.
            return buffers.filterKeys { it != "labels" }.mapValues { it.value.readFloat() }
        } finally {
            (buffers.values + image).forEach { it.close() }
        }
    }

    override fun close() = model.close()
}
