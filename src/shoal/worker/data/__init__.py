"""Data for the training loop, in any framework: a member's share of every global batch, read ahead of time.

Theory of operation
-------------------
Which samples make up global batch k is a pure function of seed, epoch and k (`core.data.sample_order`), and how many of
them each member computes is decided by the share balancer (`core.shares`). Every member computes both by itself and
gets the same answer, so no sample is handed out by a server and none is lost when a member disappears: after a change
of world the remaining members simply read other spans of the same batches.

**Shares.** A `Feed` turns (step, world, rank) into the micro-batches of one member. A share is a contiguous span of the
global batch; it is cut into micro-batches of at most `micro_batch_size` samples. A member with an empty share (a
catching-up rank, or a very slow member) gets a small placeholder batch with 0 samples: it runs the same computation,
and the result has weight 0.

**Cursor.** The position in the data is part of the training state. For an indexable dataset it is the step alone. A
step that did not commit is read again; its batches are the same, because before a sample is read the global random
generators are seeded from (seed, epoch, sample). What augmentation draws does not depend on the reader, nor on order.

**Reading ahead.** `ReadAhead` reads the spans of later steps in threads or processes. Which spans those are can only be
predicted, because shares may change: `PredictRead` maps a later step to the `ReadKey` that will probably be requested.
When the prediction changes, reads that no longer fit are dropped; a key that was not predicted is read on demand. So
prediction affects speed only, never what is trained.

**Streams.** Data that cannot be indexed comes as shards, each readable only from its start (or by skipping). Shards are
assigned to a fixed number of *lanes*; lane l contributes its next quota of samples to every step, and a member's share
is a range of lanes. A `Lane` keeps the samples of the last few steps, because an uncommitted step is taken again. The
length of a shard is learned when its end is reached and travels with the training state: with it, a resumed or moved
lane skips whole shards without reading them. The epoch ends when no lane of any member has another sample; each step
report carries that bit (`has_more`), so all members see the end at the same step.

**Rounds.** Local SGD exchanges parameters once per round of several batches. `RoundFeed` gives a member its share of
the round as local batches, each read when it is due.

May import: core, errors.
"""
