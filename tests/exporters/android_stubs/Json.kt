// The part of Android's org.json that the examples use; it works.
package org.json

class JSONException(message: String) : RuntimeException(message)

class JSONObject internal constructor(private val entries: Map<String, Any?>) {
    constructor(text: String) : this((Parser(text).value() as JSONObject).entries)

    fun get(name: String): Any = entries[name] ?: throw JSONException("no value for $name")
    fun has(name: String) = name in entries
    fun getBoolean(name: String) = get(name) as Boolean
    fun getDouble(name: String) = (get(name) as Number).toDouble()
    fun getInt(name: String) = (get(name) as Number).toInt()
    fun getString(name: String) = get(name) as String
    fun getJSONArray(name: String) = get(name) as JSONArray
    fun getJSONObject(name: String) = get(name) as JSONObject
    fun optBoolean(name: String, fallback: Boolean) = entries[name] as? Boolean ?: fallback
    fun optJSONArray(name: String) = entries[name] as? JSONArray
    fun optJSONObject(name: String) = entries[name] as? JSONObject
}

class JSONArray internal constructor(private val items: List<Any?>) {
    constructor(text: String) : this((Parser(text).value() as JSONArray).items)

    fun length() = items.size
    fun getDouble(n: Int) = (items[n] as Number).toDouble()
    fun getInt(n: Int) = (items[n] as Number).toInt()
    fun getLong(n: Int) = (items[n] as Number).toLong()
    fun getJSONObject(n: Int) = items[n] as JSONObject
    fun optString(n: Int, fallback: String) = items.getOrNull(n)?.toString() ?: fallback
}

private class Parser(text: String) {
    private val tokens = Regex("""\s*("(?:[^"\\]|\\.)*"|[^\s"{}\[\]:,]+|[{}\[\]:,])""").findAll(text)
        .map { it.groupValues[1] }.iterator()

    fun value(token: String = tokens.next()): Any? = when {
        token == "{" -> JSONObject(items("}") { name -> tokens.next().let { string(name) to value() } }.toMap())
        token == "[" -> JSONArray(items("]") { value(it) })
        token.startsWith("\"") -> string(token)
        token == "null" -> null
        token == "true" || token == "false" -> token == "true"
        else -> token.toIntOrNull() ?: token.toDouble()
    }

    private fun string(token: String) = token.substring(1, token.length - 1)        // without escapes

    private fun <T> items(end: String, item: (String) -> T): List<T> {
        val found = mutableListOf<T>()
        var token = tokens.next()
        while (token != end) {
            found += item(token)
            token = tokens.next()
            if (token == ",") token = tokens.next()
        }
        return found
    }
}
