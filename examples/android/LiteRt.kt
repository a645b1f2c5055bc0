// Dependency: com.google.ai.edge.litert:litert:2.3.0. Copy the metadata to the assets when you build the app:
// unzip -p model.tflite subquad.json > app/src/main/assets/subquad.json
import android.content.Context
import android.graphics.Bitmap
import com.google.ai.edge.litert.Accelerator
import com.google.ai.edge.litert.CompiledModel
import org.json.JSONObject

fun classify(context: Context, picture: Bitmap): String {
    val metadata = JSONObject(context.assets.open("subquad.json").bufferedReader().use { it.readText() })
    val options = CompiledModel.Options(Accelerator.CPU)
    CompiledModel.create(context.assets, "model.tflite", options).use { model ->
        val inputs = model.createInputBuffers()
        val outputs = model.createOutputBuffers()
        inputs[0].writeFloat(prepare(picture, metadata))
        model.run(inputs, outputs)
        return topClass(outputs[0].readFloat(), metadata)
    }
}
