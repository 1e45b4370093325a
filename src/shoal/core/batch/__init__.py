"""Global batch size: how large a batch still pays, and what that means for the learning rate.

*Gradient noise* (`gradient_noise`). The gradient of a batch of B samples is the true gradient G plus noise whose
variance is S/B, where S is the variance of one sample's gradient, summed over all parameters. The noise scale
B_noise = S/|G|² is the batch at which both are equal: far below it, doubling the batch halves the number of steps; far
above, it only doubles their cost. With unequal shares b_i and mean gradients g_i, the batch gradient is
g = Σ b_i/B·g_i, and

    S = (Σ b_i·|g_i|² - B·|g|²) / (n - 1)        |G|² = |g|² - S/B

are unbiased for any n ≥ 2 shares. Each is averaged over steps by itself, since the mean of a quotient would be biased.
With one member its micro-batches take the part of the shares. Formulas that assume equal shares are off by a factor
of 2.8 on mixed hardware. Only squared norms travel, with the step reports.

*Goodput* (`goodput`). A step with batch B takes T(B) seconds, predicted by the share balancer, and is worth
(B_noise + B_0)/(B_noise + B) per sample compared with the script's own batch B_0. The product

    B/T(B) · (B_noise + B_0)/(B_noise + B)

is progress per second. `auto_batch` picks its maximum over some 60 sizes within the user's bounds, and changes the
batch only if that gains more than 5 % after the cost of the change, twice in a row.

*Learning rate.* The script's learning rate is tuned for B_0. For SGD it is multiplied by AdaScale's gain
(S/B_0 + |G|²)/(S/B + |G|²), for Adam and its relatives by sqrt(B/B_0). Schedules advance by *progress*, the number of
steps with B_0 that a step stands for, so that a decay after 30 epochs' worth of progress comes when it should.

*Agreement.* Every member decides by itself from the same figures with operations that IEEE 754 defines exactly, so all
of them change to the same batch at the same step, and nothing has to be sent.

May import: core modules, core/shares, errors.
"""
