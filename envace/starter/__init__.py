"""The bundled world and the bundled policy."""
