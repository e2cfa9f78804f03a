"""Grades a folder of submissions, of which some may be hostile. This file imports nothing.

In the order to read it:

* `submissions`: finds the students' files and reads them; nothing of theirs is run or unpacked here.
  It calls `collection` (which files are taken), `archives` (zip and tar, in a process of its own),
  `file_names` and `source_text` (what a file is called, and which encoding it has).
* `grade`: one cell per student and exercise, several at a time; what a grade says.
* `remarks`: what the teacher is told to look at; `remarks_apart` asks for it in a process of its own.
* `template`: a process that has imported torch, and is forked for every cell.
* `cell`: the closed room: namespaces, another user, limits, and the end of all that is in it.
* `reports`: CSV, JSON, JUnit, and Gradescope's results.json.
"""
