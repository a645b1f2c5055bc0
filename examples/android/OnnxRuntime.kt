// Dependency: com.microsoft.onnxruntime:onnxruntime-android:1.27.0. It runs .onnx and .ort files. They are
// written with ONNX Runtime 1.32; whether 1.27 reads all of them is not tested.
import ai.onnxruntime.OnnxJavaType
import ai.onnxruntime.OnnxTensor
import ai.onnxruntime.OrtEnvironment
import android.content.Context
import java.nio.FloatBuffer
import org.json.JSONObject

/** A model among the assets. */
class OnnxModel(context: Context, asset: String = "model.onnx") : Model {
    private val environment = OrtEnvironment.getEnvironment()
    private val session = environment.createSession(context.assets.open(asset).use { it.readBytes() })
    override val metadata = JSONObject(session.metadata.customMetadata.getValue("subquad"))

    override fun run(input: FloatArray): Map<String, FloatArray> =
        OnnxTensor.createTensor(environment, FloatBuffer.wrap(input), inputShape(metadata)).use { tensor ->
            session.run(mapOf("image" to tensor)).use { outputs ->
                outputs.associate { (name, value) -> name to floats(value as OnnxTensor) }
            }
        }

    private fun floats(tensor: OnnxTensor): FloatArray {
        if (tensor.info.type == OnnxJavaType.INT64) {               // labels
            return tensor.longBuffer.let { buffer -> FloatArray(buffer.remaining()) { buffer.get().toFloat() } }
        }
        return tensor.floatBuffer.let { buffer -> FloatArray(buffer.remaining()).also { buffer.get(it) } }
    }

    override fun close() = session.close()
}
