package android.content

import android.content.res.AssetManager
import java.io.File

abstract class Context {
    abstract val assets: AssetManager
    abstract val filesDir: File
}
