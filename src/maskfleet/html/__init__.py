"""The shared look of every HTML page: page shell, SVG charts and embedded images."""
