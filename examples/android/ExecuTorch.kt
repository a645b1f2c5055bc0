// Dependency: org.pytorch:executorch-android, with the version of the Python package that wrote the file.
import android.content.Context
import java.io.File
import org.json.JSONObject
import org.pytorch.executorch.DType
import org.pytorch.executorch.EValue
import org.pytorch.executorch.Module
import org.pytorch.executorch.Tensor

/** A model among the assets. ExecuTorch reads files, so it is copied to one. */
class ExecuTorchModel(context: Context, asset: String = "model.pte") : Model {
    private val module = File(context.filesDir, asset).let { file ->
        context.assets.open(asset).use { stream -> file.outputStream().use { stream.copyTo(it) } }
        Module.load(file.absolutePath)
    }
    override val metadata = JSONObject(module.execute("metadata")[0].toStr())

    override fun run(input: FloatArray): Map<String, FloatArray> {
        val outputs = module.forward(EValue.from(Tensor.fromBlob(input, inputShape(metadata))))
        return outputNames(metadata).zip(outputs.map { floats(it.toTensor()) }).toMap()
    }

    private fun floats(tensor: Tensor): FloatArray {
        if (tensor.dtype() != DType.INT64) return tensor.dataAsFloatArray
        return tensor.dataAsLongArray.let { labels -> FloatArray(labels.size) { labels[it].toFloat() } }
    }

    override fun close() = module.destroy()
}
