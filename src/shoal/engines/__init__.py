"""What starts agents on machines: one file an engine, behind one interface."""
