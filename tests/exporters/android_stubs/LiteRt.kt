package com.google.ai.edge.litert

import android.content.res.AssetManager

enum class Accelerator { CPU }

abstract class TensorBuffer : AutoCloseable {
    abstract fun writeFloat(data: FloatArray)
    abstract fun readFloat(): FloatArray
}

abstract class CompiledModel : AutoCloseable {
    class Options(vararg val accelerators: Accelerator)

    abstract fun createInputBuffer(inputName: String, signature: String? = null): TensorBuffer
    abstract fun createOutputBuffer(outputName: String, signature: String? = null): TensorBuffer
    abstract fun run(
        inputs: Map<String, TensorBuffer>, outputs: Map<String, TensorBuffer>, signature: String? = null)

    companion object {
        fun create(assets: AssetManager, name: String, options: Options): CompiledModel = TODO("$assets $name $options")
    }
}
