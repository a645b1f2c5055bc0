package org.pytorch.executorch

enum class DType { FLOAT, INT64 }

abstract class Tensor {
    abstract val dataAsFloatArray: FloatArray
    abstract val dataAsLongArray: LongArray
    abstract fun dtype(): DType

    companion object {
        fun fromBlob(data: FloatArray, shape: LongArray): Tensor = TODO("$data $shape")
    }
}

abstract class EValue {
    abstract fun toStr(): String
    abstract fun toTensor(): Tensor

    companion object {
        fun from(tensor: Tensor): EValue = TODO("$tensor")
    }
}

abstract class Module {
    abstract fun execute(method: String, vararg inputs: EValue): Array<EValue>
    abstract fun forward(vararg inputs: EValue): Array<EValue>
    abstract fun destroy()

    companion object {
        fun load(path: String): Module = TODO(path)
    }
}
