package android.content.res

import java.io.InputStream

abstract class AssetManager {
    abstract fun open(name: String): InputStream
}
