"""The package's text comes in; annotated modules, callers, excerpts and coloured code go out."""
