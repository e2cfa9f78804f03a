"""What a student has: a folder, pages of words, a watch over files. This file imports nothing."""
