"""Answers that are held to a form. The door: `compiler.PendingGrammars`."""
