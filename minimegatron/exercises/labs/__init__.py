"""Break it on purpose: known mistakes, and a step of a copy that has one. This file imports nothing."""
