"""Where a student's code runs, and what comes out of there. This file imports nothing."""
