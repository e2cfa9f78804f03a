"""Functions of the package and records come in; numbers, tables and figures of pages go out."""
