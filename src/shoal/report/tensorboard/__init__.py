"""Event files for TensorBoard, written by the coordinator without TensorFlow and without protobuf.

Theory of operation
-------------------
What is written. A run has two kinds of rows. Scalars come from its view: loss, epoch, speed, batch size, idle time, the
world, the share of every member, and the metrics of the script and the evaluator. Texts come from its story, the same
lines as in `shoal why`, under one of three tags: "worlds", "decisions" (shares, batch size, memory) and "story".

When. `rows` takes scalars at most once a second and less often in old or large runs, because TensorBoard draws about a
thousand points a line whatever it is given. A step gets one row of scalars; while the step stays the same, only metrics
that changed are written. The end of a run is always written. Every line of the story is written.

Steps that go back. TensorBoard takes an event with a lower step than the one before as a restart, and drops the later
steps that it has read. For scalars that is right: a run that went back to a checkpoint repeats those steps. Texts would
be lost, so their steps never decrease, and a text replaces the earlier text of its tag and step by repeating all of it.

The format. A file is a sequence of TFRecords, each of which holds one `tensorflow.Event` message. `tfevents` encodes
the few fields that are needed by hand::

    record   length (uint64, little endian) | masked CRC-32C of the length | data | masked CRC-32C of the data
    Event    1 wall_time: double, 2 step: int64, 3 file_version: string (first event only), 5 summary: Summary
    Summary  1 value: repeated Value
    Value    1 tag: string, then 2 simple_value: float, or 8 tensor: TensorProto with 9 metadata (plugin "text")

Files. `writer` collects rows on the coordinator's event loop and writes them on another thread, so the loop never waits
for the disk. A file is only appended to, and by whole records: after a failed write the torn record is cut off, since a
reader cannot continue behind one. A coordinator that starts again begins a new file. Errors of the disk never reach the
run: rows wait in memory, at most a thousand a run, `shoal status` shows the reason, and one warning goes to the log.

May import: shoal.core, shoal.wire.
"""
