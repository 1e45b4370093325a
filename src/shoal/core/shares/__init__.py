"""Who computes how many samples: balancing, splits, speeds and costs."""
