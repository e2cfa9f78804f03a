"""docs/, notebooks, exercises and what the other rooms make come in; pages for MkDocs go out."""
