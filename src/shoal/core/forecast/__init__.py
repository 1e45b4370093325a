"""Forecast: how long a run will take, with an interval that holds in a stated share of all cases.

*Blocks* (`blocks`). A run is cut into blocks of about equal duration, and only the steps and seconds of each are kept.
What recurs (an evaluation, a checkpoint, the boundary of an epoch) is inside the blocks, so it needs no model once it
has happened. At most 64 blocks are kept: if there are more, neighbours are merged.

*Step time* (`step_time`). The mean seconds of a step are known with two errors: of the blocks that were seen, and of
those to come, which vary as much. A machine has moods that outlast a block, so blocks are correlated; with correlation
r, n blocks count as n·(1 - r)/(1 + r) independent ones. If steps get steadily slower or faster, as with growing
sequences, the past says nothing about the rest: the answer is "unknown", with the trend as the reason.

*Estimates* (`estimate`). An estimate is a value, the standard deviation of its error, and how many degrees of freedom
that has; its interval is Student's, on a logarithmic scale, because durations are positive.

*Time left* (`time_left`) belongs to a run that trains. A change of world begins new blocks. Until there are enough of
them, the step time of the world before is scaled by the number of members and given a wide interval.

Losses of members, waits for machines and restarts are not foretold: time spent on them is in no block.

May import: core modules, errors.
"""
