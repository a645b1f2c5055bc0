// Dependency: com.microsoft.onnxruntime:onnxruntime-android:1.27.0. It runs .onnx and .ort files. They are
// written with ONNX Runtime 1.32; whether 1.27 reads all of them is not tested.
import ai.onnxruntime.OnnxTensor
import ai.onnxruntime.OrtEnvironment
import android.content.Context
import android.graphics.Bitmap
import java.nio.FloatBuffer
import org.json.JSONObject

fun classify(context: Context, picture: Bitmap): String {
    val environment = OrtEnvironment.getEnvironment()
    val bytes = context.assets.open("model.onnx").use { it.readBytes() }
    environment.createSession(bytes).use { session ->
        val metadata = JSONObject(session.metadata.customMetadata.getValue("subquad"))
        val input = FloatBuffer.wrap(prepare(picture, metadata))
        OnnxTensor.createTensor(environment, input, inputShape(metadata)).use { tensor ->
            session.run(mapOf("image" to tensor)).use { outputs ->
                val logits = (outputs.get(0) as OnnxTensor).floatBuffer
                return topClass(FloatArray(logits.remaining()).also { logits.get(it) }, metadata)
            }
        }
    }
}
