"""Both packages' names come in; the table of symbols, arguments and older names goes out."""
