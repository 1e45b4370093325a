"""What a training loop is fed with, in any framework: order and shares become batches, read wherever they are due."""
