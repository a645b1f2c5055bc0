// Closeable instead of AutoCloseable, whose `use` is not in the standard library of Kotlin 1.3.
package ai.onnxruntime

import java.io.Closeable
import java.nio.FloatBuffer
import java.nio.LongBuffer

enum class OnnxJavaType { FLOAT, INT64 }

abstract class TensorInfo {
    abstract val type: OnnxJavaType
}

interface OnnxValue : Closeable

abstract class OnnxTensor : OnnxValue {
    abstract val info: TensorInfo
    abstract val floatBuffer: FloatBuffer
    abstract val longBuffer: LongBuffer

    companion object {
        fun createTensor(environment: OrtEnvironment, data: FloatBuffer, shape: LongArray): OnnxTensor =
            TODO("$environment $data $shape")
    }
}

abstract class OnnxModelMetadata {
    abstract val customMetadata: Map<String, String>
}

abstract class OrtSession : Closeable {
    abstract val metadata: OnnxModelMetadata
    abstract fun run(inputs: Map<String, OnnxTensor>): Result

    abstract class Result : Closeable, Iterable<Map.Entry<String, OnnxValue>>
}

abstract class OrtEnvironment {
    abstract fun createSession(model: ByteArray): OrtSession

    companion object {
        fun getEnvironment(): OrtEnvironment = TODO()
    }
}
