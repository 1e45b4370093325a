"""What happens in a run, as event files that TensorBoard reads; written without TensorFlow and without protobuf."""
