// Dependency: org.pytorch:executorch-android, with the version of the Python package that wrote the file.
import android.content.Context
import android.graphics.Bitmap
import java.io.File
import org.json.JSONObject
import org.pytorch.executorch.EValue
import org.pytorch.executorch.Module
import org.pytorch.executorch.Tensor

fun classify(context: Context, picture: Bitmap): String {
    val file = File(context.filesDir, "model.pte")
    context.assets.open("model.pte").use { asset -> file.outputStream().use { asset.copyTo(it) } }
    val module = Module.load(file.absolutePath)
    try {
        val metadata = JSONObject(module.execute("metadata")[0].toStr())
        val input = Tensor.fromBlob(prepare(picture, metadata), inputShape(metadata))
        val logits = module.forward(EValue.from(input))[0].toTensor().dataAsFloatArray
        return topClass(logits, metadata)
    } finally {
        module.destroy()
    }
}
